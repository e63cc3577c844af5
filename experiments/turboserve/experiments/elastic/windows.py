"""Windows of a scale-in in the benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from turboserve.autoscaler.settings import AutoscalerSettings


class Windows(StrEnum):
    """Which windows are in force."""

    SHORT = "short"
    """All windows have the same length, short enough for a ramp of three minutes to show both directions."""
    SHIPPED = "shipped"
    """The autoscaler's settings on this machine: its defaults, or the environment's values."""


@dataclass(frozen=True)
class ScaleIn:
    """Windows of a scale-in, in seconds."""

    name: str
    in_cooldown_s: float
    in_window_s: float
    peak_window_s: float

    @classmethod
    def of(cls, windows: Windows, short_s: float) -> ScaleIn:
        if windows is Windows.SHORT:
            return cls(windows.value, short_s, short_s, short_s)
        settings = AutoscalerSettings()
        return cls(
            windows.value,
            settings.scale_in_cooldown_s,
            settings.scale_in_window_s,
            settings.scale_peak_window_s,
        )

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables that set all windows explicitly, so that the report cannot be wrong."""
        return {
            "TURBOSERVE_SCALE_IN_COOLDOWN_S": str(self.in_cooldown_s),
            "TURBOSERVE_SCALE_IN_WINDOW_S": str(self.in_window_s),
            "TURBOSERVE_SCALE_PEAK_WINDOW_S": str(self.peak_window_s),
        }

    def figures(self) -> dict[str, Any]:
        """Return the windows for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        times = f"{self.in_window_s:g}, {self.in_cooldown_s:g} and {self.peak_window_s:g} s"
        return f"{self.name}: window, cool-down and peak window of {times}"
