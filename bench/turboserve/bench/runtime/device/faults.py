"""What may go wrong with a virtual device. The fields may be set at any time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from turboserve.worker.engine.streams import DEVICE_LOST


@dataclass
class DeviceFaults:
    """Faults of one worker's device."""

    slowdown: float = 1.0
    """Everything that is computed takes so many times as long."""
    failing: set[str] = field(default_factory=set)
    """Sessions for which computing raises an error."""
    lost: bool = False
    """The device fails whatever it is given: the process has to end."""
    stalled_until: float = -math.inf
    """The engine begins no step before this time of the event loop, and takes no commands."""
    on_forward: Callable[[str], None] = lambda _session: None
    """Called for each session of a forward that begins."""
    host_full: Callable[[], bool] = lambda: False
    """Asked for each state that is to move to host memory: whether there is no room."""


def is_device_error(error: BaseException | None) -> bool:
    """Whether the error, or what caused it, says that the device has failed."""
    while error is not None:
        if isinstance(error, DEVICE_LOST):
            return True
        error = error.__cause__
    return False
