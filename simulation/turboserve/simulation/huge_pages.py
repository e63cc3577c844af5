"""Huge pages for Python's objects: a calm run visits hundreds of MB of them in each virtual second."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

COMMAND = "turboserve"
VARIABLES = {
    "PYTHONMALLOC": "malloc",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.tcache_count=2000",
}
"""With these, the C library allocates all objects, and asks Linux for huge pages.

It also keeps 2,000 freed pieces of a size at hand, instead of seven: a chunk frees many small objects.
"""
GLIBC = (2, 35)
"""First version of the GNU C library with this tunable."""
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def use_huge_pages() -> None:
    """Replace the command's process by one with `VARIABLES`, which a process reads at its start only.

    Returns where there is nothing to do: see `environment_of`.
    """
    environment = _environment()
    if environment is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, sys.orig_argv, environment)


@contextmanager
def huge_pages_for_children() -> Iterator[None]:
    """Give `VARIABLES` to the processes that start within the block, unless `use_huge_pages` does nothing.

    This process keeps Python's own allocator: the times that it measures are those of production.
    """
    if _environment() is None:
        yield
        return
    os.environ.update(VARIABLES)
    try:
        yield
    finally:
        for name in VARIABLES:
            os.environ.pop(name, None)


def _environment() -> dict[str, str] | None:
    switch = SWITCH.read_text() if SWITCH.exists() else "[never]"
    return environment_of(os.environ, sys.argv[0], _libc(), switch)


def environment_of(
    environment: Mapping[str, str], program: str, libc: str, switch: str
) -> dict[str, str] | None:
    """Return the environment in which the program starts again; None if it continues.

    It continues if it is not the command itself, and so may be a test; if the machine has no such pages; and
    if one of the variables is set: by the user, or because it has started again.

    Args:
        libc: Name and version of the C library, as in `glibc 2.36`.
        switch: Linux's switch of huge pages, as in `always [madvise] never`.
    """
    name, _, version = libc.partition(" ")
    numbers = tuple(int(part) for part in version.split(".") if part.isdigit())
    if Path(program).name != COMMAND or name != "glibc" or numbers < GLIBC or "[never]" in switch:
        return None
    return None if VARIABLES.keys() & environment.keys() else {**environment, **VARIABLES}


def _libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except ValueError:
        return ""
