"""Classes of sessions, and what a worker can serve of them at once.

A worker serves n sessions of a class alone in real time. With several classes it serves x_j sessions of each
class j while Σ x_j / n_j ≤ 1 and their states fit into its memory (OServe, 4.2). These two inequalities are
the worker's polytope. With one class they say x ≤ n.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_SIZED = re.compile(r"(?P<model>.+)_(?P<width>[1-9]\d{0,4})x(?P<height>[1-9]\d{0,4})")
CLASSES_LIMIT = 16
"""Maximum number of classes that one worker serves."""
ROUNDING = 1e-9
"""Relative error of sums of fractions: 1/3 + 2/3 may exceed 1 by this much."""


@dataclass(frozen=True, order=True)
class SessionClass:
    """What decides the cost of a session's chunks, and is known when the session is created."""

    model: str
    width: int = 0
    """Width of a frame, pixels. 0: the model's own."""
    height: int = 0
    """Height of a frame, pixels. 0: the model's own."""
    floor: float = 0.0
    """Least quality of a chunk, 0 to 1. 1: every chunk has the best configuration."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("model: a class needs a model")
        if self.width < 0 or self.height < 0:
            raise ValueError(f"width, height: {self.width} x {self.height} is below 0")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor: {self.floor:g} is not between 0 and 1")

    @classmethod
    def of_name(cls, name: str) -> SessionClass:
        """Return the class that a setting, a worker's row or a session's row names as its model.

        `longlive-1-3b` is the model at its own size, `longlive-1-3b_640x384` the same at 640×384 pixels.
        """
        sized = _SIZED.fullmatch(name)
        return cls(name) if sized is None else cls(sized["model"], int(sized["width"]), int(sized["height"]))

    @property
    def name(self) -> str:
        """The name of which `of_name` returns this class, but for its floor."""
        return f"{self.model}_{self.width}x{self.height}" if self.width else self.model

    def __str__(self) -> str:
        size = f" {self.width}x{self.height}" if self.width or self.height else ""
        return f"{self.model}{size}" + (f" floor {self.floor:g}" if self.floor else "")


@dataclass(frozen=True)
class Capability:
    """What one worker can serve: its polytope."""

    sessions: Mapping[SessionClass, int]
    """n_j: sessions of a class that the worker serves alone in real time. A missing class, or 0: none."""
    state_bytes: Mapping[SessionClass, int] = field(default_factory=dict)
    """Bytes of a session's state. A missing class needs none."""
    memory_bytes: int = 0
    """Memory for states, bytes. 0: no limit but `sessions`."""

    def __post_init__(self) -> None:
        for session_class, sessions in self.sessions.items():
            if sessions < 0:
                raise ValueError(f"sessions: {sessions} sessions of {session_class} is below 0")
        if self.memory_bytes < 0:
            raise ValueError(f"memory_bytes: {self.memory_bytes} is below 0")

    def serves(self, session_class: SessionClass) -> bool:
        """Whether the worker can serve one session of the class alone."""
        return self.sessions.get(session_class, 0) > 0

    def utilization(self, counts: Mapping[SessionClass, int]) -> float:
        """Return the used part of the worker: the larger one of Σ x_j / n_j and the used part of its memory.

        With one class it is x / n. A session of a class that the worker cannot serve makes it infinite.
        """
        time_used = 0.0
        for session_class, count in counts.items():
            if count:
                served = self.sessions.get(session_class, 0)
                if served <= 0:
                    return float("inf")
                time_used += count / served
        if not self.memory_bytes:
            return time_used
        used = sum(count * self.state_bytes.get(one, 0) for one, count in counts.items())
        return max(time_used, used / self.memory_bytes)

    def fits(self, counts: Mapping[SessionClass, int]) -> bool:
        """Whether the worker serves these sessions at once in real time."""
        return self.utilization(counts) <= 1 + ROUNDING

    def most(self, session_class: SessionClass, counts: Mapping[SessionClass, int]) -> int:
        """Return how many more sessions of one class fit beside `counts`."""
        served = self.sessions.get(session_class, 0)
        used = self.utilization(counts)
        if served <= 0 or used > 1 + ROUNDING:
            return 0
        time_used = sum(count / self.sessions[one] for one, count in counts.items() if count)
        room = int((1 - time_used + ROUNDING) * served)
        size = self.state_bytes.get(session_class, 0)
        if self.memory_bytes and size:
            bytes_used = sum(count * self.state_bytes.get(one, 0) for one, count in counts.items())
            room = min(room, int((self.memory_bytes - bytes_used) // size))
        return max(room, 0)
