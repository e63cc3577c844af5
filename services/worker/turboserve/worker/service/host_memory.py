"""How much memory of the host suspended sessions may take, where no setting says it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from turboserve.worker.engine.engine import Models
from turboserve.worker.engine.receive_buffer import host_bytes, own_limit
from turboserve.worker.engine.slab import SlabLayout

LEAST_BYTES = 1 << 30
_SHARE = 0.5
"""Of what is free: the machine has other workers, and this one's own code."""
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def state_host_bytes(models: Models) -> int:
    """What one suspended session takes in host memory at most, also one that arrives there."""
    config = models.transformer.config
    layout = SlabLayout.of(config, models.transformer.patch_embedding.weight.dtype)
    return host_bytes(layout, own_limit(config, models.decoder.cache_bytes))


def default_host_bytes(state_bytes: int, slots: int, free_bytes: int) -> int:
    """Room for as many states as there are slots, `LEAST_BYTES` at least; half of what is free at most."""
    return min(max(LEAST_BYTES, slots * state_bytes), int(_SHARE * free_bytes))


def halves(size: int, state_bytes: int, least: int = LEAST_BYTES) -> Iterator[int]:
    """`size`, and ever half of it down to `least`: workers that start together each see all that is free.

    One state is tried before anything that would hold none.
    """
    while True:
        yield size
        if size <= least:
            return
        half = max(size // 2, least)
        size = state_bytes if half < state_bytes < size else half


def free_host_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Memory of the machine that nothing needs, or what is left to this container, if that is less."""
    free = _entry(meminfo, "MemAvailable:")
    # Not Linux: nobody says what is free.
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 if free is None else free << 10
    limit, used = _entry(cgroup / "memory.max"), _entry(cgroup / "memory.current")
    if limit is None or used is None:
        return free
    # Files that were read lie in the container's memory too, until somebody needs it.
    cached = _entry(cgroup / "memory.stat", "inactive_file") or 0
    return min(free, max(0, limit - used + cached))


def _entry(file: Path, name: str | None = None) -> int | None:
    """The number in a file, or the one in the line that begins with `name`; None: there is none."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
        if name is None:
            return int(lines[0][0])
        return next(int(line[1]) for line in lines if line[0] == name)
    except (OSError, ValueError, IndexError, StopIteration):
        return None
