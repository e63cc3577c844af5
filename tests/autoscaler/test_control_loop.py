"""Inputs of the controller's loop, and the times at which the pool is informed."""

from __future__ import annotations

from typing import cast

import pytest

from tests.helpers.virtual_clock import VirtualClock
from turboserve.autoscaler.control.controller import Controller
from turboserve.autoscaler.control.policy import ControlPolicy, default_table
from turboserve.autoscaler.control_loop import ControlLoop
from turboserve.autoscaler.core import Pool
from turboserve.autoscaler.pool_members import PoolMember
from turboserve.autoscaler.store_link import StoreLink, WorkerUsage
from turboserve.bus import Bus
from turboserve.contracts.autoscale import LevelParameters, ProfileTable, Provenance
from turboserve.contracts.events import SessionCreated
from turboserve.contracts.pool import LoadFeedback, PoolMemberPhase, PoolOrders, PoolReport
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.contracts.versions import SCHEMA_VERSION

ORDERS = PoolOrders(pool="p")


class LoopHarness:
    """A loop for one to four workers, with the sizes that it sent to the pool."""

    def __init__(self, override: int | None = None, others: tuple[str, ...] = (), **policy: object) -> None:
        self.sizes: list[int] = []
        values = {"least": 1, "most": 4, "in_window_s": 5.0, "in_cooldown_s": 5.0, **policy}
        controller = Controller(ControlPolicy(**values), default_table(), 1)  # type: ignore[arg-type]
        self.loop = ControlLoop(
            controller, "toy", default_table(), override, lambda size, _: self.sizes.append(size), others
        )


def load(required: int, workers: int, at: float, model: str = "toy") -> LoadFeedback:
    rho = min(required / (2 * workers), 1.0) if workers else 0.0
    waiting = max(required - 2 * workers, 0)
    return LoadFeedback(
        model=model,
        rho_max=rho,
        required=required,
        waiting=waiting,
        capacity=2 * workers,
        workers=workers,
        at=at,
    )


def test_nothing_is_decided_before_the_orders_are_known() -> None:
    harness = LoopHarness()
    harness.loop.on_feedback(load(6, 1, 1.0), 10.0)
    harness.loop.tick([], 11.0)
    assert harness.sizes == []
    harness.loop.ordered(ORDERS, 12.0)
    harness.loop.on_feedback(load(6, 1, 13.0), 13.0)
    assert harness.sizes == [4]


def test_another_models_load_is_none_of_this_pools_business() -> None:
    harness = LoopHarness()
    harness.loop.ordered(ORDERS, 0.0)
    harness.loop.on_feedback(load(6, 1, 1.0, model="other"), 10.0)
    harness.loop.tick([], 20.0)
    assert harness.sizes == []


@pytest.mark.parametrize("bad", ["NaN", "-1", "Infinity", '"much"'])
def test_a_load_that_is_not_a_number_is_counted_and_the_pool_stays_and_says_why(bad: str) -> None:
    """The report is published raw: the contract itself refuses some of these values."""
    harness = LoopHarness()
    harness.loop.ordered(ORDERS, 0.0)
    for second in range(10):
        harness.loop.on_orders(load(6, 3, float(second)).to_bytes(), float(second))
    assert harness.sizes == [4]
    for second in range(10, 40):
        idle = load(0, 3, float(second)).to_bytes()
        harness.loop.on_orders(idle.replace(b'"rho_max":0.0', f'"rho_max":{bad}'.encode()), float(second))
        harness.loop.tick([], float(second))
    assert harness.sizes == [4]
    hearing, decision = (
        harness.loop.controller.advisor.feedback_monitor,
        harness.loop.controller.decisions[-1],
    )
    assert sum(hearing.refused.values()) == 30
    assert "implausible" in decision.reason
    assert "not scaling in" in decision.reason


