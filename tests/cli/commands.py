"""The command line, run in this process."""

import json
from typing import Any

from typer.testing import CliRunner, Result

from storage_worker.cli import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def run_json(*arguments: object, status: int = 0) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)
