"""A worker of two classes: one thread, an engine for each, and slots that both share."""

from __future__ import annotations

import math
import queue
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tests.worker.table_bench import LEASE_S, ME, OTHER, Bench, row
from turboserve.allocation.slots import slots_used
from turboserve.clock import SystemClock
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.contracts.workers import Incoming
from turboserve.worker.engine.budget import plan
from turboserve.worker.engine.engine import Engine
from turboserve.worker.service import commands, events
from turboserve.worker.service.class_slots import ClassSlots
from turboserve.worker.service.engine_commands import AdmitRequest
from turboserve.worker.service.host_platform import EngineThread
from turboserve.worker.service.models import load_models, make_engine, memory_parts
from turboserve.worker.service.packager import FromEngine, GeneratedChunk
from turboserve.worker.service.table import Table
from turboserve.worker.settings import Settings

WAIT_S = 120.0
BOTH = "toyworld,toyworld-small"
CHUNKS = 3


def settings(model: str) -> Settings:
    # As several classes do, and a worker of one class does not: no chunk is lowered.
    return Settings(
        model=model,
        worker_max_sessions=2,
        host_memory_bytes=0,
        overlap="off",
        device="cpu",
        fidelity="best",
    )


def engines(model: str) -> dict[str, Engine]:
    each = settings(model).by_class()
    models = [load_models(one) for one in each]
    parts = memory_parts(models, each[0])
    return {
        one.model: make_engine(own, one, part) for one, own, part in zip(each, models, parts, strict=True)
    }


class Running:
    """A thread with these engines, and its chunks."""

    def __init__(self, by_class: dict[str, Engine]) -> None:
        self.delivered: queue.SimpleQueue[FromEngine] = queue.SimpleQueue()
        first = next(iter(by_class.values()))
        classes = by_class if len(by_class) > 1 else {}
        self.thread = EngineThread(first, self.delivered.put, SystemClock(), classes=classes)
        self.forwards: list[tuple[str, ...]] = []
        for engine in by_class.values():
            self._watch(engine)
        self.thread.start()
        self.thread.submit(commands.GenerateUntil(math.inf))

    def _watch(self, engine: Engine) -> None:
        compute = engine.forward.compute

        def watched(batch: Any) -> Any:
            self.forwards.append(tuple(session.name for session in batch))
            return compute(batch)

        engine.forward.compute = watched  # type: ignore[method-assign]

    def admit(self, session: str, model: str) -> None:
        admit = commands.Admit(session, 1, 0, "a red circle moving left", 7, 0, 10.0, model=model)
        self.thread.submit(AdmitRequest(admit))

    def chunks(self, wanted: dict[str, int]) -> dict[str, list[GeneratedChunk]]:
        """Return so many first chunks of each session."""
        made: dict[str, list[GeneratedChunk]] = {name: [] for name in wanted}
        while any(len(made[name]) < count for name, count in wanted.items()):
            item = self.delivered.get(timeout=WAIT_S)
            if isinstance(item, GeneratedChunk) and item.ready.session in made:
                made[item.ready.session].append(item)
        return made


@pytest.fixture
def both() -> Iterator[Running]:
    running = Running(engines(BOTH))
    yield running
    running.thread.stop(10.0)
    assert running.thread.failure is None


def test_each_class_computes_its_own_sessions_as_a_worker_of_that_class_does(both: Running) -> None:
    names = {"large-0": "toyworld", "large-1": "toyworld", "small-0": "toyworld-small"}
    for name, model in names.items():
        both.admit(name, model)
    made = both.chunks(dict.fromkeys(names, CHUNKS))
    sizes = {model: engine.config.frame_size for model, engine in engines(BOTH).items()}
    assert sizes["toyworld"] != sizes["toyworld-small"]
    for name, model in names.items():
        assert {one.model for one in made[name]} == {model}
        width, height = sizes[model]
        assert {tuple(one.ready.frames.shape[1:3]) for one in made[name]} == {(height, width)}
        assert [one.ready.index for one in made[name][:CHUNKS]] == list(range(CHUNKS))
    # No forward has rows of two models.
    assert all(len({names[name] for name in batch}) == 1 for batch in both.forwards)
    alone = Running(engines("toyworld-small"))
    try:
        alone.admit("small-0", "toyworld-small")
        reference = alone.chunks({"small-0": CHUNKS})["small-0"]
    finally:
        alone.thread.stop(10.0)
    for here, there in zip(made["small-0"], reference, strict=False):
        assert torch.equal(here.ready.frames, there.ready.frames)


