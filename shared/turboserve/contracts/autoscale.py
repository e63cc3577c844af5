"""Autoscaling: the table of profiled parameters, and what the controller decided and why.

Source: TurboServe, 5.2.2 and Appendix A.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, Self

from pydantic import Field, FiniteFloat, ValidationError, model_validator

from turboserve.contracts.base import Contract, Count, Note, Number, Text, UnixSeconds
from turboserve.contracts.errors import InvalidInputError
from turboserve.contracts.sessions import Numbers

MOST_LEVELS = 256
"""Rows of a table, at most."""


class LevelParameters(Contract):
    """One row of the table: the parameters of one interval of volatility, and what they were found from."""

    level: int = Field(ge=1, le=MOST_LEVELS)
    volatility_from: float = Field(ge=0, allow_inf_nan=False)
    """Lower end of the interval, included."""
    volatility_to: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Upper end, not included; None: open. Only the last row is open."""
    latency_weight: float = Field(ge=0, le=1_000)
    """λ: workers that one multiple of a lone chunk's latency is worth (Equation 5)."""
    target_utilization: float = Field(ge=0.01, le=1)
    """ρ̂: share of a worker's sessions that the pool is sized for."""
    predictive: bool = False
    """Whether the forecast is a lower bound of the target at this level: profiling found that it pays."""
    segments: Count = 0
    """Trace segments this row was profiled on; 0: taken over from the next higher row that has some."""
    pass_rate: float | None = Field(default=None, ge=0, le=1)
    """Share of these segments without a chunk above the latency target."""
    cost_s: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Mean cost of these segments, worker-seconds."""

    def covers(self, volatility: float) -> bool:
        above = volatility >= self.volatility_from
        return above and (self.volatility_to is None or volatility < self.volatility_to)


class Provenance(Contract):
    """Where a table comes from."""

    source: Text
    """Names and digests of the traces."""
    command: Text = ""
    made_at: UnixSeconds = Field(default=0.0, allow_inf_nan=False)
    capacity: Count = 0
    """K of the workers it was profiled with."""
    latency_target_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    start_up_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Scale-out delay in the replay, seconds."""
    epoch_s: float = Field(default=1.0, ge=0.01, le=3_600)
    """Length of the epochs whose activations are counted, seconds: the detector's must be the same."""
    window: int = Field(default=30, ge=2, le=10_000)
    """Epochs in the detector's window."""
    controller: dict[Annotated[Text, Field(max_length=64)], FiniteFloat] = Field(default={}, max_length=64)
    """Hysteresis, cool-downs, windows and horizon that the controller had in the replay."""
    segments: Count = 0
    late: Count | None = None
    """Late chunks when the traces were replayed with the whole table: each row is found as if it were in
    force all the time, and a burst begins under the row of what was before it. None: not replayed."""
    activations: Count | None = None
    """Of so many sessions that became active."""


class ProfileTable(Contract):
    """Volatility → (λ, ρ̂), without gaps or overlaps, from 0 up. Replaced as a whole.

    Raises InvalidInputError, which names the row and the field.
    """

    levels: tuple[LevelParameters, ...] = Field(max_length=MOST_LEVELS)
    provenance: Provenance

    @model_validator(mode="after")
    def _without_gaps(self) -> Self:
        if not self.levels:
            raise InvalidInputError("a table needs at least one level", field="levels", limit=1)
        if self.levels[0].volatility_from != 0:
            raise InvalidInputError("the first level begins at 0", field="levels[0].volatility_from", limit=0)
        for index, (row, after) in enumerate(pairwise(self.levels)):
            _joined(index, row, after)
        if self.levels[-1].volatility_to is not None:
            field = f"levels[{len(self.levels) - 1}].volatility_to"
            raise InvalidInputError("the last level is open: it has no upper end", field=field, limit="none")
        return self

    def row(self, volatility: float) -> LevelParameters:
        """The row whose interval holds `volatility`; one that is not a number counts as the highest."""
        if math.isnan(volatility):
            return self.levels[-1]
        return next(row for row in self.levels if row.covers(max(volatility, 0.0)))

    @classmethod
    def parse(cls, data: bytes | str) -> Self:
        """Read a table from JSON. Raises InvalidInputError that names the first field at fault."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
            raise InvalidInputError(first["msg"], field=field.lstrip(".") or "table") from None


def _joined(index: int, row: LevelParameters, after: LevelParameters) -> None:
    field = f"levels[{index + 1}]"
    if after.level != row.level + 1:
        detail = f"level {after.level} follows level {row.level}"
        raise InvalidInputError(detail, field=f"{field}.level", limit=row.level + 1)
    if row.volatility_to is None:
        detail = "only the last level is open"
        raise InvalidInputError(detail, field=f"levels[{index}].volatility_to", limit=after.volatility_from)
    if row.volatility_to <= row.volatility_from:
        detail = f"the interval from {row.volatility_from:g} to {row.volatility_to:g} is empty"
        raise InvalidInputError(detail, field=f"levels[{index}].volatility_to", limit=row.volatility_from)
    if after.volatility_from != row.volatility_to:
        kind = "gap" if after.volatility_from > row.volatility_to else "overlap"
        detail = f"{kind}: level {row.level} ends at {row.volatility_to:g}, the next begins at "
        detail += f"{after.volatility_from:g}"
        raise InvalidInputError(detail, field=f"{field}.volatility_from", limit=row.volatility_to)


class ScalingRecord(Contract):
    """One thing the controller decided, or decided not to do, and why."""

    at: UnixSeconds
    action: Text
    """out, in, hold, override, wake, limits, table."""
    target: Count
    """Workers the pool shall have from now on."""
    previous: Count
    advice: Count
    """Workers the controller would have; differs from `target` in a dry run and under an override."""
    reason: Note
    numbers: Numbers = {}
    """rho_max, required, capacity, volatility, level, latency_weight, target_utilization, and so on."""


class ScalingStatus(Contract):
    """The controller as operators see it."""

    mode: Text
    """auto, override, dry_run."""
    target: Number
    advice: Number
    least: Number
    most: Number
    override: Number | None = None
    volatility: float
    level: Number
    latency_weight: float
    target_utilization: float
    predictive: bool = False
    """Whether the forecast counts at this level."""
    forecast: float | None = None
    """Sessions expected one scale-out delay ahead; None where nothing is forecast."""
    required: Number | None = None
    """N_req as last heard."""
    rho_max: float | None = None
    feedback_age_s: float | None = None
    """None: no load report yet."""
    stale: bool = True
    """Nothing was heard lately: the pool does not shrink."""
    refused: dict[Text, Number] = {}
    """Feedback that was not believed, counted by reason."""
    activity: dict[Text, Number] = {}
    """Arrivals, departures, activations and idlings in the detector's window."""
    table: Provenance | None = None
    table_differs: tuple[Text, ...] = ()
    """What is not as it was when the table was profiled: names of settings, `capacity`. Profile again."""
    decisions: tuple[ScalingRecord, ...] = ()
    """The last ones, newest last."""
