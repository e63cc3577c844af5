"""The controller where decode workers limit the workers: it adds no worker, and says what is needed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.autoscaler.test_composition_faults import MemberLoop, member
from tests.autoscaler.test_control import TABLE
from tests.autoscaler.test_control_loop import LoopHarness
from turboserve.autoscaler.control.class_demand import ClassDemand
from turboserve.autoscaler.control.controller import Controller
from turboserve.autoscaler.control.decode_workers import DecodeWorkers, decode_too, decoded
from turboserve.autoscaler.control.events import FeedbackReceived, PoolObserved, ScalingAction
from turboserve.autoscaler.control.policy import ControlPolicy
from turboserve.autoscaler.status import decode_workers_of, scaling_status
from turboserve.contracts.decoding import DecodeCapacity, DecodeNeed
from turboserve.contracts.pool import LoadFeedback, PoolMemberPhase, PoolOrders
from turboserve.contracts.workers import LoadReport

K, CARRIED, OWN = 8, 12, 2
"""Sessions that a worker denoises, that a decode worker carries, and that a worker decodes itself."""


class Run:
    """A pool whose workers are ready at once, and that has some decode workers."""

    def __init__(self, decoders: int, workers: int = 1, most: int = 20, **policy: float) -> None:
        values = {"least": 1, "most": most, "capacity": K, "quality_debt_limit": 0.0, **policy}
        self.controller = Controller(ControlPolicy(**values), TABLE, workers)  # type: ignore[arg-type]
        self.decoders, self.now = decoders, 0.0

    def feedback(self, required: int, **more: float) -> LoadFeedback:
        workers, carried = self.controller.target, CARRIED * self.decoders
        each = min(K, max(OWN, carried // workers))
        placed = min(required, each * workers)
        return LoadFeedback(
            model="m",
            rho_max=math.ceil(placed / workers) / each,
            required=required,
            waiting=required - placed,
            capacity=each * workers,
            workers=workers,
            decoding=DecodeCapacity(workers=self.decoders, sessions=carried, denoised=K * workers),
            at=self.now,
            **more,  # type: ignore[arg-type]
        )

    def advance(self, seconds: int, required: int, **more: float) -> int:
        for _ in range(seconds):
            self.now += 1.0
            self.controller.handle(PoolObserved(ready=self.controller.target), self.now)
            self.controller.handle(FeedbackReceived(self.feedback(required, **more)), self.now)
        return self.controller.target

    @property
    def need(self) -> DecodeNeed | None:
        return scaling_status(self.controller, self.now, 1e9).decoding


def test_no_worker_is_added_where_only_decode_workers_help() -> None:
    run = Run(decoders=1)
    # One decode worker's sessions need two workers. 100 would need 17, and each of them would only take a
    # part of what the others have.
    assert run.advance(300, 100) <= math.ceil(CARRIED / (K * 0.5))
    rho = run.controller.advisor.row.target_utilization
    assert run.need == DecodeNeed(
        workers=1, sessions=CARRIED, needed=math.ceil(100 / (CARRIED * rho)), limits=True
    )
    last = run.controller.decisions[-1]
    assert last.action is ScalingAction.HOLD
    assert last.reason.startswith("decode workers are the limit: 100 sessions need")
    assert last.reason.endswith("of them, and 1 is there; no worker is added")
    assert last.numbers["decode_sessions"] == CARRIED
    # The pool grows with its decode workers, and then the limit is gone.
    grown = run.controller.target
    run.decoders = math.ceil(100 / (CARRIED * rho))
    assert run.advance(300, 100) > grown
    assert run.need is not None
    assert run.need.needed == run.need.workers
    assert run.feedback(100).waiting == 0


def test_quality_and_lateness_add_no_worker_either() -> None:
    limited, free = (Run(decoders, 2, quality_debt_limit=0.1) for decoders in (1, 9))
    for run in (limited, free):
        run.advance(300, 14, deficit=9.0, quality_debt=1.0)
    assert limited.controller.target <= 4
    assert free.controller.target > limited.controller.target


def test_workers_beyond_what_decode_workers_carry_are_released() -> None:
    # Six workers with two sessions each. Two have six each, of the same decode worker.
    run = Run(decoders=1, workers=6)
    assert run.feedback(5).capacity == 12
    assert run.advance(3_000, 5) <= 2
    # But not those that decode for sessions that decode workers do not carry.
    alone = Run(decoders=1, workers=8)
    assert alone.feedback(15).capacity == 16
    assert alone.advance(3_000, 15) == 8


def test_without_a_known_decode_worker_the_need_is_unknown() -> None:
    run = Run(decoders=0, workers=2)
    run.advance(100, 9)
    assert run.controller.target == 2
    assert run.need == DecodeNeed(workers=0, sessions=0, needed=None, limits=True)
    run.decoders = 1
    run.advance(1, 9)
    run.decoders = 0
    run.advance(100, 9)
    # All are lost. What one of them carried is still known.
    assert run.need is not None
    assert run.need.needed == math.ceil(9 / (CARRIED * run.controller.advisor.row.target_utilization))
    assert run.controller.target == 2
    run.advance(1, 0)
    assert run.need == DecodeNeed(workers=0, sessions=0, needed=0, limits=True)


def test_what_starts_decode_workers_sees_no_number_of_the_past() -> None:
    run = Run(decoders=0)
    load = run.feedback(9)
    # None has ever said what it carries: without a first one, the need would never be known.
    run.advance(1, 9)
    assert decode_workers_of(run.need, load) == (0, 1)
    run.advance(1, 0)
    assert decode_workers_of(run.need, load) == (0, 0)
    # The pool has no workers, or only ones that decode.
    gone = load.model_copy(update={"decoding": None, "workers": 0, "capacity": 0, "required": 0})
    for now in (gone, load.model_copy(update={"decoding": None})):
        assert decode_workers_of(None, now) == (0, 0)
    # All workers of waiting sessions have died.
    assert decode_workers_of(None, gone.model_copy(update={"required": 9})) is None


@pytest.mark.parametrize("field", ["workers", "sessions", "denoised"])
def test_implausible_numbers_of_decode_workers_are_refused(field: str) -> None:
    run = Run(decoders=1)
    wrong = run.feedback(3)
    assert wrong.decoding is not None
    decoding = wrong.decoding.model_copy(update={field: 10**10})
    assert not run.controller.advisor.update(wrong.model_copy(update={"decoding": decoding}), 1.0)
    assert run.controller.advisor.feedback_monitor.refused["too_large"] == 1


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), max_size=12))
def test_decode_workers_that_carry_enough_change_no_decision(history: list[tuple[int, int]]) -> None:
    known, unknown = Run(decoders=100), Run(decoders=100)
    for required, seconds in history:
        for _ in range(seconds):
            known.advance(1, required)
            unknown.now += 1.0
            feedback = unknown.feedback(required).model_copy(update={"decoding": None})
            unknown.controller.handle(PoolObserved(ready=unknown.controller.target), unknown.now)
            unknown.controller.handle(FeedbackReceived(feedback), unknown.now)
        assert known.controller.target == unknown.controller.target
    ours = [(each.at, each.action, each.target, each.reason) for each in known.controller.decisions]
    assert ours == [(each.at, each.action, each.target, each.reason) for each in unknown.controller.decisions]


def mixed(required: int, at: float) -> LoadFeedback:
    """A home, which has half a decode worker's sessions, beside a worker with both roles."""
    known = DecodeCapacity(workers=1, sessions=OWN, denoised=2 * K, own=K)
    there = OWN + K
    return LoadFeedback(
        model="toy",
        rho_max=1.0,
        required=required,
        waiting=max(required - there, 0),
        capacity=there,
        workers=2,
        decoding=known,
        at=at,
    )


