"""A search for the cheapest whole numbers of workers of each offer.

The cost of some numbers of workers has two parts: that of the workers, which is a sum, and that of the
sessions without a place, which is a linear program. Dual prices of one such program bound the second part
from below for all numbers of workers (J. Benders, 1962). So most numbers are ruled out without a program of
their own.

If there are few numbers in all, each is tried or ruled out, and the result is the optimum. If there are many,
the search begins with rounded fractions. It ends when no exchange of up to two workers for up to two others
saves anything. The number of programs is limited, not the time: the result does not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations_with_replacement
from math import ceil, floor, inf, prod

import numpy as np
from numpy.typing import NDArray

from turboserve.allocation.linear import SolverError
from turboserve.autoscaler.control.composition_numbers import WHOLE, Numbers, WorkerCosts

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

FEW = 20_000
"""Most numbers that are all tried or ruled out."""
EXCHANGES = ((2, 1), (2, 2))
"""Workers that an exchange removes and adds, at most."""
MANY = 300_000
"""Exchanges that are too many to look at. Smaller ones have to do."""
PROGRAMS = 150
"""Linear programs after which no further numbers are tried."""
LEAST_SAVING = 1e-6
"""Part of the cost that other numbers must save."""
JUMP = 0.02
"""A fraction is rounded up if rounding it down raises the cost by more than this part."""
SHARP = 10
"""Bounds that are compared first: the largest ones of the numbers before an exchange."""


class CompositionSearch:
    """One search."""

    def __init__(
        self, costs: WorkerCosts, solve: Callable[[Sequence[float], Sequence[float]], Numbers]
    ) -> None:
        """`solve` returns the optimum between lower and upper limits, or raises SolverError."""
        self._solve, self._total = solve, costs.total
        self._price, self._new, self._hired = (np.array(one) for one in (costs.price, costs.new, costs.hired))
        self._lower, self._upper, self._most = (
            np.array(one) for one in (costs.lower, costs.upper, costs.most)
        )
        self._of_kind = np.array(
            [[float(kind == own) for kind in range(len(costs.most))] for own in costs.kinds]
        )
        self._present = np.array(costs.present)
        self._had = self._present @ self._of_kind
        self._slopes: list[Floats] = []
        self._at_zero: list[float] = []
        self.programs = 0
        """Number of linear programs."""

    def run(self, known: Numbers) -> Numbers:
        """Return the cheapest whole numbers. `known`: the present ones, which may be beyond the limits.

        Raises SolverError if there are none.
        """
        self._note(known)
        best = self._rounded(self._tried(self._lower.tolist(), self._upper.tolist()))
        if self.is_possible(known) and known.cost <= best.cost:
            best = known
        if prod((self._upper - self._lower + 1).astype(int).tolist()) > FEW:
            return self._exchanged(best)
        points = self._all_points()
        return self._cheapest(points, self._cost_of_workers(points), best)

    def is_possible(self, numbers: Numbers) -> bool:
        """Return whether whole numbers are within the limits."""
        counts = np.array(numbers.counts)
        within = (counts >= self._lower).all() and (counts <= self._upper).all()
        return bool(within and self._are_allowed(counts[None])[0])

    def _tried(self, lower: Sequence[float], upper: Sequence[float]) -> Numbers:
        self.programs += 1
        numbers = self._solve(lower, upper)
        self._note(numbers)
        return numbers

    def _note(self, numbers: Numbers) -> None:
        if numbers.at_zero:
            self._slopes.append(np.array(numbers.slopes))
            self._at_zero.append(numbers.at_zero)

    def _rounded(self, numbers: Numbers) -> Numbers:
        """Round the fraction that is nearest to a whole number, and so on. Raises SolverError."""
        lower, upper = self._lower.tolist(), self._upper.tolist()
        while fractions := numbers.fractions:
            place, value = min(fractions, key=lambda one: abs(one[1] - round(one[1])))
            highest, rounded = numbers.cost * (1 + JUMP), None
            for up in (False, True) if value % 1 < 0.5 else (True, False):
                limits = lower.copy(), upper.copy()
                limits[not up][place] = float(ceil(value) if up else floor(value))
                try:
                    rounded = self._tried(*limits), limits
                except SolverError:
                    continue
                if up or rounded[0].cost <= highest:
                    break
            if rounded is None:
                raise SolverError("no optimum: no whole numbers of workers")
            numbers, (lower, upper) = rounded
        # A little of a worker serves a session where one serves a million.
        whole = [float(round(count)) for count in numbers.counts]
        return numbers if whole == numbers.counts else self._tried(whole, whole)

    def _exchanged(self, best: Numbers) -> Numbers:
        """Exchange workers until no exchange saves anything."""
        place = 0
        while place < len(EXCHANGES):
            candidates, workers = self._neighbors(best, *EXCHANGES[place])
            better = self._cheapest(candidates, workers, best, first=True)
            place, best = (place + 1, best) if better is best else (0, better)
        return best

    def _cheapest(self, candidates: Floats, workers: Floats, best: Numbers, first: bool = False) -> Numbers:
        """Return the cheapest of `best` and the candidates, whose workers cost `workers`.

        `first`: end with the first one that is cheaper than `best`.
        """
        least = workers
        if self._slopes:
            short = candidates @ np.array(self._slopes).T + np.array(self._at_zero)
            least = workers + np.maximum(short.max(axis=1, initial=0.0), 0.0)
        while self.programs < PROGRAMS:
            kept = least < _enough(best)
            candidates, workers, least = candidates[kept], workers[kept], least[kept]
            if not len(least):
                break
            place = int(least.argmin())
            counts = candidates[place].tolist()
            least[place] = inf
            try:
                tried = self._tried(counts, counts)
            except SolverError:
                # What is known so far is better than no decision.
                continue
            if tried.at_zero:
                least = np.maximum(least, workers + candidates @ self._slopes[-1] + self._at_zero[-1])
            if tried.cost < _enough(best):
                best = tried
                if first:
                    break
        return best

    def _cost_of_workers(self, counts: Floats) -> Floats:
        hired: Floats = np.maximum(counts @ self._of_kind - self._had, 0.0) @ self._hired
        return self._cost_of_offers(counts) + hired

    def _cost_of_offers(self, counts: Floats) -> Floats:
        """Return what the workers cost, but for the growth of kinds."""
        cost: Floats = counts @ self._price + np.maximum(counts - self._present, 0.0) @ self._new
        return cost

    def _are_allowed(self, counts: Floats) -> Flags:
        """Return whether the numbers of kinds and of all workers are within their limits."""
        allowed: Flags = (counts @ self._of_kind <= self._most + WHOLE).all(axis=1)
        return allowed if self._total is None else allowed & (counts.sum(axis=1) == self._total)

    def _all_points(self) -> Floats:
        shape = (self._upper - self._lower + 1).astype(int)
        points: Floats = np.indices(shape).reshape(len(shape), -1).T + self._lower
        return points[self._are_allowed(points)]

    def _neighbors(self, best: Numbers, fewer: int, more: int) -> tuple[Floats, Floats]:
        """Return numbers after exchanges that some bounds do not rule out, and what their workers cost."""
        counts = np.round(np.array(best.counts))
        base = counts - _sums(len(counts), fewer)
        base = base[(base >= self._lower).all(axis=1)]
        added = _sums(len(counts), more)
        added = added[(counts + added <= self._upper).all(axis=1)]
        if len(base) * len(added) > MANY:
            return counts[:0].reshape(0, len(counts)), counts[:0]
        # Where an offer is in both, the exchange is a smaller one, which costs no more than this says.
        of_offers = self._cost_of_offers
        workers = of_offers(base)[:, None] + (of_offers(counts + added) - of_offers(counts[None]))
        rest, growth = base @ self._of_kind, added @ self._of_kind
        for kind, most in enumerate(self._most):
            of_kind = rest[:, kind, None] + growth[:, kind]
            workers += self._hired[kind] * np.maximum(of_kind - self._had[kind], 0.0)
            workers[of_kind > most + WHOLE] = inf
        if self._total is not None:
            workers[base.sum(axis=1)[:, None] + added.sum(axis=1) != self._total] = inf
        bases, places = np.nonzero(workers < _enough(best))
        if self._slopes:
            slopes, at_zero = np.array(self._slopes).T, np.array(self._at_zero)
            short, less = base @ slopes + at_zero, added @ slopes
            for bound in np.argsort(-(counts @ slopes + at_zero))[:SHARP]:
                least = workers[bases, places] + short[bases, bound] + less[places, bound]
                kept = least < _enough(best)
                bases, places = bases[kept], places[kept]
        return base[bases] + added[places], workers[bases, places]


@cache
def _sums(offers: int, most: int) -> Floats:
    """Return the numbers of at most so many workers."""
    found = np.zeros((0, offers))
    for count in range(most + 1):
        chosen = np.array([*combinations_with_replacement(range(offers), count)], dtype=np.int64)
        sums = np.zeros((len(chosen), offers))
        for offer in chosen.T:
            sums[np.arange(len(chosen)), offer] += 1.0
        found = np.concatenate([found, sums])
    return found


def _enough(best: Numbers) -> float:
    """Return what other numbers must cost less than."""
    return best.cost - LEAST_SAVING * max(1.0, best.cost)
