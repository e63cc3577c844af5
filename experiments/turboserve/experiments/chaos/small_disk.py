"""A disk of a few hundred MiB that can be filled and freed: a tmpfs, never the machine's own disk."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
from contextlib import suppress
from pathlib import Path

CAP_SYS_ADMIN = 21
FILLER = "filler"
MNT_DETACH = 2
STEP_BYTES = 4096
LARGEST_STEP_BYTES = 8 * 2**20


class SmallDiskError(Exception):
    """No tmpfs could be mounted; the message states the reason."""


def why_not() -> str | None:
    """Return why no tmpfs can be mounted here; None if it can."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff" and not int(value, 16) >> CAP_SYS_ADMIN & 1:
            return "mounting a tmpfs needs root (CAP_SYS_ADMIN)"
    return None


class SmallDisk:
    """A tmpfs of `size_bytes` on the empty folder `path`, mounted on entry and unmounted on exit."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path, self._size_bytes = path, size_bytes

    def __enter__(self) -> SmallDisk:
        self.path.mkdir(parents=True, exist_ok=True)
        options = f"size={self._size_bytes},mode=0711"
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "turboserve-chaos", str(self.path)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SmallDiskError(f"no tmpfs on {self.path}: {done.stderr.strip()}")
        return self

    def __exit__(self, *_: object) -> None:
        # A lazy unmount works even while an ending process has a file open there.
        if ctypes.CDLL(None, use_errno=True).umount2(os.fsencode(self.path), MNT_DETACH):
            raise SmallDiskError(f"{self.path} is still mounted: {os.strerror(ctypes.get_errno())}")

    @property
    def free_bytes(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def fill(self, leave_bytes: int = 0) -> None:
        """Take every block but `leave_bytes`. A further call also takes blocks that were freed since."""
        with (self.path / FILLER).open("ab") as file:
            # A failed step is undone by the system. With large steps alone, the disk would have room again
            # afterwards.
            step = LARGEST_STEP_BYTES
            while step >= STEP_BYTES:
                if self.free_bytes - step < leave_bytes:
                    step //= 2
                    continue
                try:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), step)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    step //= 2

    def free(self) -> None:
        with suppress(FileNotFoundError):
            (self.path / FILLER).unlink()