def test_workers_that_decode_are_counted_beside_decode_workers() -> None:
    """Incident: with one home, all workers of the model counted as homes."""
    workers = DecodeWorkers()
    workers.update(mixed(16, 0.0))
    need = workers.need(mixed(16, 0.0), 0.5)
    assert need is not None
    assert need.needed == (16 - K * 0.5) / (OWN * 0.5)
    assert "⌈(16 − 8 × 0.5) / (2 × 0.5)⌉ = 12 of them" in workers.shortage(mixed(16, 0.0), 0.5)
    without = mixed(16, 0.0).model_copy(update={"capacity": 1})
    assert decoded(16, without) == OWN + K
    assert not decode_too(mixed(OWN + K, 0.0))
    assert decode_too(mixed(OWN + K + 1, 0.0))


@pytest.mark.parametrize("role", ["both roles", "homes", "one each"])
def test_a_pool_grows_if_all_its_workers_decode(role: str) -> None:
    """Incident: a pool with both roles did not grow because another pool of its model had decode workers."""
    harness = LoopHarness(most=9)
    loop = harness.loop
    loop.ordered(PoolOrders(pool="p"), 0.0)
    members = [member(f"w-{index}", PoolMemberPhase.READY) for index in range(2)]
    known = DecodeCapacity(workers=1, sessions=OWN, denoised=K)
    for index, one in enumerate(members):
        decodes = role == "both roles" or (role == "one each" and index == 0)
        report = LoadReport(worker="w", model="toy", capacity=K, decoding=None if decodes else known)
        one.heard(report, 0.0)
    for second in range(1, 30):
        loop.tick(members, float(second))
        loop.on_feedback(mixed(40, float(second)), float(second))
    grows = role == "both roles"
    assert (harness.sizes[-1] == 9) == grows
    each = loop.controller.advisor.capacity
    carried = OWN + K + (7 * each if grows else 0)
    assert loop.decode_sessions == carried
    # All workers are lost at once, as with their machine: the pool is still one of that role.
    loop.tick([], 30.0)
    carried = OWN + K + (9 * each if grows else 0)
    assert loop.decode_sessions == carried
    # Feedback that is refused counts for admission neither: here one that is older.
    loop.on_feedback(mixed(40, 1.0).model_copy(update={"decoding": None}), 30.0)
    assert loop.decode_sessions == carried


