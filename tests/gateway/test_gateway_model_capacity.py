"""What /v1/models and /v1/workers say of workers that serve one model at several sizes."""

from __future__ import annotations

from turboserve.contracts.worker_offers import FrameSize, ServedClass
from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.gateway.model_offers import by_class
from turboserve.gateway.workers.endpoints import describe_model
from turboserve.gateway.workers.schemas import Worker


def worker(name: str) -> WorkerRecord:
    own = ServedClass(model="toy", capacity=2, sessions=1, frame=FrameSize(width=96, height=96))
    small = ServedClass(model="toy_64x64", capacity=6, sessions=2, frame=FrameSize(width=64, height=64))
    return WorkerRecord(
        id=name,
        model="toy",
        phase=WorkerPhase.READY,
        capacity=2,
        classes=(own, small),
        started_at=1,
        renewed_at=1,
    )


def test_a_worker_that_serves_a_model_at_two_sizes_counts_once() -> None:
    rows = by_class([worker("w1"), worker("w2")])
    classes = {name: [one for one in rows if one.model == name] for name in ("toy", "toy_64x64")}
    model = describe_model("toy", classes, "toy", None)
    assert (model.workers, model.capacity, model.sessions) == (2, 12, 6)
    assert [(size.workers, size.capacity) for size in model.sizes] == [(2, 4), (2, 12)]


def test_a_worker_is_listed_with_all_its_classes() -> None:
    listed = Worker.of(worker("w1"))
    assert (listed.model, listed.capacity) == ("toy", 2)
    classes = [(one.model, one.width, one.capacity, one.sessions) for one in listed.classes]
    assert classes == [("toy", 96, 2, 1), ("toy", 64, 6, 2)]
    alone = worker("w2").model_copy(update={"classes": None, "sessions": 1, "chunk_latency_s": {1: 0.1}})
    [only] = Worker.of(alone).classes
    assert (only.model, only.capacity, only.sessions, only.chunk_latency_s) == ("toy", 2, 1, {1: 0.1})
