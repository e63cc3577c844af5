"""The stall of a migration: how much later than usual the chunk after it came."""

from __future__ import annotations

import pytest

from turboserve.bench.migration.watched_session import keeps_up, stalls


def test_a_stall_is_counted_against_the_chunks_that_no_migrate_touched() -> None:
    lateness = dict.fromkeys(range(10, 30), 0.2) | {15: 0.23, 16: 0.9, 22: 0.1}
    assert stalls(lateness, [15, 22]) == pytest.approx([0.03, 0.0])


def test_a_chunk_that_never_came_has_no_stall() -> None:
    assert stalls({10: 0.2, 11: 0.2, 12: 0.5}, [12, 40]) == pytest.approx([0.3])


def test_a_session_behind_its_viewer_is_distinguished_from_one_delayed_by_a_migration() -> None:
    assert keeps_up(dict.fromkeys(range(20), 0.1) | {5: 3.0}, 0.75)
    assert not keeps_up({index: 0.1 * index for index in range(20)}, 0.75)
