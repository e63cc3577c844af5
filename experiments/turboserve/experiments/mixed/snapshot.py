"""The highest load of a pool, evaluated by the placement cores on a snapshot of sessions.

A snapshot has N sessions, in the order in which they come. A policy places them one after the other, with the
shares of all N. A chunk is in time if its session has a worker and the worker's chunks of all its classes
take at most a chunk's playing time together: Σ_j L_j(x_j) ≤ T. On a worker that takes longer, every chunk
comes later than the one before, so all of them count as late. So do those of a session without a worker, and
of one whose state the worker's memory does not hold.

No chunk is played out: `plant` does that for some of the matrices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice

from turboserve.allocation.classes import ROUNDING, Capability, SessionClass
from turboserve.experiments.mixed.family import CLASSES, MIXES, Matrix, classes_drawn, matrix
from turboserve.scheduler.placement import PLACEMENTS, SHARES, Demand, MixedMinMax, Placement, ShareKeeper
from turboserve.scheduler.placement.mixed import MixedLatency
from turboserve.scheduler.placement.pool import CHUNK_S
from turboserve.scheduler.placement.shares import Kind, solve_shares

POLICIES: dict[str, Callable[[], Placement]] = {
    "static": lambda: PLACEMENTS.make("static-split"),
    "class_blind": lambda: PLACEMENTS.make("class-blind"),
    "oserve": lambda: MixedMinMax(keeper=ShareKeeper(SHARES.make("oserve"))),
    "oserve_exact": lambda: MixedMinMax(keeper=ShareKeeper(SHARES.make("most-sessions"))),
    "ours": lambda: MixedMinMax(keeper=ShareKeeper(SHARES.make("exact"))),
}
WANTED = 0.99


def in_time(
    of: Matrix, policy: Placement, sessions: Sequence[SessionClass], now: float = 0.0
) -> dict[SessionClass, float]:
    """Return the share of chunks in time of each class among `sessions`. `now`: time of the snapshot."""
    candidates = of.candidates()
    demands = [Demand(f"s{i}", "mixed", "place", session_class=one) for i, one in enumerate(sessions)]
    if isinstance(policy, MixedMinMax):
        policy.observe(candidates, demands, now)
    choices = policy.place(candidates, demands)
    held: dict[str, Counter[SessionClass]] = {candidate.worker: Counter() for candidate in candidates}
    kinds = {f"kind{k}-{i}": k for k in range(len(of.capabilities)) for i in range(of.workers)}
    for choice, one in zip(choices, sessions, strict=True):
        name = choice.worker
        if name is not None and _has_memory(of.capabilities[kinds[name]], held[name], one):
            held[name][one] += 1
    good: Counter[SessionClass] = Counter()
    for name, counts in held.items():
        k = kinds[name]
        latency = MixedLatency(of.capabilities[k], of.latency_s[k], CHUNK_S)
        if latency(counts) <= CHUNK_S * (1 + ROUNDING):
            good.update(counts)
    wanted = Counter(sessions)
    return {one: good[one] / count for one, count in wanted.items()}


def _has_memory(capability: Capability, held: Counter[SessionClass], one: SessionClass) -> bool:
    sizes = capability.state_bytes
    used = sum(count * sizes[other] for other, count in held.items()) + sizes[one]
    return used <= capability.memory_bytes


def fluid_load(of: Matrix, mix: str) -> float:
    """Return the most sessions of a mix that fractions of sessions on whole kinds could serve: the bound."""
    kinds = [Kind(f"kind{k}", of.workers, capability) for k, capability in enumerate(of.capabilities)]
    large = 1e5
    shares = dict(zip(CLASSES, MIXES[mix], strict=True))
    solved = solve_shares(kinds, {one: share * large for one, share in shares.items()})
    return min(solved.served.values()) * large


def fluid_of(number: int, mix: str) -> float:
    """Return `fluid_load` of a matrix by its number."""
    return fluid_load(matrix(number), mix)


def load_at_99(number: int, mix: str, name: str, seed: int) -> list[int]:
    """Return the most sessions with 99 % of all chunks in time, and with 99 % of those of each class.

    Both are found by bisection.
    """
    of = matrix(number)
    high = int(fluid_load(of, mix) * 1.2) + 8
    sessions = list(islice(classes_drawn(mix, seed), high))

    policy = POLICIES[name]()

    def found(enough: Callable[[dict[SessionClass, float], Counter[SessionClass]], bool]) -> int:
        low, above = 0, high
        while above - low > 1:
            middle = (low + above) // 2
            part = sessions[:middle]
            if middle not in known:
                # A minute apart, so that the shares are solved anew.
                known[middle] = in_time(of, policy, part, 60.0 * len(known))
            low, above = (middle, above) if enough(known[middle], Counter(part)) else (low, middle)
        return low

    known: dict[int, dict[SessionClass, float]] = {}
    overall = found(
        lambda good, counts: sum(good[c] * n for c, n in counts.items()) >= WANTED * counts.total()
    )
    each = found(lambda good, counts: min(good.values()) >= WANTED)
    return [overall, each]
