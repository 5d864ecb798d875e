"""What a forked child does first: lets go of the sockets it inherited and makes their locks anew.

A lock that another thread of the parent held at the fork stays locked in the child for ever, and a
socket that two processes write to carries neither's requests. The hook runs before the child has a
second thread, so nothing of it can be in use.
"""

import os
import weakref
from typing import Protocol


class Inheritable(Protocol):
    """Something with a socket or a lock that a fork copies."""

    def after_fork(self) -> None:
        """Forget the parent's socket without a word on it, and start with fresh locks."""


_living: weakref.WeakSet[Inheritable] = weakref.WeakSet()


def tell_after_fork(item: Inheritable) -> None:
    """Call `item.after_fork()` in every child that is forked while `item` lives."""
    _living.add(item)


def _in_child() -> None:
    for item in list(_living):
        item.after_fork()


os.register_at_fork(after_in_child=_in_child)
