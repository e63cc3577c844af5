"""Memory that two processes of one machine share: the source fills the slots of an anonymous file, the target
empties them.

The file has no name. It disappears with the last process that holds it, however that process ends. The target
opens the file through /proc, which the kernel allows to processes of the same user.

Nothing but the order of its stores tells one process that the other's are there. So it needs a processor that
keeps this order, as x86-64 does.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turboserve.worker.transfer.deadline import Deadline
from turboserve.worker.transfer.errors import (
    PeerLostError,
    TransferBackendError,
    TransferProtocolError,
    TruncatedStateError,
)
from turboserve.worker.transfer.link import PIECE_BYTES, Link, LocalPages, RemotePages, pieces
from turboserve.worker.transfer.staging import Staging

SLOTS = 4
HEADER_BYTES = 4096
"""Counters before the first slot, bytes: a page of memory."""
FILE_BYTES = HEADER_BYTES + SLOTS * PIECE_BYTES
COUNTERS_BYTES, NONCE_BYTES = 16, 16
POLL_S = 0.0001
LOOK_S = 0.1
"""Interval at which the target looks whether the source's process has ended, seconds."""
STOPPED_S = 10.0
"""Longest wait for the other process to fill or empty a slot, seconds. One that died is noticed earlier: by
the target as a process, by the source as an end of the control channel."""


def usable() -> bool:
    """Whether processes of this machine can transfer states through memory."""
    return platform.machine() in ("x86_64", "AMD64") and bool(machine())


