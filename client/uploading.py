"""A synchronous client's arguments that are too large for one frame: sent by their own thread, between others' calls."""

from typing import TYPE_CHECKING

from .chunks import Turn, Upload
from .waiter import Waiter

if TYPE_CHECKING:
    from .connection import Connection


def send_arguments(connection: "Connection", upload: Upload, waiter: Waiter, deadline_ns: int) -> None:
    """Send the arguments that follow a request as the worker grants them, until all are out or it has ended.

    Raises `DeadlineExceededError` where the worker does not take them until then; nobody waits for the request any
    more in that case.
    """
    waiter.size = upload.flow.size
    turn = Turn(waiter.id)
    try:
        connection.flush(deadline_ns)
        while waiter.answer is None and not upload.is_whole:
            data = upload.next_frame()
            if data:
                end = connection.write(data, deadline_ns)
                if upload.is_whole:
                    waiter.end = end
                continue
            turn = Turn(waiter.id)
            upload.wake = turn.come
            # Looked at after the turn is there to be woken.
            if not upload.flow.credit and waiter.answer is None:
                connection.wait(turn, deadline_ns + connection.grace_ns)
                if turn.answer is None:
                    break
        if not upload.is_whole:
            # The worker must know that no more of them comes.
            connection.cancel(upload.request_id)
    except BaseException as error:
        waiter.asleep = turn.asleep
        connection.interrupt(waiter, error)
        connection.abandon(waiter)
        raise