def test_a_pool_of_several_offers_adds_no_worker_that_only_divides_allotments() -> None:
    """Otherwise each further worker makes K of all smaller, until the pool is at its maximum."""
    home = member("wide-0", PoolMemberPhase.READY, capacity=OWN, ready_at=0.0)
    pool = MemberLoop({"wide": 1}, home)

    def heard(sessions: int) -> None:
        known = DecodeCapacity(workers=1, sessions=sessions, denoised=4)
        home.heard(LoadReport(worker="w", model="large", capacity=OWN, decoding=known), pool.now)

    heard(OWN)
    pool.run(15, large=4, light=0)
    assert pool.sizes["wide"] == 1
    # Without decode workers, each worker decodes for two sessions.
    heard(0)
    pool.run(15, large=4, light=0)
    assert pool.sizes["wide"] == 2


@pytest.mark.parametrize("both", [False, True])
def test_decode_workers_of_one_model_are_not_asked_for_sessions_of_another(both: bool) -> None:
    policy = ControlPolicy(least=1, most=20, capacity=K)
    demand, run = ClassDemand(("m", "n"), policy), Run(decoders=1)
    own = run.feedback(6)
    other = own.model_copy(update={"model": "n"} if both else {"model": "n", "decoding": None})
    for load in (own, other):
        assert demand.update(load, 0.0) is None
    for last in (own, other):
        total = demand.total(last, 0.0)
        assert total.required == 12
        known = DecodeCapacity(workers=2, sessions=2 * CARRIED, denoised=2 * K)
        assert total.decoding == (known if both else None)
