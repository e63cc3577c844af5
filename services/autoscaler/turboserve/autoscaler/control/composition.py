"""Composition of a pool: how many workers of which kind have which models, at the least cost.

Over the horizon, a composition pays for workers, for the time in which workers start or change their models,
and for sessions without a place. So the cheapest one hires, releases or switches, whatever costs least. A new
composition must save more than the errors of its forecast (hysteresis), unless the present one leaves
sessions without a place.

OServe's search (4.3) knows neither prices nor the cost of switching nor the present deployment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turboserve.allocation.classes import Capability, SessionClass
from turboserve.allocation.linear import LinearProgram
from turboserve.autoscaler.control.composition_numbers import Numbers, WorkerCosts

HOUR_S = 3600.0
LEAST_SHORT = 1e-6
"""Sessions without a place: fewer are none."""
LEAST_DUAL = 1e-9
"""Part of the price of a shortage. A smaller dual price is a rounding error."""


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
    program = _Program(terms, offers, present, forecast, policy, total)
    kept = program.kept()
    # It needs NumPy, which only a pool with several offers has.
    from turboserve.autoscaler.control.composition_search import CompositionSearch

    search = CompositionSearch(program.costs, program.solve)
    best = search.run(kept)
    gains = best.cost < kept.cost * (1 - policy.least_gain)
    if search.is_possible(kept) and not gains and sum(best.missing) >= sum(kept.missing) - LEAST_SHORT:
        best = kept
    counts = zip(program.offers, best.counts, strict=True)
    composition = {offer.key: round(count) for offer, count in counts if round(count)}
    return CompositionDecision(
        composition,
        best.cost,
        kept.cost,
        dict(zip(program.wanted, best.missing, strict=True)),
        composition != {key: count for key, count in present.items() if count},
    )


class _Program:
    """The linear program of the costs, for numbers of workers that are given or may be fractions."""

    def __init__(
        self,
        terms: Mapping[str, Terms],
        offers: Sequence[Offer],
        present: Composition,
        forecast: Mapping[SessionClass, float],
        policy: CompositionPolicy,
        total: int | None,
    ) -> None:
        hours = policy.horizon_s / HOUR_S
        self.offers = offers
        self.wanted = {one: count for one, count in forecast.items() if count > 0}
        self.costs = _costs_of_workers(terms, offers, present, hours, total)
        self._linear = LinearProgram()
        self._shortage = policy.shortage_price * hours
        self._places: dict[SessionClass, list[tuple[int, float]]] = {one: [] for one in self.wanted}
        self._prices: list[tuple[int, float]] = []
        self._counts = [self._linear.column() for _ in offers]
        self._limits = [
            self._serve(offer.capability, count, policy.utilization)
            for offer, count in zip(offers, self._counts, strict=True)
        ]
        self._pay_workers()
        self._short = [self._linear.column(0.0, sessions) for sessions in self.wanted.values()]
        self._prices += [(column, self._shortage) for column in self._short]
        self._served = [
            self._linear.row([*self._places[one], (short, 1.0)], lower=sessions)
            for (one, sessions), short in zip(self.wanted.items(), self._short, strict=True)
        ]
        self._total = self._linear.row([(count, 1.0) for count in self._counts])
        self._is_priced = False

    def _pay_workers(self) -> None:
        linear, costs = self._linear, self.costs
        for kind, (most, hired_price) in enumerate(zip(costs.most, costs.hired, strict=True)):
            places = [place for place, its in enumerate(costs.kinds) if its == kind]
            of_kind = [(self._counts[place], 1.0) for place in places]
            hired = linear.column()
            for place in places:
                new = linear.column()
                self._prices += [(self._counts[place], costs.price[place]), (new, costs.new[place])]
                linear.row([(new, 1.0), (self._counts[place], -1.0)], lower=-costs.present[place])
            linear.row(of_kind, upper=most)
            # Of the new workers of all offers, as many are hired as the kind grows; the others are switched.
            self._prices.append((hired, hired_price))
            had = sum(costs.present[place] for place in places)
            linear.row([(hired, 1.0), *((column, -1.0) for column, _ in of_kind)], lower=-had)

    def _serve(self, capability: Capability, workers: int, utilization: float) -> list[tuple[int, float]]:
        """Add the sessions that the workers of one offer serve: their polytope.

        Returns its rows, and how much of each a worker is.
        """
        time_terms, byte_terms, found = [], [], list[tuple[int, float]]()
        for one, terms in self._places.items():
            if capability.serves(one):
                column = self._linear.column()
                terms.append((column, 1.0))
                time_terms.append((column, 1.0 / capability.sessions[one]))
                if capability.memory_bytes and (size := capability.state_bytes.get(one, 0)):
                    byte_terms.append((column, size / capability.memory_bytes))
        if time_terms:
            found.append((self._linear.row([*time_terms, (workers, -utilization)], upper=0.0), utilization))
        if byte_terms:
            found.append((self._linear.row([*byte_terms, (workers, -1.0)], upper=0.0), 1.0))
        return found

    def kept(self) -> Numbers:
        """Return what the present workers cost, whatever the limits are."""
        found = self.solve(self.costs.present, self.costs.present)
        if self.costs.total is not None:
            self._linear.bound_row(self._total, float(self.costs.total), float(self.costs.total))
        return found

    def solve(self, lower: Sequence[float], upper: Sequence[float]) -> Numbers:
        """Return the optimum between these limits. Raises SolverError."""
        self._linear.bound_columns(self._counts, lower, upper)
        # The objective stays.
        solution = self._linear.again() if self._is_priced else self._linear.minimize(self._prices)
        self._is_priced = True
        # Dual prices times a factor bound the costs too, if no session costs more than without a place.
        duals = [solution.duals[row] for row in self._served]
        dearest = max(duals, default=0.0)
        factor = self._shortage / dearest if dearest > LEAST_DUAL * self._shortage else 0.0
        # Values may be beyond their limits by more than the solver's tolerance.
        found = zip(self._counts, lower, upper, strict=True)
        return Numbers(
            [min(max(solution.values[column], least), most) for column, least, most in found],
            solution.objective,
            [solution.values[column] for column in self._short],
            factor * sum(dual * sessions for dual, sessions in zip(duals, self.wanted.values(), strict=True)),
            [factor * sum(solution.duals[row] * part for row, part in rows) for rows in self._limits],
        )


def _costs_of_workers(
    terms: Mapping[str, Terms], offers: Sequence[Offer], present: Composition, hours: float, total: int | None
) -> WorkerCosts:
    kinds = list(dict.fromkeys(offer.kind for offer in offers))
    its = [terms[kind] for kind in kinds]
    of_offers = [terms[offer.kind] for offer in offers]
    now = [float(present.get(offer.key, 0)) for offer in offers]
    had = Counter[str]()
    for offer in offers:
        had[offer.kind] += present.get(offer.key, 0)
    # A pool above its limit may keep what it has.
    most = [float(max(terms[kind].most, had[kind])) for kind in kinds]
    upper = [
        of_kind if offer.most is None else min(float(offer.most), of_kind)
        for offer in offers
        for of_kind in [most[kinds.index(offer.kind)]]
    ]
    return WorkerCosts(
        kinds=[kinds.index(offer.kind) for offer in offers],
        price=[one.price * hours for one in of_offers],
        # A worker that starts sooner than another one switches is hired.
        new=[one.price * min(one.switch_s, one.start_s) / HOUR_S for one in of_offers],
        hired=[one.price * max(one.start_s - one.switch_s, 0.0) / HOUR_S for one in its],
        present=now,
        lower=[min(float(offer.least), limit) for offer, limit in zip(offers, upper, strict=True)],
        upper=upper,
        most=most,
        total=total,
    )
