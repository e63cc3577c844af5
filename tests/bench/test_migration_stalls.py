"""The stall of a move: how much later than usual the chunk after it came."""

from __future__ import annotations

import pytest

from turboserve.bench.migration.play import stalls


def test_a_stall_is_counted_against_the_chunks_that_no_move_touched() -> None:
    lateness = dict.fromkeys(range(10, 30), 0.2) | {15: 0.23, 16: 0.9, 22: 0.1}
    assert stalls(lateness, [15, 22]) == pytest.approx([0.03, 0.0])


def test_a_chunk_that_never_came_has_no_stall() -> None:
    assert stalls({10: 0.2, 11: 0.2, 12: 0.5}, [12, 40]) == pytest.approx([0.3])
