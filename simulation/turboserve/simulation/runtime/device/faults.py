"""Faults of a virtual device. The fields may be set at any time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from turboserve.worker.engine.streams import DEVICE_LOST


@dataclass
class DeviceFaults:
    """Faults of one worker's device."""

    slowdown: float = 1.0
    """Factor on the time of every computation."""
    failing: set[str] = field(default_factory=set)
    """Sessions for which every computation raises an error."""
    lost: bool = False
    """Whether every use of the device fails, so that the process must end."""
    failed: bool = False
    """Whether a use has failed like this. Then the process ends, even if the device is repaired meanwhile."""
    stalled_until: float = -math.inf
    """Time of the event loop before which the engine begins no step and accepts no commands."""
    on_forward: Callable[[str], None] = lambda _session: None
    """Called for each session of a forward that begins."""
    host_full: Callable[[], bool] = lambda: False
    """Called for each state that is to leave for host memory; True if there is no room."""
    offload_fails: Callable[[], bool] = lambda: False
    """Called for each active session that is to leave its slab; True if the copy fails."""


def is_device_error(error: BaseException | None) -> bool:
    """Return whether the error, or one of its causes, is a device error."""
    while error is not None:
        if isinstance(error, DEVICE_LOST):
            return True
        error = error.__cause__
    return False
