import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CASES = "tests/store/typing_cases.py"


def test_checkers_know_arguments_and_results(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path), CASES]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode in {0, 1}, ended.stderr
    # Faults of other modules are found where all of them are checked.
    assert [line for line in ended.stdout.splitlines() if line.startswith(CASES)] == []
