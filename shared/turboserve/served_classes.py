"""The classes that a worker serves, by its row or its report: one, or several."""

from __future__ import annotations

from turboserve.contracts.worker_offers import ServedClass
from turboserve.contracts.workers import LoadReport, WorkerRecord


def served_classes(worker: WorkerRecord | LoadReport) -> tuple[ServedClass, ...]:
    """Return all classes that the worker serves."""
    return worker.classes or (
        ServedClass(
            model=worker.model,
            capacity=worker.capacity,
            weights_digest=worker.weights_digest,
            controls=worker.controls,
            frame=worker.frame,
            chunk_latency_s=worker.chunk_latency_s,
        ),
    )


def served_class(worker: WorkerRecord | LoadReport, model: str) -> ServedClass | None:
    """Return the class of this name. None: the worker does not serve it."""
    return next((one for one in served_classes(worker) if one.model == model), None)
