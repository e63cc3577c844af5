"""Composition of a pool: how many workers of which kind have which models, at the least cost.

A mixed-integer program decides. Over the horizon, it pays for workers, for the time in which workers start or
change their models, and for sessions without a place. So it hires, releases or switches, whichever is
cheapest. A new composition must save more than the errors of its forecast (hysteresis), unless the present
one leaves sessions without a place.

OServe's search (4.3) knows neither prices nor the cost of switching nor the present deployment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from turboserve.allocation.classes import Capability, SessionClass
from turboserve.allocation.linear import LinearProgram, Solution

HOUR_S = 3600.0


@dataclass(frozen=True)
class Terms:
    """What a kind of worker costs."""

    price: float
    """Price of one worker for an hour."""
    most: int
    """Maximum number of workers of the kind."""
    start_s: float = 60.0
    """Seconds from the order of a worker until it serves."""
    switch_s: float = 20.0
    """Seconds in which a worker that changes its models serves nothing."""

    def __post_init__(self) -> None:
        for name in ("price", "most", "start_s", "switch_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name):g} is below 0")


@dataclass(frozen=True)
class Offer:
    """A kind of worker with certain models."""

    kind: str
    models: tuple[str, ...]
    capability: Capability
    """What one such worker serves."""
    least: int = 0
    """Minimum number of such workers."""
    most: int | None = None
    """Maximum number of such workers. None: that of the kind."""

    @property
    def key(self) -> OfferKey:
        return self.kind, self.models


OfferKey = tuple[str, tuple[str, ...]]
Composition = Mapping[OfferKey, int]
"""Number of workers of each offer."""


@dataclass(frozen=True)
class CompositionPolicy:
    """Parameters of the decision."""

    horizon_s: float = 1800.0
    """Time over which a composition pays, seconds: about the time between two changes of the mix."""
    utilization: float = 0.9
    """ρ̂: the part of a worker's time that the forecast may use."""
    shortage_price: float = 100.0
    """Price of one session without a place for an hour. It must exceed that of the dearest place."""
    least_gain: float = 0.02
    """Part of the present composition's cost that another one must save."""
    gap: float = 0.02
    """Relative distance from the optimum at which the search ends."""
    time_limit_s: float = 1.0
    """Time after which the search returns the best composition so far."""

    def __post_init__(self) -> None:
        if not 0 < self.utilization <= 1:
            raise ValueError(f"utilization: {self.utilization:g} is not above 0 and at most 1")
        if self.horizon_s <= 0:
            raise ValueError(f"horizon_s: {self.horizon_s:g} is not above 0")


@dataclass(frozen=True)
class CompositionDecision:
    """The composition to have."""

    composition: Composition
    cost: float
    """Cost of it over the horizon, with the way there."""
    present_cost: float
    """Cost of the present composition over the horizon."""
    shortage: Mapping[SessionClass, float]
    """Sessions of the forecast that have no place, by class."""
    changed: bool
    """Whether it differs from the present one."""


@dataclass
class _Columns:
    workers: dict[OfferKey, int]
    short: dict[SessionClass, int]
    prices: list[tuple[int, float]]


def decide(
    terms: Mapping[str, Terms],
    offers: Sequence[Offer],
    present: Composition,
    forecast: Mapping[SessionClass, float],
    policy: CompositionPolicy | None = None,
    total: int | None = None,
) -> CompositionDecision:
    """Return the cheapest composition for a forecast of sessions by class.

    `forecast` has a quantile of the demand at the time when a worker that is ordered now serves. `total` is
    the number of all workers; None: as many as are cheapest. Raises SolverError, and KeyError for an offer of
    a kind without terms.
    """
    policy = policy or CompositionPolicy()
    wanted = {one: count for one, count in forecast.items() if count > 0}
    linear = LinearProgram()
    columns = _build(linear, terms, offers, present, wanted, policy)
    counts = [(column, 1.0) for column in columns.workers.values()]
    limit = linear.row(counts) if total is None else linear.row(counts, float(total), float(total))
    best = linear.minimize(columns.prices, policy.gap, policy.time_limit_s)
    linear.bound_row(limit, 0.0, inf)
    for key, column in columns.workers.items():
        linear.bound_column(column, present.get(key, 0), present.get(key, 0))
    kept = linear.minimize(columns.prices, policy.gap)
    short_now = sum(kept.values[column] for column in columns.short.values())
    short_then = sum(best.values[column] for column in columns.short.values())
    gains = best.objective < kept.objective * (1 - policy.least_gain)
    allowed = total in (None, sum(present.values())) and all(
        offer.least
        <= present.get(offer.key, 0)
        <= (present.get(offer.key, 0) if offer.most is None else offer.most)
        for offer in offers
    )
    if allowed and not gains and short_then >= short_now - 1e-6:
        return _decision(kept, columns, kept.objective, present)
    return _decision(best, columns, kept.objective, present)


