"""The `storage-worker` command: serve, look into, ask, check, copy and stop a database."""

import json as standard_json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, cast, get_args

import msgspec
import psutil
import typer
from rich.text import Text

from . import cli_conversation, cli_status, conversation_client, launch
from .cli_output import (
    CLIENT_NAME,
    EXIT_FINDINGS,
    JsonOption,
    PathArgument,
    TimeoutOption,
    examples,
    print_result,
    tidy_ending,
    typed_errors,
)
from .client.client import Client
from .conversation import payload_client
from .conversation.payload_copies import copy_payloads
from .filesystem import SIDE_DIRECTORY_SUFFIX, check_path
from .foreground import Foreground
from .ownership import is_owned
from .protocol.errors import (
    DatabasePathError,
    DeadlineExceededError,
    InvalidRequestError,
    StorageCorruptError,
)
from .protocol.limits import DEFAULT_LIMITS, Limits
from .protocol.values import Value
from .tables import rows_plain, rows_view, size
from .version import VERSION

app = typer.Typer(
    name="storage-worker",
    help="One worker process owns a SQLite database; every other process reads and writes it through a pipe.",
    epilog="\n\n".join(
        (
            examples(
                "storage-worker serve app.db", "storage-worker status app.db", "storage-worker sql --help"
            ),
            "Exit status: 0 fine, 1 degraded or findings, 2 wrong usage, 3 a typed storage error.",
        )
    ),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)


def _running_or_started(
    path: Path, timeout: float, *, may_make: bool = False, stores: Sequence[str] = ()
) -> Client:
    """A client of the worker that serves the path, or of a shared one that is started for it with some stores."""
    if not path.exists() and not may_make:
        raise DatabasePathError(
            f"there is no database {path}; `serve`, or `sql --write`, makes one",
            details={"path": os.path.abspath(path)},
        )
    # A client by path keeps the shared worker until the other one, with the role for it, is there.
    with launch.connect(path, name=CLIENT_NAME, timeout=timeout, stores=stores):
        return launch.find(path, role="admin", name=CLIENT_NAME, timeout=timeout)


def _stores_in(path: Path) -> list[str]:
    """The conversation store where a database has it, so that a worker can be asked for payloads; it would make it."""
    return [conversation_client.STORE] if path.exists() and conversation_client.has_store(path) else []


def _limits(settings: list[str]) -> Limits:
    values: dict[str, int] = {}
    for setting in settings:
        name, _, number = setting.partition("=")
        if name not in Limits.__struct_fields__:
            raise typer.BadParameter(f"there is no limit {name!r}; `storage-worker status --json` lists them")
        try:
            values[name] = int(number)
        except ValueError as error:
            raise typer.BadParameter(f"{setting!r} is not of the form NAME=NUMBER") from error
    limits = msgspec.structs.replace(DEFAULT_LIMITS, **values)
    try:
        limits.check()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return limits


def _durability(value: str) -> launch.Durability:
    if value not in get_args(launch.Durability):
        raise typer.BadParameter(f"{value!r} is none of {', '.join(get_args(launch.Durability))}")
    return cast(launch.Durability, value)


def _parameter(text: str) -> Value:
    """A number, null or a quoted text as in JSON; anything else is the text that it is."""
    try:
        value = standard_json.loads(text)
    except ValueError:
        return text
    return value if value is None or isinstance(value, bool | int | float | str) else text


@app.command(
    epilog=examples(
        "storage-worker serve app.db",
        "storage-worker serve app.db --store myapp.storage:notes --durability normal",
        "storage-worker serve app.db --no-sql --limit group_work_ms_max=10",
    )
)
def serve(
    path: PathArgument,
    store: Annotated[
        list[str] | None, typer.Option(help="A store's import string, MODULE:NAME; may be repeated.")
    ] = None,
    durability: Annotated[
        str, typer.Option(help="full: survives power loss. normal: survives the crash of any process.")
    ] = "full",
    sql: Annotated[bool, typer.Option(help="Whether clients may send SQL.")] = True,
    limit: Annotated[list[str] | None, typer.Option(help="A limit, NAME=NUMBER; may be repeated.")] = None,
    json: JsonOption = False,
) -> None:
    """Serve a database until SIGTERM, Ctrl-C or `storage-worker stop`.

    Any process finds it by the database's path, or by the address that is printed.
    """
    level, limits = _durability(durability), _limits(limit or [])
    with typed_errors(json=json):
        served = Foreground.start(path, stores=store or [], durability=level, limits=limits, sql=sql)
        record = served.record
        print_result(
            lambda: Text(
                f"serving {path} at {record.address}\n"
                f"worker {record.worker}, process {record.pid}; stop it with: storage-worker stop {path}"
            ),
            lambda: {
                "path": str(path),
                "address": record.address,
                "worker": record.worker,
                "pid": record.pid,
            },
            json=json,
        )
        served.wait()


