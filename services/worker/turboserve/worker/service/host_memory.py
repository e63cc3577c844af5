"""Choose how much host memory suspended sessions may take, where no setting does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from turboserve.wording import counted
from turboserve.worker.engine.memory import SlabLayout, aligned
from turboserve.worker.engine.models import Models
from turboserve.worker.engine.receive_buffer import host_bytes, own_limit

LEAST_BYTES = 1 << 30


class HostSessionsError(ValueError):
    """The machine's free memory does not hold the states of so many offloaded sessions. Do not retry."""

    def __init__(self, sessions: int, needed_bytes: int, free_bytes: int, suspended_bytes: int = 0) -> None:
        """`suspended_bytes`: bytes of `TURBOSERVE_HOST_MEMORY_BYTES`, which `needed_bytes` contains."""
        beside = f" with TURBOSERVE_HOST_MEMORY_BYTES={suspended_bytes}" if suspended_bytes else ""
        need = counted(sessions, "session needs", "sessions need")
        super().__init__(
            f"TURBOSERVE_HOST_SESSIONS: {need} {needed_bytes} bytes of host memory{beside}, "
            f"{free_bytes} are free"
        )
        self.sessions, self.needed_bytes, self.free_bytes = sessions, needed_bytes, free_bytes


_SHARE = 0.5
"""Share of the free memory: the machine has other workers, and this worker's own code."""
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def state_host_bytes(models: Models, *, decode_apart: bool = False) -> int:
    """Largest host memory that one suspended session takes, including one that arrives by migration.

    `decode_apart`: see `EngineOptions.decode_apart`.
    """
    config = models.transformer.config
    layout = SlabLayout.of(config, models.transformer.patch_embedding.weight.dtype)
    return host_bytes(layout, own_limit(config, 0 if decode_apart else models.cache_bytes))


def default_host_bytes(state_bytes: int, slabs: int, free_bytes: int) -> int:
    """Room for as many states as slabs, at least `LEAST_BYTES` and at most half of the free memory."""
    return min(max(LEAST_BYTES, slabs * state_bytes), int(_SHARE * free_bytes))


def offloaded_host_bytes(sessions: int, state_bytes: int) -> int:
    """Host memory for that many active sessions beyond the slabs: a state for each, and one more, because a
    state leaves a slab before the next one has come."""
    return (sessions + 1) * aligned(state_bytes) if sessions else 0


def check_host_sessions(sessions: int, state_bytes: int, free_bytes: int, suspended_bytes: int = 0) -> None:
    """Raise `HostSessionsError` unless the free memory holds their states.

    `suspended_bytes`: configured memory of suspended sessions, which is taken beside them. 0: it is chosen
    from what they leave.
    """
    if not sessions:
        return
    needed_bytes = aligned(suspended_bytes) + offloaded_host_bytes(sessions, state_bytes)
    if needed_bytes > free_bytes:
        raise HostSessionsError(sessions, needed_bytes, free_bytes, suspended_bytes)


def halves(size: int, state_bytes: int, least: int = LEAST_BYTES) -> Iterator[int]:
    """Yield `size`, then repeatedly half of it, down to `least`.

    Workers that start together each see all free memory. The size of one state is tried before any smaller
    size.
    """
    while True:
        yield size
        if size <= least:
            return
        half = max(size // 2, least)
        size = state_bytes if half < state_bytes < size else half


def free_host_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Free memory of the machine, or what is left to this container, if that is less."""
    free = _entry(meminfo, "MemAvailable:")
    # Not Linux: the free memory is not known.
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 if free is None else free << 10
    limit, used = _entry(cgroup / "memory.max"), _entry(cgroup / "memory.current")
    if limit is None or used is None:
        return free
    # The page cache counts as used memory of the container, and is reclaimed on demand.
    cached = _entry(cgroup / "memory.stat", "inactive_file") or 0
    return min(free, max(0, limit - used + cached))


def _entry(file: Path, name: str | None = None) -> int | None:
    """The number in a file, or in its line that begins with `name`. None: there is none."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
        if name is None:
            return int(lines[0][0])
        return next(int(line[1]) for line in lines if line[0] == name)
    except (OSError, ValueError, IndexError, StopIteration):
        return None
