"""The simulation: many short seeds without a violation, and planted faults that each check must find."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from turboserve.autoscaler import lifecycle
from turboserve.autoscaler.control.advisor import Advice, Advisor
from turboserve.autoscaler.control.hearing import Hearing
from turboserve.bench.simulate import command, copying, engine, log, play
from turboserve.bench.simulate.faults import CALM, Faults
from turboserve.bench.simulate.names import INVARIANTS
from turboserve.bus.log import Ack
from turboserve.contracts.sessions import SessionRecord
from turboserve.scheduler.leadership import Leadership
from turboserve.scheduler.placement import Choice, Cluster, Demand, MinMax
from turboserve.state_store.core import sessions, workers
from turboserve.worker.service import commands as do
from turboserve.worker.service.lease import Lease
from turboserve.worker.service.table import Table

SHORT_S = 10.0


def violations(seeds: Sequence[int], faults: Faults | None = None, seconds: float = SHORT_S) -> set[str]:
    """Names of the invariants that are violated in any of these seeds; stops at the first seed with one."""
    for seed in seeds:
        outcome = play.play(seed, seconds=seconds, faults=faults)
        if outcome.violations:
            return set(outcome.violations)
    return set()


@pytest.mark.parametrize("first", range(10_000, 10_200, 25))
def test_no_seed_violates_anything(first: int) -> None:
    result = command.run(seeds=25, first=first, seconds=SHORT_S)
    assert result["failing"] == []
    assert set(result["violations"]) == set(INVARIANTS)
    assert result["counts"]["moves"] > 0
    assert result["counts"]["kills"] > 0
    assert result["played_twice"] >= 1


def test_a_calm_run_moves_and_ends_its_sessions() -> None:
    outcome = play.play(3, faults=CALM)
    assert outcome.violations == {}
    assert outcome.counts["chunks"] > 20
    assert outcome.settled_s is not None


def test_the_same_seed_gives_the_same_trace_in_another_process() -> None:
    """Also with another order of sets: no decision may depend on it."""
    code = f"""
from turboserve.bench.simulate.play import play
print(*(play(seed, seconds={SHORT_S}).digest for seed in (5, 6, 7)))
"""
    digests = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for seed in ("1", "2")
    ]
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 3
    assert digests[0][0] == play.play(5, seconds=SHORT_S).digest


def test_a_failing_seed_prints_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log.Stream, "append", _without_fence(log.Stream.append))
    failed = next(o for o in (play.play(seed, seconds=SHORT_S) for seed in range(40)) if o.violations)
    [found] = command.run(seed=failed.seed, seconds=SHORT_S)["failing"]
    assert found["replay"] == f"turboserve bench simulate --seed {failed.seed} --seconds 10 --trace"
    assert tuple(found["messages"]) == failed.messages


# Planted faults: each check can fail.

BUSY = Faults(crash={"worker": 0.05}, cut={"worker": 0.1}, freeze={"worker": 0.1}, late_request=0.1)


def _without_fence(append: Callable[..., Ack]) -> Callable[..., Ack]:
    def appended(self: Any, subject: str, body: Any, message_id: str, expect: Any) -> Ack:
        return append(self, subject, body, message_id, expect if subject.startswith("own.") else None)

    return appended


def test_a_broker_without_the_fence_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log.Stream, "append", _without_fence(log.Stream.append))
    assert "one_executor" in violations(range(40), BUSY)


def test_a_worker_that_ignores_its_lease_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lease, "renewed", lambda self, _: setattr(self, "until", math.inf))
    assert "one_executor" in violations(range(7, 40), Faults(cut={"worker": 0.1}), seconds=25.0)


def test_an_engine_that_does_not_look_at_the_clock_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that stood still goes on with its next chunk before it hears that the lease is over."""
    going = property(lambda self: self._generate_until > -math.inf)
    monkeypatch.setattr(engine.Engine, "generating", going)
    assert "one_executor" in violations(range(10), Faults(freeze={"worker": 0.1}), seconds=25.0)


def test_a_store_that_does_not_raise_the_epoch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def same(record: SessionRecord, worker: str | None) -> dict[str, Any]:
        return {"epoch": max(record.epoch, 1), "worker": worker, "own_revision": None}

    monkeypatch.setattr(sessions, "own_anew", same)
    assert "epochs_increase" in violations(range(10), BUSY)


def test_a_stale_owner_in_the_log_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's own word, late: without the fence it would make an earlier epoch the current one again."""
    append = log.Stream.append

    def appended(self: Any, subject: str, body: Any, message_id: str, expect: Any) -> Ack:
        return append(self, subject, body, message_id, None if subject.startswith("own.") else expect)

    monkeypatch.setattr(log.Stream, "append", appended)
    faults = Faults(late_request=0.3, crash={"worker": 0.1})
    assert "epochs_increase" in violations(range(60), faults, seconds=20.0)


