"""Host memory on the same machine: the source copies into an anonymous file, the target copies out of it.

The file has no name. It disappears with the last process that holds it, however that process ends. The target
opens the file through /proc, which the kernel allows to processes of the same user.
"""

from __future__ import annotations

import mmap
import os
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
from turboserve.worker.transfer.link import Link, LocalPages, RemotePages, pieces


def machine() -> str:
    """A machine's name: equal in two processes exactly when they can see each other's memory; or empty."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    if not (boot.exists() and namespace.exists()):
        return ""
    return f"{boot.read_text().strip()}:{namespace.stat().st_ino}"


class ShmLink(Link):
    """A link without a connection. Only the target writes to the target's memory."""

    kind = "shm"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._file: int | None = None

    def offer(self, pages: LocalPages, page_range: range, deadline: Deadline) -> dict[str, Any]:
        """See `Link.offer`."""
        self.settle()
        size = pages.size(page_range)
        self._file = os.memfd_create("turboserve-transfer", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._file, max(1, size))
            _copy(self._file, pages.parts(page_range), deadline, write=True)
        except BaseException:
            self.close()
            raise
        return {"pid": os.getpid(), "file": self._file, "bytes": size}

    def transfer(
        self,
        session: str,
        source: LocalPages | RemotePages,
        target: LocalPages | RemotePages,
        page_range: range,
        deadline: Deadline,
    ) -> int:
        """See `Link.transfer`. The source has nothing to do: `offer` did all."""
        if isinstance(source, LocalPages):
            return source.size(page_range)
        assert isinstance(target, LocalPages)
        try:
            return _take(source, target, page_range, deadline)
        except BaseException:
            self.close()
            raise

    def settle(self) -> None:
        """See `Link.settle`."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def close(self) -> None:
        """See `Link.close`."""
        self.closed = True
        self.settle()


def _take(source: RemotePages, target: LocalPages, page_range: range, deadline: Deadline) -> int:
    pid, number, size = (source.offer.get(key) for key in ("pid", "file", "bytes"))
    if not all(type(value) is int and value >= 0 for value in (pid, number, size)):
        raise TransferProtocolError("shm: the offer names no file")
    wanted = target.size(page_range)
    if size != wanted:
        raise TruncatedStateError(f"shm: {size} bytes offered, {wanted} announced")
    try:
        file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise PeerLostError(f"shm: process {pid} has no such file any more") from error
    except OSError as error:
        raise TransferBackendError(
            f"shm: memory of process {pid} cannot be opened: {error.strerror}"
        ) from error
    try:
        found = os.fstat(file).st_size
        if found != max(1, wanted):
            raise TruncatedStateError(f"shm: {found} bytes found, {wanted} announced")
        _copy(file, target.parts(page_range), deadline, write=False)
    finally:
        os.close(file)
    return wanted


def _copy(file: int, parts: list[Tensor], deadline: Deadline, *, write: bool) -> None:
    """Copy between the file, from its beginning, and the parts."""
    size = sum(part.numel() for part in parts)
    if not size:
        return
    access = mmap.ACCESS_WRITE if write else mmap.ACCESS_COPY
    with mmap.mmap(file, size, access=access) as memory:
        shared = torch.frombuffer(memory, dtype=torch.uint8)
        at = 0
        try:
            for piece in pieces(parts):
                deadline.left()
                for part in piece:
                    view = shared[at : at + part.numel()]
                    if write:
                        view.copy_(part)
                    else:
                        part.copy_(view)
                    at += part.numel()
                    del view
        finally:
            # The mapping can be closed only if nothing refers to it.
            del shared