@app.command(
    epilog=examples(
        "storage-worker sql app.db 'select count(*) from notes'",
        "storage-worker sql app.db 'select * from notes where id = ?' --param 7 --json",
        "storage-worker sql app.db --write 'insert into notes(text) values (?)' --param 'hello'",
        "storage-worker sql app.db - < query.sql",
        "storage-worker sql app.db --script schema.sql",
    )
)
def sql(
    path: PathArgument,
    statement: Annotated[
        str | None,
        typer.Argument(help="One statement; - reads it from standard input.", show_default=False),
    ] = None,
    script: Annotated[
        Path | None,
        typer.Option(
            help="A file of statements that may write, all or none of them; - is standard input.",
        ),
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="The statement may write.")] = False,
    param: Annotated[
        list[str] | None,
        typer.Option(help='A value for ?, in order: a number, null, or text ("7" in quotes is text).'),
    ] = None,
    request_key: Annotated[
        str | None, typer.Option(help="Makes a write happen once, however often it is sent.")
    ] = None,
    timeout: TimeoutOption = 30.0,
    json: JsonOption = False,
) -> None:
    """Run one statement, or a script; a shared worker is started where none runs."""
    if (statement is None) == (script is None):
        raise typer.BadParameter("give a statement, or a file of them with --script")
    if script is not None and param:
        raise typer.BadParameter("the statements of a script take no --param")
    writes = write or script is not None
    if request_key is not None and not writes:
        raise typer.BadParameter("a request key is for writes: add --write")
    text = _sql_text(statement, script)
    values = [_parameter(value) for value in param or []]
    with (
        typed_errors(json=json, writes=writes),
        _running_or_started(path, timeout, may_make=writes) as client,
        _own_words(),
    ):
        if script is not None:
            rows = client.script(text, timeout=timeout, request_key=request_key)
        elif write:
            rows = client.execute(text, values, timeout=timeout, request_key=request_key)
        else:
            rows = client.query(text, values, timeout=timeout)
    print_result(lambda: rows_view(rows, written=writes), lambda: rows_plain(rows), json=json)


def _sql_text(statement: str | None, script: Path | None) -> str:
    if "-" in (statement, str(script)):
        return sys.stdin.read()
    if script is None:
        return statement or ""
    try:
        return script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{script} cannot be read: {error}") from error


@contextmanager
def _own_words() -> Iterator[None]:
    """What the worker says of a client's functions, said of the command's options."""
    try:
        yield
    except InvalidRequestError as error:
        words = {
            "execute": "the statement changes something; allow it with --write",
            "script": "one statement for each call; a file of several takes --script",
        }
        use = error.details.get("use")
        if not isinstance(use, str) or use not in words:
            raise
        raise InvalidRequestError(words[use]) from error


@app.command(epilog=examples("storage-worker check app.db", "storage-worker check app.db --json"))
def check(path: PathArgument, timeout: TimeoutOption = 600.0, json: JsonOption = False) -> None:
    """Check the whole database: pages, indexes, constraints, foreign keys; exit status 1 with findings.

    Where it has the conversation store all payloads are read and checked, too, unless a worker that was started
    without that store is running: that is told.
    """
    with typed_errors(json=json):
        stores = _stores_in(path)
        with _running_or_started(path, timeout, stores=stores) as client:
            findings = [finding.text for finding in client.check(timeout=timeout)]
            unchecked = _check_payloads(client, path, findings, timeout) if stores else None
    told = findings or [f"{path} is sound"]
    print_result(
        lambda: Text("\n".join(told if unchecked is None else [*told, unchecked])),
        lambda: {"sound": not findings, "findings": findings, "unchecked": unchecked},
        json=json,
    )
    if findings:
        raise typer.Exit(EXIT_FINDINGS)