def _build(
    linear: LinearProgram,
    terms: Mapping[str, Terms],
    offers: Sequence[Offer],
    present: Composition,
    wanted: Mapping[SessionClass, float],
    policy: CompositionPolicy,
) -> _Columns:
    hours = policy.horizon_s / HOUR_S
    columns = _Columns({}, {}, [])
    places: dict[SessionClass, list[tuple[int, float]]] = {one: [] for one in wanted}
    by_kind: dict[str, list[Offer]] = {}
    for offer in offers:
        by_kind.setdefault(offer.kind, []).append(offer)
    for kind, of_kind in by_kind.items():
        its = terms[kind]
        had = sum(present.get(offer.key, 0) for offer in of_kind)
        # A pool above its limit may keep what it has.
        most = float(max(its.most, had))
        hired = linear.column()
        columns.prices.append((hired, its.price * (its.start_s - its.switch_s) / HOUR_S))
        all_workers, all_new = [], []
        for offer in of_kind:
            of_offer = most if offer.most is None else min(float(offer.most), most)
            count = linear.column(min(float(offer.least), of_offer), of_offer, integral=True)
            new = linear.column()
            columns.workers[offer.key] = count
            columns.prices += [(count, its.price * hours), (new, its.price * its.switch_s / HOUR_S)]
            linear.row([(new, 1.0), (count, -1.0)], lower=-float(present.get(offer.key, 0)))
            all_workers.append((count, 1.0))
            all_new.append((new, 1.0))
            _serve(linear, offer.capability, count, places, policy.utilization)
        linear.row(all_workers, upper=most)
        # Of the new workers of all offers, as many are hired as the kind grows; the others are switched.
        linear.row([(hired, 1.0), *((column, -1.0) for column, _ in all_workers)], lower=-float(had))
        linear.row([*all_new, (hired, -1.0)], lower=0.0)
    for one, sessions in wanted.items():
        short = columns.short[one] = linear.column(0.0, sessions)
        columns.prices.append((short, policy.shortage_price * hours))
        linear.row([*places[one], (short, 1.0)], lower=sessions)
    return columns


def _serve(
    linear: LinearProgram,
    capability: Capability,
    workers: int,
    places: dict[SessionClass, list[tuple[int, float]]],
    utilization: float,
) -> None:
    """Add the sessions that the workers of one offer serve: their polytope."""
    time_terms, byte_terms = [], []
    for one, terms in places.items():
        if capability.serves(one):
            column = linear.column()
            terms.append((column, 1.0))
            time_terms.append((column, 1.0 / capability.sessions[one]))
            if capability.memory_bytes and (size := capability.state_bytes.get(one, 0)):
                byte_terms.append((column, size / capability.memory_bytes))
    if time_terms:
        linear.row([*time_terms, (workers, -utilization)], upper=0.0)
    if byte_terms:
        linear.row([*byte_terms, (workers, -1.0)], upper=0.0)


def _decision(
    solution: Solution, columns: _Columns, present_cost: float, present: Composition
) -> CompositionDecision:
    composition = {key: round(solution.values[column]) for key, column in columns.workers.items()}
    composition = {key: count for key, count in composition.items() if count}
    return CompositionDecision(
        composition,
        solution.objective,
        present_cost,
        {one: solution.values[column] for one, column in columns.short.items()},
        composition != {key: count for key, count in present.items() if count},
    )
