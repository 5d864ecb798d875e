"""Exit statuses of a worker: what its end means to whoever supervises it."""

STOPPED = 10
"""An administrator's request stopped it: its host does not restart it. It is not 0, which a host that ignores SIGCHLD also sees after a crash."""

HUNG = 70
"""A handler did not return; another start may do better (EX_SOFTWARE of sysexits.h)."""

FATAL = 75
"""It could not go on; another start may mend it (EX_TEMPFAIL of sysexits.h)."""

REPLACED = 76
"""Its files were deleted, renamed or replaced: another start would serve other files."""
