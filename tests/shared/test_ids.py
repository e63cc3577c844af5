"""Ids and tokens come from the context's source: the system's, or one that a seed determines."""

from __future__ import annotations

import asyncio
import contextvars
import random

from turboserve import ids
from turboserve.contracts.base import is_id


class Seeded:
    def __init__(self, seed: int, now_ms: int = 1_700_000_000_000) -> None:
        self._random, self._now_ms = random.Random(seed), now_ms

    def milliseconds(self) -> int:
        return self._now_ms

    def randbits(self, bits: int) -> int:
        return self._random.getrandbits(bits)


async def drawn(seed: int) -> tuple[str, str, int]:
    ids.use_source(Seeded(seed))
    first = ids.new_id("ses")
    await asyncio.sleep(0)
    return first, ids.random_token(16), await asyncio.create_task(bits())


async def bits() -> int:
    return ids.random_bits(53)


async def test_a_source_holds_for_its_context_and_the_tasks_made_in_it() -> None:
    first, second, other = await asyncio.gather(drawn(1), drawn(1), drawn(2))
    assert first == second
    assert set(first).isdisjoint(other)
    # This context kept the system's source.
    assert ids.new_id("ses") != ids.new_id("ses")


def test_ids_are_ordered_by_their_time_and_accepted_as_ids() -> None:
    def at(now_ms: int) -> str:
        ids.use_source(Seeded(now_ms, now_ms))
        return ids.new_id("ses")

    made = [contextvars.copy_context().run(at, now) for now in (1, 2, 1_000, 1_700_000_000_000)]
    assert made == sorted(made)
    assert all(is_id(name) for name in made)


def test_a_token_has_two_digits_for_each_byte() -> None:
    assert {len(ids.random_token(size)) for size in (16,) * 50} == {32}
