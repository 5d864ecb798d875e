"""A store that makes its worker run as on a system without process descriptors: imported by that worker only."""

from storage_worker import Store, processes

plain = Store("plain")


def _no_descriptor(pid: int) -> int | None:
    return None


processes.pidfd_of = _no_descriptor
