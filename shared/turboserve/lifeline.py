"""The lifeline: a pipe whose writing end only the supervisor holds, so that its death ends every process.

The supervisor hands the reading end down in `TURBOSERVE_LIFELINE_FD`; whoever starts further processes (the
autoscaler starts workers) passes that descriptor on: see `pass_fds`. A reader sees end-of-file once the
supervisor is gone, however it went. Nothing is ever written.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading

FD_VARIABLE = "TURBOSERVE_LIFELINE_FD"
PARENT_VARIABLE = "TURBOSERVE_LIFELINE_PARENT"
EXIT_STATUS = 70
"""Status of a process that ended because its supervisor died."""

_PR_SET_PDEATHSIG = 1
_watching = threading.Lock()


def watch() -> bool:
    """End this process at once when the supervisor dies; call it first thing in `main`.

    Returns whether there is a supervisor. A direct child of the supervisor also asks the kernel to kill it on
    the supervisor's death, which works even while no Python thread can run. Grandchildren do not: a worker
    outlives the autoscaler that started it. Calling it again changes nothing.
    """
    fd = descriptor()
    if fd is None:
        return False
    if not _watching.acquire(blocking=False):
        return True
    if os.environ.get(PARENT_VARIABLE) == str(os.getppid()):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    threading.Thread(target=_wait_for_end, args=(fd,), name="lifeline", daemon=True).start()
    return True


def descriptor() -> int | None:
    """The reading end handed down, or None when no supervisor started this process."""
    value = os.environ.get(FD_VARIABLE, "")
    return int(value) if value.isdigit() else None


def pass_fds() -> tuple[int, ...]:
    """What to give as `pass_fds` when starting a process that must not outlive the supervisor."""
    fd = descriptor()
    return () if fd is None else (fd,)


def _wait_for_end(fd: int) -> None:
    try:
        while os.read(fd, 1):
            pass
    except OSError:
        # A descriptor that was not passed on cannot tell us anything: better to go on than to die of it.
        return
    # Not a clean exit: the servers go down with the supervisor, so there is nobody left to say goodbye to.
    os._exit(EXIT_STATUS)
