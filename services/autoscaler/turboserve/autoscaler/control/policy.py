"""The parameters of the controller that are not in the table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ControlPolicy:
    """Limits, hysteresis, cool-downs. Times in seconds; see `controller` for how they are used."""

    least: int = 1
    """Workers at least; with `scale_to_zero` only while someone needs them."""
    most: int = 1
    """Workers at most, whatever the load."""
    capacity: int = 4
    """K as long as no worker has said how many sessions it takes."""
    hysteresis: float = 0.1
    """δ: half the width of the band around ρ̂ in which nothing is done."""
    out_cooldown_s: float = 1.0
    """Between any action and the next scale-out. So a scale-in is not undone within it."""
    in_cooldown_s: float = 10.0
    """Between any action and the next scale-in. So a scale-out is not undone within it."""
    in_window_s: float = 10.0
    """A scale-in goes no lower than what was needed at any time in this window, all of which was heard.

    About what a worker takes to start: keeping one that long costs what starting it again would.
    """
    peak_window_s: float = 120.0
    """A scale-in leaves room, all workers full, for the most sessions required in this window: a burst that
    was seen comes back more often than not."""
    stale_s: float = 10.0
    """Feedback older than this says nothing: the pool does not shrink."""
    scale_to_zero: bool = False
    zero_after_s: float = 300.0
    """With `scale_to_zero`: after so long without a session, all workers go."""
    epoch_s: float = 1.0
    """Length of the epochs in which the detector counts activations; the table's must be the same."""
    window: int = 30
    """Epochs in the detector's window."""
    predictive: bool | None = None
    """Whether the forecast is a lower bound of the target; None: as the table has it for the level."""
    horizon_s: float = 10.0
    """How far ahead the forecast looks: the time from a scale-out to a worker that serves."""
    quantile: float = 0.95
    """Share of past forecasts whose errors the margin covers."""
    dry_run: bool = False
    """Only explain: the target stays, `advice` says what it would be."""

    @property
    def dynamics(self) -> dict[str, float]:
        """What a table's parameters depend on: a table profiled under others may not keep the target."""
        names = (
            "hysteresis", "out_cooldown_s", "in_cooldown_s", "in_window_s", "peak_window_s", "horizon_s",
            "quantile",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def __post_init__(self) -> None:
        """Raises ValueError that names the field."""
        if not 0 <= self.least <= self.most:
            raise ValueError(f"least: {self.least} is not within 0 to most ({self.most})")
        if self.capacity < 1:
            raise ValueError(f"capacity: {self.capacity} is less than 1")
        if not 0 <= self.hysteresis < 1:
            raise ValueError(f"hysteresis: {self.hysteresis} is not within 0 to 1")
        if not 0 < self.quantile < 1:
            raise ValueError(f"quantile: {self.quantile} is not within 0 to 1")
        if self.window < 2:
            raise ValueError(f"window: {self.window} is less than 2 epochs")
        for name in ("stale_s", "epoch_s", "horizon_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: {getattr(self, name)} is not above 0")
        for name in ("out_cooldown_s", "in_cooldown_s", "in_window_s", "peak_window_s", "zero_after_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name)} is below 0")
