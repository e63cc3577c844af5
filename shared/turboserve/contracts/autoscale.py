"""Autoscaling: the table of profiled parameters, and the controller's decisions with their reasons.

Source: TurboServe, 5.2.2 and Appendix A.
"""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from itertools import pairwise
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, FiniteFloat, ValidationError, model_validator

from turboserve.contracts.base import Contract, Count, Note, Number, Text, UnixSeconds
from turboserve.contracts.decoding import DecodeNeed
from turboserve.contracts.errors import InvalidInputError
from turboserve.contracts.sessions import Numbers

MOST_LEVELS = 256
"""Maximum number of rows in a table."""


class LevelParameters(Contract):
    """One row of the table: the parameters for one interval of volatility, and the data behind them."""

    level: int = Field(ge=1, le=MOST_LEVELS)
    volatility_from: float = Field(ge=0, allow_inf_nan=False)
    """Lower end of the interval, inclusive."""
    volatility_to: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Upper end of the interval, exclusive. None: no upper end, as in the last row only."""
    latency_weight: float = Field(ge=0, le=1_000)
    """λ: number of workers that one multiple of a lone chunk's latency is worth (Equation 5)."""
    target_utilization: float = Field(ge=0.01, le=1)
    """ρ̂: share of a worker's capacity for which the pool is sized."""
    predictive: bool = False
    """Whether the forecast is a lower bound of the target at this level: profiling found a benefit."""
    segments: Count = 0
    """Number of trace segments behind this row. 0: copied from the next higher row that has segments."""
    pass_rate: float | None = Field(default=None, ge=0, le=1)
    """Share of the row's segments without a chunk above the latency target."""
    cost_s: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Mean cost of the row's segments, worker-seconds."""

    def covers(self, volatility: float) -> bool:
        above = volatility >= self.volatility_from
        return above and (self.volatility_to is None or volatility < self.volatility_to)


def _seconds(value: object) -> object:
    time = datetime.fromisoformat(value) if isinstance(value, str) and "T" in value else value
    if not isinstance(time, datetime):
        return time
    if time.tzinfo is None:
        raise ValueError("a time needs its offset from UTC")
    return time.timestamp()


class Provenance(Contract):
    """The origin of a table."""

    source: Text
    """Names and digests of the traces."""
    command: Text = ""
    made_at: Annotated[UnixSeconds, BeforeValidator(_seconds)] = Field(default=0.0, allow_inf_nan=False)
    """When the table was made. Read from RFC 3339 as well, as in files and in the REST API."""
    capacity: Count = 0
    """K of the workers in the replay."""
    latency_target_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    start_up_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Scale-out delay in the replay, seconds."""
    epoch_s: float = Field(default=1.0, ge=0.01, le=3_600)
    """Length of the epochs in which activations are counted, seconds. The detector's must be the same."""
    window: int = Field(default=30, ge=2, le=10_000)
    """Number of epochs in the detector's window."""
    controller: dict[Annotated[Text, Field(max_length=64)], FiniteFloat] = Field(default={}, max_length=64)
    """The controller's hysteresis, cool-downs, windows and horizon in the replay."""
    segments: Count = 0
    late: Count | None = None
    """Number of late chunks in a replay with the whole table. None: no such replay. Each row is profiled as
    if it were always in force, but a burst begins under the row of the time before it."""
    activations: Count | None = None
    """Number of sessions that became active in that replay."""