def test_a_broker_that_does_not_know_repeated_messages_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "DUPLICATE_WINDOW_S", -1.0)
    assert "chunks_contiguous" in violations(range(20), Faults(lost_answer=0.3))


def test_a_move_of_an_older_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target gets a copy that was made before the last chunk."""
    copy = copying.Source.copy

    def older(self: copying.Source, gift: copying.Gift) -> engine.State:
        state = copy(self, gift)
        return dataclasses.replace(state, next_chunk=state.next_chunk - 1, chain=state.chain + 1)

    monkeypatch.setattr(copying.Source, "copy", older)
    assert "verified_before_flip" in violations(range(40), CALM)


def test_a_store_that_does_not_count_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.Slots, "check_room", lambda self, worker, retry_s: None)
    monkeypatch.setattr(MinMax, "assign", _all_on_the_first)
    assert "capacity" in violations(range(20), CALM)


def _all_on_the_first(self: MinMax, cluster: Cluster, demands: Sequence[Demand]) -> list[Choice]:
    names = [candidate.worker for candidate in cluster.candidates()]
    return [Choice(demand.session, names[0] if names else None, "the first") for demand in demands]


def test_a_session_that_nobody_places_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(self: MinMax, cluster: Cluster, demands: Sequence[Demand]) -> list[Choice]:
        return [Choice(demand.session, None, "not today") for demand in demands]

    monkeypatch.setattr(MinMax, "assign", nobody)
    assert "converges_after_faults" in violations([1, 2], CALM, seconds=3.0)


def test_memory_that_is_not_given_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    carry_out = engine.Engine._carry_out

    def keeps(self: engine.Engine, command: do.Command) -> None:
        if not isinstance(command, do.Evict):
            carry_out(self, command)

    monkeypatch.setattr(engine.Engine, "_carry_out", keeps)
    assert "memory_returns" in violations([1, 2, 3], CALM, seconds=5.0)


def test_a_reader_that_misses_a_lost_message_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log.Follower, "misses", lambda self, live: False)
    assert "client_sees_prefix" in violations(range(20), Faults(lost_hint=0.3))


def test_a_pool_that_ends_busy_workers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(self: lifecycle.Lifecycle, slot: Any, now: float) -> None:
        self.release(slot, "not wanted any more", now)

    monkeypatch.setattr(lifecycle.Lifecycle, "_drain", at_once)
    assert "scale_in_harmless" in violations(range(24, 60), CALM, seconds=25.0)


def test_a_controller_that_trusts_silence_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hearing, "is_stale", lambda self, now: self.heard_at is None)
    faults = Faults(cut={"scheduler": 0.2}, crash={"scheduler": 0.2})
    assert "stale_metrics_never_shrink" in violations(range(80), faults, seconds=25.0)


def test_a_controller_that_swings_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    advise = Advisor.advise

    def swings(self: Advisor, size: int, wakes: bool, now: float) -> Advice:
        least, most = self.policy.least, self.policy.most
        return dataclasses.replace(advise(self, size, wakes, now), size=least if int(now) % 2 else most)

    monkeypatch.setattr(Advisor, "advise", swings)
    seeds = range(0, 200, play.WATCH_EVERY)
    assert "bounded_scaling" in violations(seeds, CALM, seconds=3.0)


def test_two_leaders_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leadership, "leads", lambda self, now: self.term is not None)
    faults = Faults(freeze={"scheduler": 0.1}, cut={"scheduler": 0.1})
    assert "one_leader" in violations(range(40), faults)


def test_a_core_that_decides_by_more_than_it_was_told_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    met = set[str]()

    def remembers(self: MinMax, cluster: Cluster, demands: Sequence[Demand]) -> list[Choice]:
        """Whom it has met, in this run or one before, goes elsewhere."""
        free = [each.worker for each in cluster.candidates() if each.load < each.capacity]
        choices = [Choice(d.session, free[-(d.session in met)] if free else None, "met") for d in demands]
        met.update(demand.session for demand in demands)
        return choices

    monkeypatch.setattr(MinMax, "assign", remembers)
    monkeypatch.setattr(command, "TWICE_EVERY", 1)
    assert command.run(seeds=4, first=0, seconds=5.0)["violations"]["deterministic"] > 0


def test_a_core_that_raises_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(self: Table, message: Any, now: float) -> list[do.Command]:
        raise ZeroDivisionError

    monkeypatch.setattr(Table, "tell", raises)
    assert "no_core_fails" in violations([1], CALM, seconds=3.0)
