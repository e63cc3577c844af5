"""What decides how much room a pool keeps: a row of the table, or a learned choice."""

from __future__ import annotations

from turboserve.contracts.autoscale import LevelParameters
from turboserve.static_frozen import statically_frozen


@statically_frozen()
class Headroom:
    """Parameters that decide how much room the pool keeps."""

    row: LevelParameters
    peak_window_s: float
    """A scale-in keeps enough slots for the largest number of required sessions in this window."""
    quantile: float
    """Share of past forecasts whose errors the forecast's margin covers."""
    learned: bool = False
    """Whether `learner` chose them, and not a level of the table."""

    @property
    def basis(self) -> str:
        """Where the parameters come from, as reasons of decisions say it."""
        return "with the learned headroom" if self.learned else f"at level {self.row.level}"

    def __str__(self) -> str:
        ahead = f", a forecast whose margin covers {self.quantile:.1%} of its errors"
        text = f"target utilization {self.row.target_utilization:g}{ahead if self.row.predictive else ''}"
        return f"{text} and room for the peak of {self.peak_window_s:g} s"
