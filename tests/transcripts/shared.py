"""Where the real data sets are, and what is skipped where they are not."""

import os
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_shared = pytest.mark.skipif(
    not SHARED.is_dir() and not os.environ.get("CI"), reason="the shared data sets are not beside the project"
)
