"""A worker of two classes: one thread, an engine for each, and slots that both share."""

from __future__ import annotations

import math
import queue
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tests.worker.table_bench import LEASE_S, ME, Bench, row
from turboserve.clock import SystemClock
from turboserve.worker.engine.engine import Engine
from turboserve.worker.service import commands, events
from turboserve.worker.service.class_slots import ClassSlots
from turboserve.worker.service.engine_commands import AdmitRequest
from turboserve.worker.service.host_platform import EngineThread
from turboserve.worker.service.models import MemoryPart, load_models, make_engine
from turboserve.worker.service.packager import FromEngine, GeneratedChunk
from turboserve.worker.service.table import Table
from turboserve.worker.settings import Settings

WAIT_S = 120.0
BOTH = "toyworld,toyworld-small"
CHUNKS = 3


def settings(model: str) -> Settings:
    return Settings(model=model, worker_max_sessions=2, host_memory_bytes=0, overlap="off", device="cpu")


def engines(model: str) -> dict[str, Engine]:
    each = settings(model).by_class()
    return {
        one.model: make_engine(load_models(one), one, MemoryPart(number, len(each)))
        for number, one in enumerate(each)
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
    assert both.chunks({"large": 1})["large"][0].reference
    both.admit("small", "toyworld-small")
    both.admit("large-2", "toyworld")
    made = both.chunks({"small": CHUNKS, "large-2": CHUNKS})
    assert not all(one.reference for one in [*made["small"], *made["large-2"]])


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
    parts = Settings(model=BOTH, memory_bytes=2 << 30, host_memory_bytes=3 << 30).by_class()
    assert [one.model for one in parts] == ["toyworld", "toyworld-small"]
    assert [one.memory_bytes for one in parts] == [1 << 30] * 2
    assert [one.host_memory_bytes for one in parts] == [3 << 29] * 2


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
