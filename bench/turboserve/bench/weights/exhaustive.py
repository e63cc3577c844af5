"""The least number of rounds in which all receivers get all shards, by search over all plans."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, log2

State = tuple[int, ...]
"""For each receiver: the set of its shards, as bits."""


def least_rounds(holders: int, receivers: int, shards: int) -> int:
    """Rounds of the best plan. In a round, each worker sends at most one shard and receives at most one.

    Every holder has all shards, and all transfers take one round. Feasible for a few workers and shards.
    """
    full = (1 << shards) - 1
    states: set[State] = {(0,) * receivers}
    rounds = 0
    while (full,) * receivers not in states:
        states = {after for state in states for after in _after(state, holders, shards)}
        # Who has a superset of another state's shards is never later.
        states = {one for one in states if not any(one != other and _covers(other, one) for other in states)}
        rounds += 1
    return rounds


def rounds_bound(holders: int, receivers: int, shards: int) -> int:
    """A lower bound of `least_rounds`, for any number of workers and shards.

    Each receiver gets one shard a round; after the first copy of the last shard left a holder, the workers
    that have it at most double in each round.
    """
    # Holders send `shards` different shards at least once, `holders` in a round.
    first_sent = ceil(shards / holders)
    doubling = ceil(log2((receivers + holders) / holders)) if holders < receivers + holders else 0
    return max(shards, first_sent + max(0, doubling - 1))


def _covers(larger: State, smaller: State) -> bool:
    return all(one & other == other for one, other in zip(larger, smaller, strict=True))


def _after(state: State, holders: int, shards: int) -> Iterator[State]:
    """States after one more round in which no further transfer would be possible. Receivers are sorted."""

    def choose(at: int, used: int, free: int, got: tuple[int, ...]) -> Iterator[State]:
        if at == len(state):
            yield tuple(sorted(have | new for have, new in zip(state, got, strict=True)))
            return
        possible = False
        for shard in range(shards):
            bit = 1 << shard
            if state[at] & bit:
                continue
            for source in range(len(state)):
                if source != at and not used >> source & 1 and state[source] & bit:
                    possible = True
                    yield from choose(at + 1, used | 1 << source, free, (*got, bit))
            if free:
                possible = True
                yield from choose(at + 1, used, free - 1, (*got, bit))
        if not possible or at < len(state) - 1:
            yield from choose(at + 1, used, free, (*got, 0))

    yield from choose(0, 0, holders, ())
