"""The commands that look into a running worker: status, once or again and again, and its metrics."""

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.live import Live

from . import launch
from .cli_output import (
    CLIENT_NAME,
    EXIT_FINDINGS,
    JsonOption,
    PathArgument,
    TimeoutOption,
    console,
    examples,
    print_result,
    typed_errors,
    written_out,
)
from .client.client import Client
from .filesystem import check_path
from .ownership import is_owned
from .protocol.errors import WorkerUnavailableError
from .protocol.status import as_builtins
from .tables import status_view

app = typer.Typer()

WATCH_SECONDS_MIN, WATCH_SECONDS_MAX = 0.1, 3600.0


def _running(path: Path, timeout: float) -> Client:
    """A client of the worker that serves the path now; `WorkerUnavailableError` where none does."""
    if not is_owned(check_path(path)):
        raise WorkerUnavailableError(
            f"no worker serves {path}; start one with: storage-worker serve {path}",
            outcome="not_committed",
            details={"path": os.path.abspath(path)},
        )
    return launch.find(path, role="admin", name=CLIENT_NAME, timeout=timeout)


@app.command(
    epilog=examples(
        "storage-worker status app.db",
        "storage-worker status app.db --json",
        "storage-worker status app.db --watch --every 2",
    )
)
def status(
    path: PathArgument,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")] = False,
    every: Annotated[
        float, typer.Option(min=WATCH_SECONDS_MIN, max=WATCH_SECONDS_MAX, help="Seconds between two looks.")
    ] = 1.0,
    timeout: TimeoutOption = 5.0,
    json: JsonOption = False,
) -> None:
    """Show everything that the running worker says about itself; exit status 1 where it is degraded.

    With --watch and --json each look is one line of JSON.
    """
    with typed_errors(json=json), _running(path, timeout) as client:
        if watch:
            _watch(client, every, timeout, json=json)
            return
        found = client.status(timeout=timeout)
    print_result(lambda: status_view(found), lambda: as_builtins(found), json=json)
    if found.health.state != "healthy":
        raise typer.Exit(EXIT_FINDINGS)


def _watch(client: Client, every: float, timeout: float, *, json: bool) -> None:
    """Show the status until the user interrupts it, or raise why there is none any more."""
    show = _show_line if json else console().print
    try:
        if json or not sys.stdout.isatty():
            while True:
                found = client.status(timeout=timeout)
                with written_out():
                    show(as_builtins(found) if json else status_view(found))
                time.sleep(every)
        with Live(screen=True, auto_refresh=False) as live:
            while True:
                live.update(status_view(client.status(timeout=timeout)), refresh=True)
                time.sleep(every)
    except KeyboardInterrupt:
        return


def _show_line(value: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.flush()


@app.command(
    epilog=examples(
        "storage-worker metrics app.db",
        "storage-worker metrics app.db > /var/lib/node_exporter/textfile/app.prom",
    )
)
def metrics(path: PathArgument, timeout: TimeoutOption = 5.0) -> None:
    """Print everything in the status of the running worker as metrics for Prometheus."""
    # Only this command needs the library, which takes as long to load as all the rest.
    from .metrics import metrics_text  # noqa: PLC0415

    with typed_errors(json=False), _running(path, timeout) as client:
        text = metrics_text(client.status(timeout=timeout))
    with written_out():
        sys.stdout.buffer.write(text.encode())
        sys.stdout.flush()