def test_neither_class_waits_for_the_end_of_the_other(both: Running) -> None:
    both.admit("large", "toyworld")
    both.admit("small", "toyworld-small")
    both.chunks({"large": CHUNKS, "small": CHUNKS})
    order = [name for batch in both.forwards for name in batch]
    first = {name: order.index(name) for name in ("large", "small")}
    last = {name: len(order) - order[::-1].index(name) for name in ("large", "small")}
    assert max(first.values()) < min(last.values())


def test_chunks_beside_another_class_do_not_count_as_the_class_alone(both: Running) -> None:
    both.admit("large", "toyworld")
    assert both.chunks({"large": 1})["large"][0].sample is not None
    both.admit("small", "toyworld-small")
    both.admit("large-2", "toyworld")
    made = both.chunks({"small": CHUNKS, "large-2": CHUNKS})
    assert any(one.sample is None for one in [*made["small"], *made["large-2"]])


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"model": "toyworld,"}, "is not the name of a model"),
        ({"model": "toyworld,toyworld"}, "appears twice"),
        ({"model": "toyworld,unheard-of"}, "unheard-of"),
        ({"model": BOTH, "fidelity": "in-time"}, "fidelity: the setting is for a worker of one model"),
        ({"model": BOTH, "model_weights": "x"}, "model_weights: the setting is for a worker of one model"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(given: dict[str, str], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        Settings(**given)  # type: ignore[arg-type]


def test_the_memory_is_divided_among_the_classes() -> None:
    each = Settings(model=BOTH, memory_bytes=2 << 30, host_memory_bytes=3 << 30).by_class()
    assert [one.model for one in each] == ["toyworld", "toyworld-small"]
    assert [one.host_memory_bytes for one in each] == [3 << 29] * 2


def test_several_classes_lower_no_quality() -> None:
    assert {one.fidelity for one in Settings(model=BOTH).by_class()} == {"best"}
    [alone] = Settings(model="toyworld").by_class()
    assert alone.fidelity == "in-time"
    assert not alone.sets_fidelity


def test_memory_is_divided_after_the_weights_of_all() -> None:
    """A large model has more weights than half of the memory, and its sessions all the same."""
    both = settings(BOTH)
    models = [load_models(one) for one in both.by_class()]
    weights = [one.weight_bytes for one in models]
    assert weights[0] > weights[1]
    room = [plan(one, 0).expected_bytes(1) - size for one, size in zip(models, weights, strict=True)]
    # No half of it holds the large model with a session.
    total = sum(weights) + 2 * max(room)
    assert weights[0] + room[0] > total // 2
    short = both.model_copy(update={"memory_bytes": total})
    parts = memory_parts(models, short)
    assert [one.device_bytes for one in parts] == [max(room)] * 2
    made = [make_engine(*each) for each in zip(models, short.by_class(), parts, strict=True)]
    assert [one.slabs for one in made] == [1, 2]


def test_free_memory_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([1000 << 20, 10 << 20])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 0))
    on_gpu: Any = SimpleNamespace(
        weight_bytes=7 << 20,
        transformer=SimpleNamespace(
            patch_embedding=SimpleNamespace(weight=SimpleNamespace(device=torch.device("cuda")))
        ),
    )
    parts = memory_parts([on_gpu, on_gpu], Settings(model=BOTH))
    assert [one.device_bytes for one in parts] == [450 << 20] * 2


def test_a_table_of_two_classes_takes_sessions_up_to_the_polytope() -> None:
    bench = Bench()
    bench.table = Table(ME, "toyworld", 2, LEASE_S, classes=ClassSlots({"toyworld": 2, "toyworld-small": 6}))
    bench.renew()
    rows = [row("l1"), *(row(f"s{n}", model="toyworld-small") for n in range(4)), row("l2")]
    admitted = []
    for record in rows:
        bench.handle(events.Assigned(record))
        bench.handle(events.LogEndRead(record.id, bench.last(commands.ReadLogEnd).query, 0, False))
        admitted += [one.session for one in bench.said if isinstance(one, commands.Admit)]
    # 1/2 + 3/6 of the worker.
    assert admitted == ["l1", "s0", "s1", "s2"]
    assert {one.session for one in bench.table.refusals()} == {"s3", "l2"}