def _check_payloads(client: Client, path: Path, findings: list[str], timeout: float) -> str | None:
    """Add what is wrong with payloads to findings; why they were not checked, None where they were."""
    try:
        findings += [
            f"payload {found.payload}: {found.text}"
            for found in payload_client.check(client, timeout=timeout)
        ]
    except InvalidRequestError:
        return (
            "payloads were not checked: the worker that runs was started without the conversation store; stop it"
            f" (storage-worker stop {path}) and check again"
        )
    except StorageCorruptError as error:
        # The database's own findings must not be lost with it.
        findings.append(f"payloads: {error.message}")
    return None


@app.command(epilog=examples("storage-worker backup app.db /backups/app-monday.db"))
def backup(
    path: PathArgument,
    target: Annotated[Path, typer.Argument(help="The copy; it must not exist yet.", show_default=False)],
    timeout: Annotated[
        float,
        typer.Option(min=0.01, max=600.0, help="Seconds for the database; its payloads take what they take."),
    ] = 600.0,
    json: JsonOption = False,
) -> None:
    """Copy the database while it is in use; the copy is one consistent state of it.

    Payloads of the conversation store are copied, too, into the directory TARGET-sw: keep the two together. Exit
    status 1 where a payload is damaged or missing: then the copy has everything else.
    """
    with typed_errors(json=json), _running_or_started(path, timeout, stores=_stores_in(path)) as client:
        count = client.backup(target, timeout=timeout)
        with tidy_ending(), _removed_after_error(target):
            copied = copy_payloads(client, target)
    findings = [f"payload {found.payload}: {found.text}" for found in copied.findings]
    told = f"copied {path} to {target}: {size(count)}"
    if copied.payloads:
        are = "1 payload" if copied.payloads == 1 else f"{copied.payloads:,} payloads"
        told += f", and {are}, {size(copied.bytes)}, to {target}{SIDE_DIRECTORY_SUFFIX}"
    print_result(
        lambda: Text("\n".join([told, *findings])),
        lambda: {
            "target": os.path.abspath(target),
            "bytes": count,
            "payloads": copied.payloads,
            "payload_bytes": copied.bytes,
            "findings": findings,
        },
        json=json,
    )
    if findings:
        raise typer.Exit(EXIT_FINDINGS)


@contextmanager
def _removed_after_error(target: Path) -> Iterator[None]:
    """A database whose payloads cannot be copied must not lie about as a copy."""
    try:
        yield
    except BaseException:
        target.unlink(missing_ok=True)
        raise


@app.command(epilog=examples("storage-worker stop app.db", "storage-worker stop app.db --timeout 60"))
def stop(path: PathArgument, timeout: TimeoutOption = 30.0, json: JsonOption = False) -> None:
    """Stop the running worker: it finishes what it took on, writes back its WAL and ends.

    Where none runs there is nothing to stop, and that is fine too.
    """
    with typed_errors(json=json):
        if not is_owned(check_path(path)):
            print_result(lambda: Text(f"no worker serves {path}"), lambda: {"stopped": False}, json=json)
            return
        with launch.find(path, role="admin", name=CLIENT_NAME, timeout=timeout) as client:
            pid = client.connect(timeout=timeout).pid
            process = psutil.Process(pid)
            client.stop(timeout=timeout)
        _wait_for_end(process, path, timeout)
    print_result(
        lambda: Text(f"stopped the worker of {path} (process {pid})"),
        lambda: {"stopped": True, "pid": pid},
        json=json,
    )


def _wait_for_end(process: psutil.Process, path: Path, timeout: float) -> None:
    try:
        process.wait(timeout)
    except psutil.TimeoutExpired as error:
        raise DeadlineExceededError(
            f"the worker of {path} (process {process.pid}) was told to stop and still runs after {timeout:g} s",
            outcome="unknown",
            details={"stage": "stop", "pid": process.pid},
        ) from error


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"storage-worker {VERSION}")  # noqa: T201
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end."),
    ] = False,
) -> None:
    assert not version, "the callback has ended the command"


app.add_typer(cli_status.app)
app.add_typer(cli_conversation.app)


def main() -> None:
    """The entry point of the command."""
    app()
