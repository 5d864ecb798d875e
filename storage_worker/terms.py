"""What a request asks for, checked before it gets a place."""

from collections.abc import Mapping

from .execution import Served
from .peer import Peer
from .protocol.envelope import ARGUMENTS_FOLLOW, Request
from .protocol.errors import InvalidRequestError, NotPermittedError
from .protocol.limits import Limits
from .receipts import checked_key as fit_key
from .watch import deadline_exceeded


def permitted(operations: Mapping[str, Served], peer: Peer, request: Request) -> Served:
    """The operation that a request names; raises where there is none such, or not for this client."""
    served = operations.get(request.operation)
    if served is None:
        raise InvalidRequestError(_unknown(operations, request.operation))
    if peer.role != "admin" and (served.admin or (peer.role == "read" and served.for_writers)):
        needed = "admin" if served.admin else "write"
        raise NotPermittedError(
            f"{served.name} needs the role {needed}, and this connection has {peer.role}; the worker's host gives roles:"
            f" worker.connect({needed!r}) or worker.pipe({needed!r})"
        )
    if request.flags and (request.flags != ARGUMENTS_FOLLOW or served.kind == "control"):
        raise InvalidRequestError(f"{served.name} takes no flags {request.flags:#x}")
    return served


def _unknown(operations: Mapping[str, Served], name: str) -> str:
    stores = sorted({each.partition(".")[0] for each in operations})
    if name.startswith("sql.") and "sql" not in stores:
        return "this worker takes no SQL (sql=False, or --no-sql); use its stores' operations"
    return (
        f"this worker has no operation {name[:140]!r}; it serves {', '.join(stores)[:500]}. A store is named when the"
        " worker starts: stores=['myapp.storage:notes'], or --store myapp.storage:notes; one that runs already keeps those"
        " that it was started with, until `storage-worker stop` or its last client ends it"
    )


def checked_key(served: Served, key: str, limits: Limits) -> str:
    """The request key of a write; `InvalidRequestError` where it cannot be one, or the operation takes none."""
    if served.keyless:
        raise InvalidRequestError(f"{served.name} takes no request key: there is nothing to repeat of it")
    return fit_key(key, limits.request_key_bytes_max)


def bounds(request: Request, now_ns: int, limits: Limits) -> tuple[int, int]:
    """The request's deadline and the size of the result it allows."""
    deadline_ns = request.deadline_ns or now_ns + limits.deadline_ms_default * 1_000_000
    if deadline_ns <= now_ns:
        raise deadline_exceeded("admission")
    if deadline_ns > now_ns + limits.deadline_ms_max * 1_000_000:
        raise InvalidRequestError(f"the deadline is more than {limits.deadline_ms_max} ms away")
    result_bytes = request.result_bytes or limits.result_bytes_default
    if not 0 < result_bytes <= limits.chunked_bytes_max:
        raise InvalidRequestError(f"results of {result_bytes} bytes; the limit is {limits.chunked_bytes_max}")
    return deadline_ns, result_bytes