def admitted(bench: Bench, record: SessionRecord) -> None:
    """Assign a session, and answer that its log is empty."""
    bench.handle(events.Assigned(record))
    bench.handle(events.LogEndRead(record.id, bench.last(commands.ReadLogEnd).query, 0, False))


def suspended(bench: Bench, session: str, model: str, version: int = 3) -> commands.Suspend:
    """Let the row of a session that runs say that it is suspended."""
    bench.handle(events.Assigned(row(session, model=model, phase=Phase.SUSPENDED, version=version)))
    return bench.last(commands.Suspend)


def test_a_full_host_pool_of_one_class_costs_no_state_of_another() -> None:
    bench = classes_bench({"toyworld": 2, "toyworld-small": 6})
    for session, model in (("l1", "toyworld"), ("s1", "toyworld-small"), ("s2", "toyworld-small")):
        admitted(bench, row(session, model=model))
    for session, model in (("l1", "toyworld"), ("s1", "toyworld-small")):
        leaves = suspended(bench, session, model)
        bench.handle(events.MovedToHost(session, leaves.run, 0))
    leaves = suspended(bench, "s2", "toyworld-small")
    bench.handle(events.SuspendFailed("s2", leaves.run, "host memory is full"))
    # The state of l1 has been there longest, in another pool.
    assert bench.last(commands.Evict).session == "s1"
    again = bench.last(commands.Suspend)
    bench.handle(events.SuspendFailed("s2", again.run, "host memory is full"))
    bench.none(commands.Evict)
    assert bench.last(commands.PauseGeneration).session == "s2"


def classes_bench(served: dict[str, int]) -> Bench:
    bench = Bench()
    first = next(iter(served))
    bench.table = Table(ME, first, served[first], LEASE_S, classes=ClassSlots(served))
    bench.renew()
    return bench


def test_sessions_that_are_paused_in_their_slabs_count_as_the_other_services_count_them() -> None:
    """They count no suspended session, and have n_j without it."""
    slots = ClassSlots({"toyworld": 2, "toyworld-small": 6})
    bench = Bench()
    bench.table = Table(ME, "toyworld", 2, LEASE_S, classes=slots)
    bench.renew()
    small = [f"s{n}" for n in range(3)]
    for session, model in {"l1": "toyworld", **dict.fromkeys(small, "toyworld-small")}.items():
        admitted(bench, row(session, model=model))
    assert (slots.free("toyworld"), slots.free("toyworld-small")) == (0, 0)
    for paused, session in enumerate(small, 1):
        leaves = suspended(bench, session, "toyworld-small")
        bench.handle(events.SuspendFailed(session, leaves.run, "host memory is full"))
        offered, held = slots.offered(), {"toyworld": 1, "toyworld-small": 3 - paused}
        assert offered == {"toyworld": 2, "toyworld-small": 6 - paused}
        for model, most in offered.items():
            assert slots.free(model) == most - slots_used(offered, model, held)
    # The metric is that of the first class.
    assert bench.table.capacity == 2
    # The state store sees that the small model needs no time, and so does the worker.
    admitted(bench, row("l2"))
    assert bench.table.entries["l2"].takes_slot
    # A paused session continues in its slab, where the state store finds that it fits.
    bench.handle(events.Assigned(row("s0", model="toyworld-small", version=4)))
    assert bench.last(commands.ResumeGeneration).session == "s0"


def test_a_refusal_names_all_classes_and_the_slots_of_the_session_s_own() -> None:
    bench = classes_bench({"toyworld": 1, "toyworld-small": 3})
    admitted(bench, row("l1"))
    admitted(bench, row("s1", model="toyworld-small"))
    admitted(bench, row("x1", model="unheard-of"))
    reasons = {one.session: one.reason for one in bench.table.refusals()}
    assert reasons["s1"].endswith("serves 3 of toyworld-small alone")
    assert reasons["x1"] == "model: this worker serves toyworld, toyworld-small, not unheard-of"
    arrives = row("x2", model="unheard-of", worker=OTHER, target=ME, migration=1)
    bench.handle(events.Assigned(arrives, Incoming(record=arrives)))
    [report] = bench.table.incoming.reports()
    assert report.reason == reasons["x1"]
