"""What all commands share: how results and errors are printed, and with which status a command ends."""

import io
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.console import Console, RenderableType

from .filesystem import failure_of_file
from .protocol.errors import StorageError
from .signals import signals_call
from .tables import error_plain, error_view

EXIT_FINDINGS: Final = 1
EXIT_STORAGE_ERROR: Final = 3
# 0 is fine, and 2 is the command-line library's own, for usage.

CLIENT_NAME: Final = "storage-worker command"
PIPED_CHARS: Final = 1_000

PathArgument = Annotated[Path, typer.Argument(help="The database file.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for a program instead of tables.")]
TimeoutOption = Annotated[float, typer.Option(min=0.01, max=600.0, help="Seconds for the whole call.")]


def examples(*lines: str) -> str:
    """The end of a command's help."""
    return "Examples:\n\n" + "\n\n".join(f"$ {line}" for line in lines)


@contextmanager
def typed_errors(*, json: bool, writes: bool = False) -> Iterator[None]:
    """A storage error of the block is printed, readable or as JSON, and ends the command with its exit status.

    Where the block `writes`, people are told whether that was committed, too; JSON always has it.
    """
    try:
        yield
    except StorageError as error:
        if json:
            print_json(error_plain(error))
        else:
            Console(stderr=True).print(error_view(error, writes=writes), soft_wrap=True)
        raise typer.Exit(EXIT_STORAGE_ERROR) from error


@contextmanager
def tidy_ending() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as SIGINT does, so that it removes what it has begun to write.

    The exit status is then 128 and the number of the signal, as a shell tells it.
    """

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with signals_call(end, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def written_out() -> Iterator[None]:
    """What cannot be written to the standard output, as on a full disk, is told and ends the command.

    A pipe that nobody reads any more ends it without a word.
    """
    with typed_errors(json=False):
        try:
            yield
        except (StorageError, BrokenPipeError):
            # Some of ours are OSErrors, too.
            raise
        except OSError as error:
            raise failure_of_file("cannot write", "to standard output", error) from error


def print_json(value: Any) -> None:
    """Print a value as indented JSON, in UTF-8 wherever it goes."""
    with written_out():
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
        sys.stdout.flush()


def console() -> Console:
    """Where results for people go: as wide as the terminal; a file or a pipe has no width, nothing is wrapped there."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What the terminal's encoding does not have is written out, as control characters are.
        sys.stdout.reconfigure(errors="backslashreplace")
    found = Console()
    return found if found.is_terminal else Console(width=PIPED_CHARS)


def print_result(view: Callable[[], RenderableType], plain: Callable[[], Any], *, json: bool) -> None:
    """Print a result, readable or as JSON."""
    if json:
        print_json(plain())
    else:
        with written_out():
            console().print(view())
