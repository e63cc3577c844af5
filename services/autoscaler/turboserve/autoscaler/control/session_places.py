"""Which sessions have a place on workers that serve one class each, or several.

Sessions are whole. A worker serves x_j sessions of its classes while Σ x_j / n_j ≤ 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Generic, TypeVar

from turboserve.allocation.linear import LinearProgram

K = TypeVar("K", bound=Hashable)
"""A class of sessions, or its name."""
Workers = Iterable[tuple[Mapping[K, int], int]]
"""n_j of a worker by class, and the number of such workers."""
ROUNDING = 1e-6


def without_place(workers: Workers[K], sessions: Mapping[K, int]) -> dict[K, int]:
    """Return how many sessions of each class have no place. Classes without any are left out."""
    found = with_place(workers, sessions)
    return {one: count - found[one] for one, count in sessions.items() if count > found[one]}


def keeps_places(now: Workers[K], after: Workers[K], sessions: Mapping[K, int]) -> bool:
    """Whether every session that has a place on the workers `now` has one on those `after`."""
    return not without_place(after, with_place(now, sessions))


def with_place(workers: Workers[K], sessions: Mapping[K, int]) -> dict[K, int]:
    """Return how many sessions of each class have a place on the workers.

    The numbers are exact where each worker serves one class. Where some serve several, they are those of one
    way to place the sessions. Another way may place more.
    """
    alone: Counter[K] = Counter()
    several: list[_SharedWorkers[K]] = []
    for served, count in workers:
        if len(served) > 1:
            if count > 0:
                several.append(_SharedWorkers.of(served, count))
            continue
        for one, most in served.items():
            alone[one] += most * count
    found = {one: min(count, alone[one]) for one, count in sessions.items()}
    left = {one: more for one, count in sessions.items() if (more := count - found[one]) > 0}
    if several and left:
        for one, count in _on_shared(several, left).items():
            found[one] += count
    return found


@dataclass
class _SharedWorkers(Generic[K]):
    """Workers that serve the same classes. A worker has lcm(n_j) units, and a session takes lcm / n_j."""

    served: Mapping[K, int]
    units: Mapping[K, int]
    free: list[int]
    """Free units of each worker."""

    @classmethod
    def of(cls, served: Mapping[K, int], count: int) -> _SharedWorkers[K]:
        serves = {one: most for one, most in served.items() if most > 0}
        whole = lcm(*serves.values())
        return cls(serves, {one: whole // most for one, most in serves.items()}, [whole] * count)

    def take(self, one: K, count: int) -> int:
        """Place up to `count` sessions of a class. Returns how many."""
        size, taken = self.units.get(one, 0), 0
        if not size:
            return 0
        for index, free in enumerate(self.free):
            if taken == count:
                break
            fit = min(free // size, count - taken)
            self.free[index] -= fit * size
            taken += fit
        return taken


def _on_shared(workers: Sequence[_SharedWorkers[K]], sessions: Mapping[K, int]) -> Counter[K]:
    """Place sessions on workers of several classes. The largest ones come first, then what is left."""
    placed: Counter[K] = Counter()
    if len(workers) > 1:
        for index, part in enumerate(_parts(workers, sessions)):
            for one in sorted(part, key=lambda one: workers[index].served[one]):
                placed[one] += workers[index].take(one, part[one])

    def least(one: K) -> int:
        return min((each.served[one] for each in workers if one in each.served), default=0)

    for one in sorted(sessions, key=least):
        for each in workers:
            placed[one] += each.take(one, sessions[one] - placed[one])
    return placed


def _parts(workers: Sequence[_SharedWorkers[K]], sessions: Mapping[K, int]) -> list[dict[K, int]]:
    """Return how many sessions of each class which workers serve, if parts of sessions could have a place."""
    linear, columns = LinearProgram(), list[dict[K, int]]()
    for each in workers:
        mine = {one: linear.column() for one in sessions if one in each.served}
        columns.append(mine)
        if mine:
            used = [(column, 1.0 / each.served[one]) for one, column in mine.items()]
            linear.row(used, upper=float(len(each.free)))
    short = {one: linear.column(0.0, float(count)) for one, count in sessions.items()}
    for one, count in sessions.items():
        places = [(mine[one], 1.0) for mine in columns if one in mine]
        linear.row([*places, (short[one], 1.0)], float(count), float(count))
    values = linear.minimize([(column, 1.0) for column in short.values()]).values
    return [{one: int(values[column] + ROUNDING) for one, column in mine.items()} for mine in columns]