class ProfileTable(Contract):
    """Maps volatility to (λ, ρ̂), without gaps or overlaps, from 0 up. A table is only replaced as a whole.

    Raises InvalidInputError, which names the row and the field.
    """

    levels: tuple[LevelParameters, ...] = Field(max_length=MOST_LEVELS)
    provenance: Provenance

    @model_validator(mode="after")
    def _without_gaps(self) -> Self:
        if not self.levels:
            raise InvalidInputError("a table needs at least one level", field="levels", limit=1)
        if self.levels[0].volatility_from != 0:
            raise InvalidInputError("the first level begins at 0", field="levels.0.volatility_from", limit=0)
        for index, (row, after) in enumerate(pairwise(self.levels)):
            _joined(index, row, after)
        if self.levels[-1].volatility_to is not None:
            field = f"levels.{len(self.levels) - 1}.volatility_to"
            raise InvalidInputError("the last level is open: it has no upper end", field=field, limit="none")
        return self

    def row(self, volatility: float) -> LevelParameters:
        """Return the row whose interval contains `volatility`. NaN counts as the highest volatility."""
        if math.isnan(volatility):
            return self.levels[-1]
        return next(row for row in self.levels if row.covers(max(volatility, 0.0)))

    def to_file(self) -> bytes:
        """Return the table as JSON in the form of the REST API, in which times are RFC 3339."""
        values = self.model_dump(mode="json", exclude_none=True)
        made_at = datetime.fromtimestamp(self.provenance.made_at, UTC).isoformat(timespec="seconds")
        values["provenance"]["made_at"] = made_at.replace("+00:00", "Z")
        return json.dumps(values, ensure_ascii=False).encode()

    @classmethod
    def parse(cls, data: bytes | str) -> Self:
        """Parse a table from JSON. Raises InvalidInputError, which names the first invalid field."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise InvalidInputError(first["msg"], field=field or "table") from None


def _joined(index: int, row: LevelParameters, after: LevelParameters) -> None:
    field = f"levels.{index + 1}"
    if after.level != row.level + 1:
        detail = f"level {after.level} follows level {row.level}"
        raise InvalidInputError(detail, field=f"{field}.level", limit=row.level + 1)
    if row.volatility_to is None:
        detail = "only the last level is open"
        raise InvalidInputError(detail, field=f"levels.{index}.volatility_to", limit=after.volatility_from)
    if row.volatility_to <= row.volatility_from:
        detail = f"the interval from {row.volatility_from:g} to {row.volatility_to:g} is empty"
        raise InvalidInputError(detail, field=f"levels.{index}.volatility_to", limit=row.volatility_from)
    if after.volatility_from != row.volatility_to:
        kind = "gap" if after.volatility_from > row.volatility_to else "overlap"
        detail = f"{kind}: level {row.level} ends at {row.volatility_to:g}, the next begins at "
        detail += f"{after.volatility_from:g}"
        raise InvalidInputError(detail, field=f"{field}.volatility_from", limit=row.volatility_to)


class ScalingRecord(Contract):
    """One decision of the controller, to act or not to act, and its reason."""

    at: UnixSeconds
    action: Text
    """One of out, in, hold, override, switch, wake, limits, table."""
    target: Count
    """Number of workers that the pool should have from now on."""
    previous: Count
    advice: Count
    """Number of workers that the controller wants. `target` differs in a dry run and under an override."""
    reason: Note
    numbers: Numbers = {}
    """The figures behind the decision, such as rho_max, required, capacity, volatility, level."""


class ScalingStatus(Contract):
    """The controller's status, for operators."""

    mode: Text
    """One of auto, override, dry_run."""
    target: Number
    advice: Number
    least: Number
    most: Number
    override: Number | None = None
    volatility: float
    level: Number
    """The table's level. Without meaning if `basis` is `learned`."""
    latency_weight: float
    target_utilization: float
    """ρ̂ in force, with what absorption adds."""
    predictive: bool = False
    """Whether the forecast is a lower bound of the target now."""
    basis: Text = "profile"
    """What decides the headroom: `learned`, or `profile` (the table's row at the present volatility)."""
    peak_window_s: float | None = None
    """A scale-in keeps slots for the most sessions of this time, seconds. None: an earlier version."""
    forecast_coverage: float | None = None
    """Share of past forecasts whose errors the forecast's margin covers. None: no forecast is used."""
    learned_from_s: float | None = None
    """Time of demand behind the learned headroom, seconds. None: it is not in force."""
    forecast: float | None = None
    """Number of sessions expected one scale-out delay ahead. None: no forecast."""
    required: Number | None = None
    """N_req of the newest load feedback."""
    rho_max: float | None = None
    feedback_age_s: float | None = None
    """Age of the newest load feedback, seconds. None: no load feedback yet."""
    stale: bool = True
    """Whether the load feedback is missing or too old. The pool does not shrink then."""
    decoding: DecodeNeed | None = None
    """The decode workers of the pool. None: its workers decode, or their decode workers are not known."""
    refused: dict[Text, Number] = {}
    """Number of implausible, ignored load feedbacks by reason."""
    activity: dict[Text, Number] = {}
    """Number of arrivals, departures, activations and idlings in the detector's window."""
    table: Provenance | None = None
    table_differs: tuple[Text, ...] = ()
    """Settings (or `capacity`) that differ from those of the profiling. If there are any, profile again."""
    decisions: tuple[ScalingRecord, ...] = ()
    """The newest decisions, newest last."""
