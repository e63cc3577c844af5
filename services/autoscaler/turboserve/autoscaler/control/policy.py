"""The parameters of the controller: its policy, and the shipped table of profiled parameters."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

from turboserve.contracts.autoscale import ProfileTable


@dataclass(frozen=True)
class ControlPolicy:
    """Limits, hysteresis and cool-downs. Times are in seconds. `advisor` describes their use."""

    least: int = 1
    """Minimum number of workers. With `scale_to_zero`, the minimum applies only while there are sessions."""
    most: int = 1
    """Maximum number of workers, whatever the load."""
    capacity: int = 4
    """K, the sessions per worker, until feedback reports it."""
    hysteresis: float = 0.1
    """δ: half the width of the band around ρ̂ in which the target does not change."""
    out_cooldown_s: float = 1.0
    """Minimum time between any action and the next scale-out, so that no scale-in is undone earlier."""
    in_cooldown_s: float = 10.0
    """Minimum time between any action and the next scale-in, so that no scale-out is undone earlier."""
    in_window_s: float = 10.0
    """A scale-in keeps at least as many workers as were needed at any time in this window.

    Feedback must have arrived without a gap for the whole window. The window is about the start-up time of a
    worker, since keeping a worker that long costs as much as starting it again.
    """
    peak_window_s: float = 120.0
    """A scale-in keeps enough slots for the largest number of required sessions in this window, since most
    bursts return."""
    stale_s: float = 10.0
    """The pool does not shrink if the last feedback is older than this."""
    scale_to_zero: bool = False
    zero_after_s: float = 300.0
    """With `scale_to_zero`, all workers end after this long without a session."""
    epoch_s: float = 1.0
    """Length of the epochs in which the detector counts activations. The table's epochs must be equal."""
    window: int = 30
    """Number of epochs in the detector's window."""
    predictive: bool | None = None
    """Whether the forecast is a lower bound of the target. None: the table decides for each level."""
    horizon_s: float = 10.0
    """How far ahead the forecast looks: the time from a scale-out until the new worker serves."""
    quantile: float = 0.95
    """Share of past forecasts whose errors the margin covers."""
    quality_debt_limit: float = 0.0
    """Price of quality: share of the last minute's chunks that the load may lower before
    the pool keeps the whole headroom of the table. 0: workers hold no session beyond K, and quality debt and
    deficit change no decision."""
    absorb_at_maximum: bool = False
    """Whether workers also hold more than K sessions while the pool cannot grow."""
    learns: bool = False
    """Whether the headroom is learned from this deployment's demand (`learner`). False: the table decides."""
    lateness_price_s: float = 60.0
    """Worker-seconds that the operator pays to spare one session a late first chunk. `learner` uses it."""
    late_after_s: float = 0.5
    """Time after which a session that waits for a slot counts as late, for the headroom that is learned."""
    dry_run: bool = False
    """Whether decisions leave the target as it is; `advice` is then what the target would be."""

    @property
    def dynamics(self) -> dict[str, float]:
        """Settings that a table's parameters depend on. A table profiled under others may miss its goals."""
        names = (
            "hysteresis", "out_cooldown_s", "in_cooldown_s", "in_window_s", "peak_window_s", "horizon_s",
            "quantile",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def __post_init__(self) -> None:
        """Check all limits. Raises ValueError that names the field."""
        if not 0 <= self.least <= self.most:
            raise ValueError(f"least: {self.least} is not within 0 to most ({self.most})")
        if self.capacity < 1:
            raise ValueError(f"capacity: {self.capacity} is less than 1")
        if not 0 <= self.hysteresis < 1:
            raise ValueError(f"hysteresis: {self.hysteresis} is not within 0 to 1")
        if not 0 <= self.quality_debt_limit <= 1:
            raise ValueError(f"quality_debt_limit: {self.quality_debt_limit} is not within 0 to 1")
        if not 0 < self.quantile < 1:
            raise ValueError(f"quantile: {self.quantile} is not within 0 to 1")
        if self.window < 2:
            raise ValueError(f"window: {self.window} is less than 2 epochs")
        for name in ("stale_s", "epoch_s", "horizon_s", "late_after_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: {getattr(self, name)} is not above 0")
        for name in (
            "out_cooldown_s",
            "in_cooldown_s",
            "in_window_s",
            "peak_window_s",
            "zero_after_s",
            "lateness_price_s",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name)} is below 0")


FILE = "profile.json"


def default_table() -> ProfileTable:
    """Return the shipped table. Its provenance names its traces and the command that made it."""
    data = resources.files("turboserve.autoscaler.control").joinpath(FILE).read_bytes()
    return ProfileTable.parse(data)
