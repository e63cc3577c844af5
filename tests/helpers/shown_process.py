"""The command line and the environment that /proc shows of a forked process.

They stand where the kernel wrote those of the process at its start. A fork writes its own there, into as much
space as its origin had.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

SPACE = 32_768
"""Bytes that the origin of forks reserves for a command line, and for an environment."""
SPACE_VARIABLE = "SPACE_FOR_FORKS"
ARGUMENTS_START = 48
"""Number of the field of /proc/PID/stat, from 1 on. Behind it: their end, the environment's start and end."""
FIRST_AFTER_NAME = 3


def show(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Show these as this process's own. What does not fit is cut off."""
    # The C library's strings are in the memory that is overwritten below. Move them elsewhere first.
    for name, value in os.environ.items():
        os.putenv(name, value)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    starts_and_ends = [int(field) for field in fields[ARGUMENTS_START - FIRST_AFTER_NAME :][:4]]
    _overwrite(command, *starts_and_ends[:2])
    _overwrite([f"{name}={value}" for name, value in environment.items()], *starts_and_ends[2:])


def _overwrite(texts: Iterable[str], start: int, end: int) -> None:
    data = b"".join(os.fsencode(text) + b"\0" for text in texts)[: end - start]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, data, len(data))
