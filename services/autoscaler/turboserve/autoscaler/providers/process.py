"""Finds and watches processes of this host, including ones that this process did not start."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

POLL_S = 0.25
"""Interval of checks if the kernel has no pidfd, in seconds."""
SETTLE_S = 1.0
SETTLE_POLL_S = 0.005


def environment_of(pid: int) -> dict[str, str]:
    """Return a process's initial environment; empty if it has ended, is a zombie or is another user's."""
    pairs = (entry.partition(b"=") for entry in _written(pid).split(b"\0") if entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def _written(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def settled_environments(numbers: Iterable[int]) -> dict[int, dict[str, str]]:
    """Return `environment_of` each process, by pid.

    Blocks for up to `SETTLE_S` if a process may be starting, because a process runs before the kernel shows
    its environment.
    """
    until = time.monotonic() + SETTLE_S
    found = {}
    for pid in numbers:
        # An environment of zeros is final: servers that set a title (Postgres) overwrite theirs.
        while not _written(pid) and _may_settle(pid) and time.monotonic() < until:
            time.sleep(SETTLE_POLL_S)
        found[pid] = environment_of(pid)
    return found


def _may_settle(pid: int) -> bool:
    return os.access(f"/proc/{pid}/environ", os.R_OK) and _exists(pid)


def leads_session(pid: int) -> bool:
    """Whether the process leads its session. A worker does; its child processes do not."""
    with suppress(OSError):
        return os.getsid(pid) == pid
    return False


def pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def status_text(code: int | None) -> str:
    """Describe how a process ended. `code` is its return code (negative: the signal); None: not known."""
    if code is None:
        return "the process has ended"
    if code >= 0:
        return f"the process ended with status {code}"
    try:
        return f"the process was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"the process was ended by signal {-code}"


class WatchedProcess:
    """One living process, a child or not, that can get signals and whose end is noticed at once.

    A pidfd holds the process, so that a signal never reaches another process with the same number.
    """

    def __init__(
        self, pid: int, child: subprocess.Popen[bytes] | None, on_end: Callable[[str], None]
    ) -> None:
        """Watch process `pid`; call this on the event loop. Raises ProcessLookupError if it does not
        exist."""
        self.pid = pid
        self.ended = asyncio.Event()
        self._child = child
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._fd: int | None = None
        self._poll: asyncio.Task[None] | None = None
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            if child is None:
                raise
        except OSError:
            # This kernel has no pidfd, so poll instead.
            pass
        if self._fd is not None:
            self._loop.add_reader(self._fd, self._readable)
        else:
            self._poll = asyncio.create_task(self._poll_until_end())

    @property
    def alive(self) -> bool:
        return not self.ended.is_set()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal. Does nothing if the process has ended."""
        if self.ended.is_set():
            return
        with suppress(ProcessLookupError):
            if self._fd is not None:
                signal.pidfd_send_signal(self._fd, number)
            else:
                os.kill(self.pid, number)

    def close(self) -> None:
        """Stop watching."""
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None
        if self._poll is not None:
            self._poll.cancel()

    def _readable(self) -> None:
        self._finish(self._child.wait() if self._child is not None else None)

    async def _poll_until_end(self) -> None:
        while True:
            if self._child is not None and self._child.poll() is not None:
                return self._finish(self._child.returncode)
            if self._child is None and not _exists(self.pid):
                return self._finish(None)
            await asyncio.sleep(POLL_S)

    def _finish(self, code: int | None) -> None:
        if self.ended.is_set():
            return
        self.ended.set()
        self.close()
        self._on_end(status_text(code))


def _exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False
