"""Python programs of their own that tests run."""

import os
import subprocess
import sys
from pathlib import Path

from storage_worker.spawn import module_path


def start_program(
    code: str, *, forms: tuple[str, ...] | None = None, cwd: Path | None = None
) -> "subprocess.Popen[str]":
    """Run a program with pipes; `forms` are the interpreter's arguments where the code is no `-c`."""
    return subprocess.Popen(
        [sys.executable, *(("-c", code) if forms is None else forms)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(module_path())},
    )


def first_line(program: "subprocess.Popen[str]") -> str:
    """What it prints first; its complaint where it prints nothing."""
    assert program.stdout is not None
    line = program.stdout.readline()
    assert line, program.communicate()[1]
    return line.strip()


def killed(program: "subprocess.Popen[str]") -> None:
    """Kill it and forget its pipes."""
    program.kill()
    program.communicate()
