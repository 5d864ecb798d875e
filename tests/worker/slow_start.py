"""A store whose module takes as long to import as the test wants."""

import os

from storage_worker import Store
from tests.worker.gates import stand_at

slow = Store("slow")

stand_at(os.environ["SW_TEST_GATE"])
