"""The lifeline: a pipe that ends every process of a stack when the supervisor dies.

Only the supervisor holds the writing end, and nothing is ever written. A reader sees end-of-file once the
supervisor has ended, for whatever reason. `TURBOSERVE_LIFELINE_FD` names the descriptor of the reading end. A
process that starts further processes passes that descriptor on, as the autoscaler does to workers: see
`pass_fds`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading

FD_VARIABLE = "TURBOSERVE_LIFELINE_FD"
PARENT_VARIABLE = "TURBOSERVE_LIFELINE_PARENT"
EXIT_STATUS = 70
"""Exit status of a process that ended because its supervisor died."""

_PR_SET_PDEATHSIG = 1
_watching = threading.Lock()


def watch() -> bool:
    """End this process at once when the supervisor dies. Call this function first in `main`.

    Returns whether there is a supervisor. A direct child of the supervisor also asks the kernel to kill it on
    the supervisor's death, which works even while no Python thread can run. A grandchild does not ask: its
    parent is another process, and a worker outlives the autoscaler that started it. A second call changes
    nothing.
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
    """Return the descriptor of the reading end, or None if no supervisor started this process."""
    value = os.environ.get(FD_VARIABLE, "")
    return int(value) if value.isdigit() else None


def pass_fds() -> tuple[int, ...]:
    """Return the argument `pass_fds` for starting a process that must not outlive the supervisor."""
    fd = descriptor()
    return () if fd is None else (fd,)


def _wait_for_end(fd: int) -> None:
    try:
        while os.read(fd, 1):
            pass
    except OSError:
        # The descriptor was not passed on, so it says nothing about the supervisor: keep running.
        return
    # No clean exit: the servers end with the supervisor, so no connection is left to close.
    os._exit(EXIT_STATUS)
