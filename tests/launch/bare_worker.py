"""The least that a supervisor takes for a worker, for tests that start very many: it answers and stays."""

import os
import select

host = os.getppid()
os.write(1, bytes.fromhex(os.environ["SW_ANSWER"]))
os.close(1)
while os.getppid() == host:
    select.select([], [], [], 1.0)