async def test_orders_that_cannot_be_read_are_no_orders() -> None:
    """Another version of the state store may hold a table that this version would refuse."""

    class _Bus:
        async def call(self, *_: object) -> PoolOrders:
            bad = {"pool": "p", "version": "x", "table": {"levels": [], "provenance": {"source": "x"}}}
            return PoolOrders.model_validate(bad)

    harness = LoopHarness()
    harness.loop.ordered(ORDERS, 0.0)
    pool, usage = Pool("p", lambda: "w"), WorkerUsage(None, 1.0)
    link = StoreLink(cast(Bus, _Bus()), VirtualClock(), pool, usage, harness.loop)
    await link.report()
    assert link.problem is not None
    assert "stored pool orders" in link.problem
    assert harness.loop.orders == ORDERS


@pytest.mark.parametrize(("decoding", "told"), [(None, None), ((1, 6), 6), ((0, 0), 0)])
async def test_the_store_is_told_how_many_sessions_decode_workers_carry(
    decoding: tuple[int, int] | None, told: int | None
) -> None:
    harness, store = LoopHarness(), _Store()
    usage = WorkerUsage(None, 1.0)
    link = StoreLink(cast(Bus, store), VirtualClock(), Pool("p", lambda: "w"), usage, harness.loop)
    await link.report()
    known = None if decoding is None else dict(zip(("workers", "sessions"), decoding, strict=True))
    load = {"model": harness.loop.model, "rho_max": 0.5, "required": 1, "waiting": 0, "capacity": 2}
    feedback = LoadFeedback.model_validate(
        {**load, "workers": 1, "decoding": known and {**known, "denoised": 4}}
    )
    harness.loop.on_feedback(feedback, 1.0)
    await link.report()
    assert [report.decode_sessions for report in store.reports] == [None, told]


class _Store:
    """Keeps what was learned, as the state store does."""

    def __init__(self) -> None:
        self.learned: str | None = None
        self.reports: list[PoolReport] = []

    async def call(self, _endpoint: object, report: PoolReport) -> PoolOrders:
        self.reports.append(report)
        self.learned = self.learned if report.learned is None else report.learned
        return ORDERS.model_copy(update={"learned": self.learned}) if report.recalls else ORDERS


def _learning(store: _Store, clock: VirtualClock) -> tuple[LoopHarness, StoreLink]:
    harness = LoopHarness(learns=True)
    usage = WorkerUsage(None, 1.0)
    link = StoreLink(cast(Bus, store), clock, Pool("p", lambda: "w"), usage, harness.loop)
    return harness, link


async def _play(harness: LoopHarness, link: StoreLink, clock: VirtualClock, seconds: int) -> None:
    for _ in range(seconds):
        harness.loop.on_feedback(load(2, 1, clock.wall()), clock.monotonic())
        await link.report()
        clock.advance(1.0)


async def test_the_next_process_continues_from_what_was_learned() -> None:
    store, clock = _Store(), VirtualClock()
    first, link = _learning(store, clock)
    await _play(first, link, clock, 300)
    assert first.loop.controller.learner is not None
    seen_s = first.loop.controller.learner.seen_s
    written = [report for report in store.reports if report.learned is not None]
    assert 25 <= len(written) <= 31, "about every ten seconds"

    second, link = _learning(store, VirtualClock())
    await link.report()
    assert second.loop.controller.learner is not None
    assert second.loop.controller.learner.seen_s == pytest.approx(seen_s, abs=11.0)
    assert [report.recalls for report in store.reports[-2:]] == [False, True]
    assert store.reports[-1].learned is None, "nothing is overwritten before it is known"


