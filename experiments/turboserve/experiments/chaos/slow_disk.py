"""A slow disk for chosen programs: each of their writes, syncs and renames waits.

The kernel asks this process before each operation (`slow_disk_start.py`), and this process answers late. The
operation itself then runs at the real disk's speed. So the disk is slow for these programs alone, whatever
file system they use.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import platform
import secrets
import select
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import TracebackType

from turboserve.experiments.chaos import slow_disk_start

RECEIVE, SEND = 0xC0502100, 0xC0182101
"""SECCOMP_IOCTL_NOTIF_RECV and SECCOMP_IOCTL_NOTIF_SEND."""
NOTIFICATION = struct.Struct("<QIIiIQ6Q")
"""Id, process, flags, number of the system call, architecture, instruction, arguments."""
ANSWER = struct.Struct("<QqiI")
CONTINUE = 1
"""Flag of an answer: the kernel carries out the system call."""


@dataclass(frozen=True)
class DiskConditions:
    """Additional time of each operation, seconds."""

    write_s: float = 0.0
    sync_s: float = 0.0
    """For fsync and the like, and for the rename that puts a written file in its place."""


FAST = DiskConditions()


@cache
def why_not() -> str | None:
    """Return why the disk cannot be slowed on this machine; None if it can."""
    if sys.platform != "linux" or platform.machine() not in slow_disk_start.OPERATIONS:
        return f"seccomp user notification is not known for {sys.platform} on {platform.machine()}"
    done = subprocess.run(
        [
            *(sys.executable, "-I", "-S", "-c"),
            "import runpy, sys; runpy.run_path(sys.argv[1])['listener']()",
            slow_disk_start.__file__,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    return None if done.returncode == 0 else f"no seccomp listener: {done.stderr.strip()[-200:]}"


class SlowDisk:
    """Answers the kernel, in a thread of its own from entry to exit.

    `conditions` may change at any time, and applies to later operations. After the exit, the programs can
    write nothing: end them before.
    """

    def __init__(self) -> None:
        self.conditions = FAST
        self.operations = 0
        """Number of delayed operations."""
        self._name = f"turboserve-slow-disk-{secrets.token_hex(8)}"
        numbers = slow_disk_start.OPERATIONS.get(platform.machine(), {})
        self._writes = frozenset(numbers.get("write", ()))
        self._selector = selectors.DefaultSelector()
        self._due: list[tuple[float, int, int]] = []
        """Time of the answer, descriptor, id."""
        self._ended, self._end = os.pipe()
        self._thread = threading.Thread(target=self._run, name="slow disk", daemon=True)

    def command(self) -> list[str]:
        """Return the words to put before a program's command."""
        return [sys.executable, "-I", "-S", slow_disk_start.__file__, self._name]

    def __enter__(self) -> SlowDisk:
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(f"\0{self._name}")
        self._server.listen()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._selector.register(self._ended, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._end)
        self._thread.join()
        for key in [*self._selector.get_map().values()]:
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
        self._selector.close()
        self._server.close()

    def _run(self) -> None:
        while True:
            wait_s = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            for key, events in self._selector.select(wait_s):
                if key.fileobj is self._server:
                    self._accept()
                elif key.fileobj == self._ended:
                    return
                elif events & selectors.EVENT_READ:
                    self._receive(key.fd)
            while self._due and self._due[0][0] <= time.monotonic():
                _, descriptor, number = heapq.heappop(self._due)
                self._answer(descriptor, number)

    def _accept(self) -> None:
        connection, _ = self._server.accept()
        with connection:
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        for descriptor in descriptors:
            self._selector.register(descriptor, selectors.EVENT_READ)

    def _receive(self, descriptor: int) -> None:
        notification = bytearray(NOTIFICATION.size)
        try:
            fcntl.ioctl(descriptor, RECEIVE, notification)
        except OSError:
            # The process was killed meanwhile. If it was the last one, the kernel closes its end.
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            if any(event & select.POLLHUP for _, event in poll.poll(0)):
                self._selector.unregister(descriptor)
                os.close(descriptor)
            return
        number, _, _, call, *_ = NOTIFICATION.unpack(notification)
        now = self.conditions
        delay_s = now.write_s if call in self._writes else now.sync_s
        if delay_s > 0:
            self.operations += 1
            heapq.heappush(self._due, (time.monotonic() + delay_s, descriptor, number))
        else:
            self._answer(descriptor, number)

    def _answer(self, descriptor: int, number: int) -> None:
        # The process may have been killed, or all of them may have ended.
        with suppress(OSError):
            fcntl.ioctl(descriptor, SEND, ANSWER.pack(number, 0, 0, CONTINUE))