def machine() -> str:
    """A machine's name: equal in two processes exactly when they can see each other's memory; or empty."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    if not (boot.exists() and namespace.exists()):
        return ""
    return f"{boot.read_text().strip()}:{namespace.stat().st_ino}"


class _Slots:
    """The mapped file: how many pieces were filled and emptied in this round, its nonce, then the slots."""

    def __init__(self, file: int) -> None:
        memory = mmap.mmap(file, FILE_BYTES)
        # All views keep the mapping.
        header = memoryview(memory)
        self._counters = header[:COUNTERS_BYTES].cast("q")
        self._nonce = header[COUNTERS_BYTES : COUNTERS_BYTES + NONCE_BYTES]
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8, offset=HEADER_BYTES)

    @property
    def nonce(self) -> str:
        """Distinguishes this file from all others, hexadecimal."""
        return self._nonce.hex()

    @nonce.setter
    def nonce(self, nonce: str) -> None:
        self._nonce[:] = bytes.fromhex(nonce)

    @property
    def filled(self) -> int:
        return self._counters[0]

    @filled.setter
    def filled(self, count: int) -> None:
        self._counters[0] = count

    @property
    def emptied(self) -> int:
        return self._counters[1]

    @emptied.setter
    def emptied(self, count: int) -> None:
        self._counters[1] = count

    def slot(self, number: int, size: int) -> Tensor:
        """The first `size` bytes of the slot of piece `number`."""
        begin = number % SLOTS * PIECE_BYTES
        return self._bytes[begin : begin + size]


class ShmLink(Link):
    """A link without a connection. Only the target writes to the target's memory."""

    kind = "shm"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._file: int | None = None
        self._slots: _Slots | None = None
        self._opened: tuple[int, int, object] | None = None
        """At the target: process, number and nonce of the file that `_slots` maps."""
        self._staging = Staging()

    def holds(self, size: int) -> bool:
        """See `Link.holds`."""
        return size <= SLOTS * PIECE_BYTES

    def offer(self, pages: LocalPages, page_range: range, deadline: Deadline) -> dict[str, Any]:
        """See `Link.offer`."""
        if self._file is None or self._slots is None:
            self._file = os.memfd_create("turboserve-transfer", os.MFD_CLOEXEC)
            os.ftruncate(self._file, FILE_BYTES)
            self._slots = _Slots(self._file)
            self._slots.nonce = secrets.token_hex(NONCE_BYTES)
        # The target has emptied all slots of the last round.
        self._slots.filled = self._slots.emptied = 0
        return {
            "pid": os.getpid(),
            "file": self._file,
            "nonce": self._slots.nonce,
            "bytes": pages.size(page_range),
            "slots": SLOTS,
        }

    def transfer(
        self,
        session: str,
        source: LocalPages | RemotePages,
        target: LocalPages | RemotePages,
        page_range: range,
        deadline: Deadline,
    ) -> int:
        """See `Link.transfer`."""
        try:
            if isinstance(source, LocalPages):
                return self._fill(source.parts(page_range), deadline)
            assert isinstance(target, LocalPages)
            return self._empty(source, target, page_range, deadline)
        except BaseException:
            self.close()
            raise

    def release(self) -> None:
        """See `Link.release`."""
        self._drop_file()
        self._staging = Staging()

    def close(self) -> None:
        """See `Link.close`. A transfer under way keeps the memory until it notices."""
        self.closed = True
        self._drop_file()

    def _drop_file(self) -> None:
        self._slots = self._opened = None
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _fill(self, parts: list[Tensor], deadline: Deadline) -> int:
        slots, sent = self._mapped(), 0
        for number, piece in enumerate(pieces(parts)):
            self._await(lambda: number - slots.emptied < SLOTS, deadline)  # noqa: B023 - called at once.
            size = sum(part.numel() for part in piece)
            self._staging.gather(piece, slots.slot(number, size))
            slots.filled = number + 1
            sent += size
        return sent

    def _empty(self, source: RemotePages, target: LocalPages, page_range: range, deadline: Deadline) -> int:
        self._open(source, target.size(page_range))
        slots, taken = self._mapped(), 0
        for number, piece in enumerate(pieces(target.parts(page_range))):
            self._await(lambda: slots.filled > number, deadline)  # noqa: B023 - called at once.
            size = sum(part.numel() for part in piece)
            self._staging.scatter(slots.slot(number, size), piece)
            slots.emptied = number + 1
            taken += size
            target.arrived(taken)
        return taken

    def _open(self, source: RemotePages, wanted: int) -> None:
        """Map the source's file, unless it is mapped already."""
        found = [source.offer.get(key) for key in ("pid", "file", "bytes", "slots")]
        pid, number, size, slots = (value if type(value) is int else -1 for value in found)
        if min(pid, number, size) < 0:
            raise TransferProtocolError("shm: the offer names no file")
        if slots != SLOTS:
            raise TransferBackendError(f"shm: number of slots: {slots} offered, {SLOTS} wanted")
        if size != wanted:
            raise TruncatedStateError(f"shm: {size} bytes offered, {wanted} announced")
        opened = pid, number, source.offer.get("nonce")
        if self._opened == opened:
            return
        try:
            file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TransferBackendError(
                f"shm: memory of process {pid} cannot be opened: {error.strerror}"
            ) from error
        try:
            there = os.fstat(file).st_size
            if there != FILE_BYTES:
                raise TransferBackendError(f"shm: {there} bytes found, {FILE_BYTES} wanted")
            mapped = _Slots(file)
            # The source may have closed the file meanwhile, and given its number to another link's.
            if mapped.nonce != opened[2]:
                raise TransferBackendError("shm: the file is not the one that was offered")
            self._slots, self._opened = mapped, opened
        finally:
            os.close(file)

    def _mapped(self) -> _Slots:
        slots = self._slots
        if slots is None:
            raise PeerLostError("the link is closed")
        return slots

    def _await(self, ready: Callable[[], bool], deadline: Deadline) -> None:
        """Wait for the other process. Raises the errors of `Deadline.left` and `PeerLostError`."""
        begun = time.monotonic()
        stopped_at, look_at = begun + STOPPED_S, begun + LOOK_S
        while True:
            deadline.left()
            if self.closed:
                raise PeerLostError("the link is closed")
            if ready():
                return
            now = time.monotonic()
            if now >= stopped_at:
                raise PeerLostError(f"shm: no progress for {STOPPED_S:g} s")
            if now >= look_at:
                look_at = now + LOOK_S
                if self._opened is not None and _ended(self._opened[0]):
                    raise PeerLostError(f"shm: process {self._opened[0]} has ended")
            time.sleep(POLL_S)


def _ended(pid: int) -> bool:
    """Whether a process of this machine has ended. Its parent may not have noticed yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:1]
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    return state in ([b"Z"], [b"X"])