@pytest.mark.parametrize("stored", ["", "{", '{"version": 0}', '{"version": 1}'])
async def test_a_stored_state_that_cannot_be_read_is_ignored_with_a_warning(
    stored: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store, clock = _Store(), VirtualClock()
    store.learned = stored
    harness, link = _learning(store, clock)
    await _play(harness, link, clock, 30)
    assert link.problem is None
    assert harness.loop.controller.learner is not None
    assert harness.loop.controller.learner.seen_s == pytest.approx(28.0, abs=1.5)
    assert "learning anew" in capsys.readouterr().out
    assert store.learned != stored, "the next process has something to continue from"


def test_an_order_comes_before_the_settings_and_both_before_the_controller() -> None:
    harness = LoopHarness(override=2)
    harness.loop.ordered(ORDERS, 0.0)
    assert harness.sizes == [2]
    assert harness.loop.maximum == 2
    harness.loop.ordered(ORDERS.model_copy(update={"version": 1, "override": 3}), 1.0)
    assert harness.sizes == [2, 3]
    harness.loop.on_feedback(load(8, 3, 2.0), 10.0)
    harness.loop.ordered(ORDERS.model_copy(update={"version": 2}), 11.0)
    assert harness.sizes == [2, 3, 2]
    free = LoopHarness()
    free.loop.ordered(ORDERS.model_copy(update={"version": 1, "override": 3}), 1.0)
    free.loop.ordered(ORDERS.model_copy(update={"version": 2}), 2.0)
    free.loop.on_feedback(load(8, 3, 3.0), 10.0)
    assert free.sizes == [3, 4]
    assert free.loop.maximum == 4


def test_sessions_may_wait_for_the_first_workers_of_a_pool_of_fixed_size() -> None:
    assert LoopHarness(least=2, most=2).loop.maximum == 2


@pytest.mark.parametrize(("ordered", "kept"), [(9, 4), (0, 1)])
def test_an_order_beyond_the_limits_stops_at_them(ordered: int, kept: int) -> None:
    """The order was given under other limits, before a restart."""
    harness = LoopHarness()
    harness.loop.ordered(ORDERS.model_copy(update={"version": 1, "override": ordered}), 0.0)
    assert harness.loop.controller.target == kept


def test_a_dry_run_says_and_does_not_do() -> None:
    harness = LoopHarness()
    harness.loop.ordered(ORDERS.model_copy(update={"version": 1, "dry_run": True}), 0.0)
    harness.loop.on_feedback(load(8, 1, 1.0), 10.0)
    assert harness.sizes == []
    assert harness.loop.controller.advice == 4
    assert harness.loop.maximum == harness.loop.controller.target == 1
    harness.loop.ordered(ORDERS.model_copy(update={"version": 2, "dry_run": None}), 11.0)
    harness.loop.tick([], 12.0)
    assert harness.sizes == [4]


def test_a_table_is_replaced_while_it_runs_and_measured_as_it_was_made() -> None:
    table = ProfileTable(
        levels=(LevelParameters(level=1, volatility_from=0, latency_weight=0.2, target_utilization=0.25),),
        provenance=Provenance(source="a test", epoch_s=2.0, window=10),
    )
    harness = LoopHarness()
    harness.loop.ordered(ORDERS, 0.0)
    harness.loop.ordered(ORDERS.model_copy(update={"version": 1, "table": table}), 1.0)
    control = harness.loop.controller
    assert control.table == table
    assert (control.detector.epoch_s, control.detector.window) == (2.0, 10)
    harness.loop.on_feedback(load(1, 1, 2.0), 10.0)
    assert control.advisor.row.target_utilization == 0.25
    assert harness.sizes == [2]
    harness.loop.ordered(ORDERS.model_copy(update={"version": 2}), 20.0)
    assert control.table == default_table()


def event(model: str = "toy") -> bytes:
    record = SessionRecord(
        id="s",
        tenant="t",
        model=model,
        prompt="x",
        seed=1,
        phase=Phase.REQUESTED,
        version=1,
        epoch=0,
        created_at=0,
        updated_at=0,
    )
    return SessionCreated(id="e", at=1.0, record=record).to_bytes()


def test_the_first_session_wakes_a_pool_at_zero() -> None:
    harness = LoopHarness(least=0, scale_to_zero=True)
    harness.loop.ordered(ORDERS.model_copy(update={"version": 1, "override": 0}), 0.0)
    harness.loop.ordered(ORDERS.model_copy(update={"version": 2}), 1.0)
    assert harness.sizes == [0]
    harness.loop.on_event(event("other"), 2.0)
    harness.loop.on_event(b"{", 2.0)
    assert harness.sizes == [0]
    assert harness.loop.controller.advisor.feedback_monitor.refused["unreadable_event"] == 1
    newer = event().replace(f'"{SCHEMA_VERSION}"'.encode(), f'"{SCHEMA_VERSION.major + 1}.0"'.encode())
    harness.loop.on_event(newer, 2.0)
    assert harness.sizes == [0]
    assert harness.loop.controller.advisor.feedback_monitor.refused["unreadable_event"] == 2
    harness.loop.on_event(event(), 3.0)
    assert harness.sizes == [0, 1]


@pytest.mark.parametrize("reported", ["event", "feedback"])
def test_a_session_of_any_of_its_models_wakes_a_pool_at_zero(reported: str) -> None:
    harness = LoopHarness(others=("small",), least=0, scale_to_zero=True)
    harness.loop.ordered(ORDERS.model_copy(update={"version": 1, "override": 0}), 0.0)
    harness.loop.ordered(ORDERS.model_copy(update={"version": 2}), 1.0)
    assert harness.sizes == [0]
    for model in ("other", "small"):
        assert harness.sizes == [0]
        if reported == "event":
            harness.loop.on_event(event(model), 2.0)
        else:
            harness.loop.on_feedback(load(3, 0, 2.0, model), 2.0)
            harness.loop.tick([], 2.5)
    assert harness.sizes == [0, 1]


def test_the_load_of_another_model_of_a_pool_with_workers_is_not_counted_twice() -> None:
    harness = LoopHarness(others=("small",))
    harness.loop.ordered(ORDERS, 0.0)
    harness.loop.on_feedback(load(6, 1, 1.0, model="small"), 10.0)
    harness.loop.tick([], 20.0)
    assert harness.sizes == []


@pytest.mark.parametrize("order", [("toy", "small"), ("small", "toy")])
def test_one_waiting_session_of_another_model_hides_no_load_of_the_first(order: tuple[str, str]) -> None:
    harness = LoopHarness(others=("small",), least=0, scale_to_zero=True)
    harness.loop.ordered(ORDERS.model_copy(update={"version": 1, "override": 0}), 0.0)
    harness.loop.ordered(ORDERS.model_copy(update={"version": 2}), 1.0)
    for model in order:
        harness.loop.on_feedback(load(6 if model == "toy" else 1, 0, 2.0, model), 2.0)
    known = harness.loop.controller.advisor.feedback_monitor.feedback
    assert known is not None
    assert (known.required, known.waiting) == (6, 6)


@pytest.mark.parametrize("order", [("toy", "small"), ("small", "toy")])
def test_feedback_of_the_first_model_hides_no_waiting_session_of_another(order: tuple[str, str]) -> None:
    harness = LoopHarness(others=("small",))
    harness.loop.ordered(ORDERS, 0.0)
    monitor = harness.loop.controller.advisor.feedback_monitor

    def required() -> int | None:
        return None if monitor.feedback is None else monitor.feedback.required

    for at in (1.0, 2.0):
        for model in order:
            harness.loop.on_feedback(load(0 if model == "toy" else 3, 0, at, model), at)
        assert required() == 1
    # The others' sessions have ended, or a worker serves them.
    harness.loop.on_feedback(load(0, 0, 3.0, "small"), 3.0)
    harness.loop.on_feedback(load(0, 0, 3.0), 3.0)
    assert required() == 0
    # The last word of a model that is no longer reported is forgotten.
    harness.loop.on_feedback(load(3, 0, 4.0, "small"), 4.0)
    assert required() == 1
    late = 5.0 + harness.loop.controller.policy.stale_s
    harness.loop.on_feedback(load(0, 0, late), late)
    assert required() == 0


def test_a_pool_at_zero_does_not_go_while_state_sleeps_in_it() -> None:
    harness = LoopHarness(least=0, scale_to_zero=True, zero_after_s=1.0)
    harness.loop.ordered(ORDERS, 0.0)
    sleeping = PoolMember("p-0", 0, phase=PoolMemberPhase.READY, worker="w", suspended=1)
    for second in range(30):
        harness.loop.on_feedback(load(0, 1, float(second)), float(second))
        harness.loop.tick([sleeping], float(second))
    assert harness.sizes == []
    sleeping.suspended = 0
    for second in range(30, 40):
        harness.loop.on_feedback(load(0, 1, float(second)), float(second))
        harness.loop.tick([sleeping], float(second))
    assert harness.sizes == [0]
