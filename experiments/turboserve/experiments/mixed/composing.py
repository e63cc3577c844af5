"""Compositions against an exhaustive oracle and OServe's search, on declared kinds of workers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from random import Random
from typing import Any

from turboserve.allocation.classes import Capability, SessionClass
from turboserve.allocation.linear import LinearProgram
from turboserve.autoscaler.control.composition import (
    HOUR_S,
    Composition,
    CompositionPolicy,
    Offer,
    OfferKey,
    Terms,
    decide,
)
from turboserve.baselines.oserve import MostSessions
from turboserve.bench.report import percentile
from turboserve.experiments.mixed.random_search import RandomSearch
from turboserve.scheduler.placement.shares import Kind, solve_shares

SMALL = {"kinds": 2, "models": 2, "most": 2}
LARGE = {"kinds": 4, "models": 3, "most": 16}
"""64 workers of 4 kinds at most, 3 models at 2 resolutions: 6 classes."""
WANTED_S = 0.050
EXACT = 1e-4
"""Relative distance from the optimum that counts as the optimum."""


@dataclass(frozen=True)
class CompositionCase:
    """One decision."""

    terms: Mapping[str, Terms]
    offers: Sequence[Offer]
    present: Composition
    forecast: Mapping[SessionClass, float]


def drawn_case(number: int, kinds: int, models: int, most: int) -> CompositionCase:
    """Draw kinds of unlike speed and price, offers of one or two models, a present pool and a forecast."""
    source = Random(f"composition {number} {kinds} {models} {most}")
    names = [f"m{index}" for index in range(models)]
    sizes = {name: [SessionClass(name, 832, 480), SessionClass(name, 1280, 720)] for name in names}
    terms: dict[str, Terms] = {}
    offers: list[Offer] = []
    for index in range(kinds):
        speed = source.uniform(0.7, 2.8)
        kind = f"k{index}"
        terms[kind] = Terms(2.0 * speed**0.9 * source.uniform(0.8, 1.25), most, 60.0, 20.0)
        rates = {
            one: max(1, int(speed * source.uniform(3, 9) / (1 if one.height < 500 else 2)))
            for name in names
            for one in sizes[name]
        }
        for count in (1, 2):
            for chosen in combinations(names, count):
                # Two models leave less memory for states.
                part = 1.0 if count == 1 else 0.8
                n = {one: max(1, int(rates[one] * part)) for name in chosen for one in sizes[name]}
                offers.append(Offer(kind, chosen, Capability(n)))
    capacity = sum(terms[o.kind].most * max(o.capability.sessions.values()) for o in offers) / len(offers)
    classes = [one for name in names for one in sizes[name]]
    weights = [source.uniform(0.2, 1.0) for _ in classes]
    total = capacity * kinds * source.uniform(0.15, 0.35)
    forecast = {one: round(total * w / sum(weights)) for one, w in zip(classes, weights, strict=True)}
    present: Counter[OfferKey] = Counter()
    for offer in offers:
        of_kind = sum(n for key, n in present.items() if key[0] == offer.kind)
        present[offer.key] = source.randint(0, max(0, min(most // 3, most - of_kind)))
    return CompositionCase(terms, offers, +present, forecast)


def oracle_cost(case: CompositionCase, policy: CompositionPolicy) -> float:
    """Return the least cost of all compositions, by trying each one."""
    choices = [range(max(case.terms[o.kind].most, case.present.get(o.key, 0)) + 1) for o in case.offers]
    best = float("inf")
    for counts in product(*choices):
        composition = {o.key: n for o, n in zip(case.offers, counts, strict=True) if n}
        if all(_of_kind(composition, kind) <= _limit(case, kind) for kind in case.terms):
            # The cost without a shortage is a bound, which spares most programs.
            certain = cost_of(case, composition)
            if certain < best:
                short = _shortage(case, composition, policy.utilization)
                best = min(best, certain + short * policy.shortage_price * policy.horizon_s / HOUR_S)
    return best


def _limit(case: CompositionCase, kind: str) -> int:
    return max(case.terms[kind].most, _of_kind(case.present, kind))


def _of_kind(composition: Composition, kind: str) -> int:
    return sum(n for key, n in composition.items() if key[0] == kind)


def cost_of(case: CompositionCase, composition: Composition, horizon_s: float = 1800.0) -> float:
    """Return the price of the workers over the horizon, and of starting and switching them."""
    cost = 0.0
    for kind, its in case.terms.items():
        count = _of_kind(composition, kind)
        new = sum(max(0, n - case.present.get(key, 0)) for key, n in composition.items() if key[0] == kind)
        hired = max(0, count - _of_kind(case.present, kind))
        cost += its.price * count * horizon_s / HOUR_S
        cost += its.price * (hired * its.start_s + (new - hired) * its.switch_s) / HOUR_S
    return cost


def _shortage(case: CompositionCase, composition: Composition, utilization: float) -> float:
    """Return how many sessions have no place: another program than the decision's."""
    capabilities = {offer.key: offer.capability for offer in case.offers}
    kinds = [Kind(" ".join((key[0], *key[1])), n, capabilities[key]) for key, n in composition.items()]
    scaled = {one: count / utilization for one, count in case.forecast.items()}
    served = sum(MostSessions()(kinds, scaled, {}).sessions.values()) if kinds else 0.0
    return max(0.0, sum(case.forecast.values()) - served * utilization)


