"""Measures the free space of a disk. Without space, restarting a failing server does not help."""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

ENOUGH_BYTES = 32 * 2**20
"""A disk with less space counts as full: a log segment of Postgres needs 16 MiB, a chunk up to 8 MiB."""
ENOUGH_FILES = 64
TRIAL_BYTES = 2**20
LOW_SHARE = 0.05
LOW_BYTES = 4 * 2**30
"""A disk is low if its free space is below this and below `LOW_SHARE` of its size."""
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class DiskSpace:
    """The free space of one file system, for a user without privileges."""

    free_bytes: int
    size_bytes: int
    free_files: int | None
    """None: the file system sets no limit."""

    @property
    def enough(self) -> bool:
        return self.free_bytes >= ENOUGH_BYTES and (
            self.free_files is None or self.free_files >= ENOUGH_FILES
        )

    @property
    def low(self) -> bool:
        return not self.enough or self.free_bytes < min(LOW_BYTES, LOW_SHARE * self.size_bytes)

    def __str__(self) -> str:
        return f"{self.free_bytes / 2**20:.0f} of {self.size_bytes / 2**20:.0f} MiB free"


def room(path: Path) -> DiskSpace:
    """Return the free space of the file system of `path`. Raises OSError if `path` does not exist."""
    found = os.statvfs(path)
    files = found.f_favail if found.f_files else None
    return DiskSpace(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize, files)


def has_room(path: Path) -> bool:
    """Whether there is space to write in the folder `path`.

    Writes a temporary file, since the free space does not show a quota. Also returns True if `path` cannot be
    accessed, because a full disk is not the cause then.
    """
    try:
        if not room(path).enough:
            return False
        with tempfile.TemporaryFile(dir=path) as trial:
            os.posix_fallocate(trial.fileno(), 0, TRIAL_BYTES)
    except OSError as error:
        return error.errno not in FULL
    return True
