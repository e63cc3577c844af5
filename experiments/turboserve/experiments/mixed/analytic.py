"""The highest load of a pool in fractions of sessions, by the cores that decide shares.

The mix has its exact shares, and each kind serves what its polytope says. So this leaves out rounding, the
draw of the sessions and the part of L(b) that classes on one worker do not share; `snapshot` has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from turboserve.allocation.classes import Capability, SessionClass
from turboserve.allocation.linear import LinearProgram
from turboserve.baselines.classes import split_equally
from turboserve.experiments.mixed.family import CLASSES, MIXES, Matrix, matrix
from turboserve.scheduler.placement import SHARES
from turboserve.scheduler.placement.share_keeper import Solve
from turboserve.scheduler.placement.shares import Kind, solve_shares

WANTED = 0.99
LARGE = 1e5
"""A demand that no pool serves, in sessions."""
STEPS = 12
"""Halvings of the bracket. They leave less than 0.05 % of the load."""


def analytic_loads(number: int) -> dict[str, dict[str, list[float]]]:
    """Return by mix and policy the most sessions with 99 % of all served, and with 99 % of each class.

    `any` has what no policy exceeds.
    """
    of = matrix(number)
    kinds = [Kind(f"kind{k}", of.workers, capability) for k, capability in enumerate(of.capabilities)]
    split = split_equally(of.candidates())
    result: dict[str, dict[str, list[float]]] = {}
    for mix, drawn in MIXES.items():
        shares = {one: share / sum(drawn) for one, share in zip(CLASSES, drawn, strict=True)}
        bound = min(solve_shares(kinds, _demand(shares, LARGE)).served.values()) * LARGE
        result[mix] = {
            "static": _static(of, split, shares),
            "class_blind": _class_blind(of, shares),
            "oserve": _found(SHARES.make("oserve"), kinds, shares, bound),
            "oserve_exact": _found(SHARES.make("most-sessions"), kinds, shares, bound),
            # All classes have the same fraction, until the pool serves all.
            "ours": [bound / WANTED, bound / WANTED],
            "any": [most_of_any(kinds, shares), bound / WANTED],
        }
    return result


def most_of_any(kinds: Sequence[Kind], shares: Mapping[SessionClass, float]) -> float:
    """Return a load of a mix that no policy exceeds with 99 % of all sessions served.

    N₀ is the most sessions of the mix that can all be served. Its dual prices say what a session of each
    class takes of the pool, in sessions of the mix: no served sessions are worth more than N₀ together. Of N
    sessions, 1 % may be unserved, and each of these is worth at most r, the price of the dearest class. So
    N - 0.01 N r ≤ N₀. A policy that serves all classes equally has N = N₀ / 0.99, which is less if r > 1.
    """
    linear = LinearProgram()
    load = linear.column()
    rows = {one: [(load, -share)] for one, share in shares.items()}
    for kind in kinds:
        columns = {one: linear.column() for one in shares if kind.capability.serves(one)}
        for one, column in columns.items():
            rows[one].append((column, 1.0))
        linear.row(
            [(column, 1.0 / kind.capability.sessions[one]) for one, column in columns.items()],
            upper=float(kind.workers),
        )
    numbers = {one: linear.row(terms, lower=0.0) for one, terms in rows.items()}
    solution = linear.minimize([(load, -1.0)])
    dearest = max(solution.duals[row] for row in numbers.values())
    return solution.values[load] / (1 - (1 - WANTED) * dearest)


def _demand(shares: Mapping[SessionClass, float], load: float) -> dict[SessionClass, float]:
    return {one: share * load for one, share in shares.items()}


def _found(
    solve: Solve, kinds: list[Kind], shares: Mapping[SessionClass, float], bound: float
) -> list[float]:
    def highest(enough: Callable[[Mapping[SessionClass, float]], bool]) -> float:
        low, high = 0.0, bound * 1.5
        for _ in range(STEPS):
            middle = (low + high) / 2
            served = solve(kinds, _demand(shares, middle), {}).served
            low, high = (middle, high) if enough(served) else (low, middle)
        return low

    return [
        highest(lambda served: sum(served[one] * share for one, share in shares.items()) >= WANTED),
        highest(lambda served: min(served.values()) >= WANTED),
    ]


def _static(
    of: Matrix, split: Mapping[str, SessionClass], shares: Mapping[SessionClass, float]
) -> list[float]:
    """Each class has the slots of its workers. Sessions beyond them wait."""
    slots = dict.fromkeys(CLASSES, 0.0)
    for candidate in of.candidates():
        if (one := split.get(candidate.worker)) is not None and candidate.capability is not None:
            slots[one] += candidate.capability.most(one, {})

    def served(load: float) -> float:
        return sum(min(shares[one] * load, slots[one]) for one in CLASSES) / load

    each = min(slots[one] / shares[one] for one in CLASSES)
    # Between the loads at which a class fills up, the number of served sessions is linear.
    corners = sorted(slots[one] / shares[one] for one in CLASSES)
    low = each
    for left, right in pairwise([*corners, corners[-1] * 2]):
        if served(right) >= WANTED:
            low = right
            continue
        for _ in range(40):
            middle = (left + right) / 2
            left, right = (middle, right) if served(middle) >= WANTED else (left, middle)
        low = max(low, left)
        break
    return [low, each / WANTED]


def _class_blind(of: Matrix, shares: Mapping[SessionClass, float]) -> list[float]:
    """Every worker has the same mix, and as many sessions as its time and memory hold of it."""

    def most(capability: Capability) -> float:
        by_time = 1 / sum(share / capability.sessions[one] for one, share in shares.items())
        size = sum(share * capability.state_bytes[one] for one, share in shares.items())
        return min(by_time, capability.memory_bytes / size)

    load = of.workers * sum(most(capability) for capability in of.capabilities) / WANTED
    return [load, load]