def optimum_cost(case: CompositionCase, policy: CompositionPolicy) -> float:
    """Return the least cost of all compositions, by a mixed-integer program: for many workers."""
    linear, hours = LinearProgram(), policy.horizon_s / HOUR_S
    prices: list[tuple[int, float]] = []
    places: dict[SessionClass, list[tuple[int, float]]] = {one: [] for one in case.forecast}
    for kind, its in case.terms.items():
        workers = []
        hired = linear.column()
        for offer in (one for one in case.offers if one.kind == kind):
            count, new = linear.column(0.0, float(_limit(case, kind)), integral=True), linear.column()
            workers.append((count, 1.0))
            prices += [(count, its.price * hours), (new, its.price * its.switch_s / HOUR_S)]
            linear.row([(new, 1.0), (count, -1.0)], lower=-float(case.present.get(offer.key, 0)))
            served = {one: linear.column() for one in case.forecast if offer.capability.serves(one)}
            used = [(column, 1.0 / offer.capability.sessions[one]) for one, column in served.items()]
            linear.row([*used, (count, -policy.utilization)], upper=0.0)
            for one, column in served.items():
                places[one].append((column, 1.0))
        prices.append((hired, its.price * (its.start_s - its.switch_s) / HOUR_S))
        linear.row(workers, upper=float(_limit(case, kind)))
        grown = [(column, -1.0) for column, _ in workers]
        linear.row([(hired, 1.0), *grown], lower=-float(_of_kind(case.present, kind)))
    for one, sessions in case.forecast.items():
        short = linear.column()
        prices.append((short, policy.shortage_price * hours))
        linear.row([*places[one], (short, 1.0)], lower=float(sessions))
    return linear.minimize(prices, EXACT).objective


def composition_figures(cases: int, rounds: int, seed: int) -> dict[str, Any]:
    """Return gaps to the oracle, times, and what OServe's search finds with the same workers."""
    policy = CompositionPolicy()
    gaps = []
    for number in range(seed, seed + cases):
        case = drawn_case(number, **SMALL)
        best = oracle_cost(case, policy)
        decision = decide(case.terms, case.offers, case.present, case.forecast, policy)
        gaps.append(100 * (decision.cost / best - 1))
    seconds, workers, served, searched_s, exact_s, above = [], [], [], [], [], []
    for number in range(seed, seed + rounds):
        case = drawn_case(number, **LARGE)
        began = time.thread_time()
        decision = decide(case.terms, case.offers, case.present, case.forecast, policy)
        seconds.append(time.thread_time() - began)
        began = time.thread_time()
        least = optimum_cost(case, policy)
        exact_s.append(time.thread_time() - began)
        above.append(100 * (decision.cost / least - 1))
        workers.append(sum(decision.composition.values()))
        began = time.thread_time()
        numbers = {kind: _of_kind(decision.composition, kind) for kind in case.terms}
        found = RandomSearch(number)(case.offers, numbers, case.forecast)
        searched_s.append(time.thread_time() - began)
        served.append(_least_served(case, found))
    return {
        "oracle_gap_percent": {"mean": sum(gaps) / len(gaps), "max": max(gaps), "cases": cases},
        "decision_s": {
            "p50": percentile(seconds, 0.5),
            "p99": percentile(seconds, 0.99),
            "p50_of_50_ms": (percentile(seconds, 0.5) or 0.0) / WANTED_S,
            "max": max(seconds),
            "decisions": rounds,
            "exact_p50": percentile(exact_s, 0.5),
            "exact_max": max(exact_s),
            "of_exact_p50": percentile([own / all_ for own, all_ in zip(seconds, exact_s, strict=True)], 0.5),
            "optimum_gap_percent": {"mean": sum(above) / len(above), "max": max(above)},
            "mean_workers": sum(workers) / len(workers),
        },
        "oserve_search": {
            "least_served_median": percentile(served, 0.5),
            "least_served_worst": min(served),
            "p50_s": percentile(searched_s, 0.5),
        },
    }


def _least_served(case: CompositionCase, composition: Composition) -> float:
    """Return the least served share of a class, with the best shares on these workers."""
    capabilities = {offer.key: offer.capability for offer in case.offers}
    kinds = [Kind(" ".join((key[0], *key[1])), n, capabilities[key]) for key, n in composition.items()]
    return min(solve_shares(kinds, case.forecast).served.values(), default=1.0)
