"""Imported first by a script: runs it again in the project's own environment where its packages are missing.

So each script is one command on a machine that has Python and nothing else prepared.
"""

import importlib.util
import os
import sys
from pathlib import Path

ENVIRONMENT = Path(__file__).with_name("environment")
ENTER = '. "$1"; environment demo; shift; exec "$venv/bin/python" "$@"'


def entered() -> bool:
    """Whether the project and what it needs can be imported here."""
    return all(importlib.util.find_spec(name) is not None for name in ("storage_worker", "msgspec", "typer"))


def enter() -> None:
    """Replace this process by the same script in the project's environment, making that first if need be."""
    command = ["bash", "-c", ENTER, "bash", str(ENVIRONMENT), *sys.argv]
    os.execvp("bash", command)  # noqa: S606 (a fixed text with our own arguments behind it)


if not entered():
    enter()
