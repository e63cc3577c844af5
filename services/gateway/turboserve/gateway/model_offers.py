"""What a request for a session may ask for: models, and the frame sizes at which workers serve them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from turboserve.allocation.classes import SessionClass
from turboserve.bus import Bus
from turboserve.contracts.base import is_id
from turboserve.contracts.errors import InvalidInputError, TurboServeError, UnknownModelError
from turboserve.contracts.requests import ListWorkers
from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.subjects import LIST_WORKERS

Size = tuple[int, int]
"""Width and height of a frame, pixels."""


def size_of(worker: WorkerRecord) -> Size | None:
    """Return the size of the worker's frames. None: an earlier version does not report it."""
    if worker.frame is not None:
        return worker.frame.width, worker.frame.height
    served = SessionClass.of_name(worker.model)
    return (served.width, served.height) if served.width else None


def by_class(workers: Iterable[WorkerRecord]) -> tuple[WorkerRecord, ...]:
    """Return one row for each class of each worker: that of a worker which serves this class alone."""
    return tuple(row for worker in workers for row in _rows(worker))


def _rows(worker: WorkerRecord) -> Iterable[WorkerRecord]:
    if worker.classes is None:
        return (worker,)
    return (
        worker.model_copy(
            update={
                "model": one.model,
                "capacity": one.capacity,
                "sessions": one.sessions,
                "controls": one.controls,
                "frame": one.frame,
                "chunk_latency_s": one.chunk_latency_s,
                "classes": None,
            }
        )
        for one in worker.classes
    )


def offered_models(workers: Iterable[WorkerRecord]) -> tuple[str, ...]:
    """Return the models of workers that are ready, sorted."""
    return tuple(sorted({SessionClass.of_name(one.model).model for one in _ready(workers)}))


def offered_sizes(workers: Iterable[WorkerRecord], model: str) -> tuple[Size, ...]:
    """Return the sizes at which ready workers serve the model, sorted."""
    serving = (one for one in _ready(workers) if SessionClass.of_name(one.model).model == model)
    return tuple(sorted({size for one in serving if (size := size_of(one)) is not None}))


def class_for(workers: Sequence[WorkerRecord], model: str, size: Size) -> str:
    """Return the name of the class that has the model's frames of this size.

    It is the model's own name if the size is its own, as the newest of `workers`, the last one, has declared
    it. Gone workers count, since a pool may have none at the moment. A size that no worker has declared has
    the name that ends in it.
    """
    declared = (size_of(one) for one in reversed(workers) if one.model == model)
    own = next((one for one in declared if one is not None), None)
    return model if size == own else SessionClass(model, *size).name


def refused(workers: Iterable[WorkerRecord], model: str, size: Size | None) -> TurboServeError:
    """Return the error for a class that no worker serves, with what is offered instead.

    `size` None: the request named none.
    """
    ready = list(_ready(workers))
    models, sizes = offered_models(ready), offered_sizes(ready, model)
    if model not in models:
        offer = ", ".join(models) or "none"
        return UnknownModelError(
            f"no worker serves the model {model}; served now: {offer}", field="model", limit=offer
        )
    offered = ", ".join(f"{width}x{height}" for width, height in sizes) or None
    instead = f"width and height may be: {offered}" if offered else "name no size: none is known yet"
    if size is None:
        detail = f"no worker serves {model} at its own size; {instead}"
        return InvalidInputError(detail, field="width", limit=offered)
    # If the width is offered, the height is what is wrong.
    field = "height" if size[0] in {width for width, _ in sizes} else "width"
    detail = f"no worker serves {model} at {size[0]}x{size[1]}; {instead}"
    return InvalidInputError(detail, field=field, limit=offered)


class ModelOffers:
    """Finds the class of a request for a session. `size` None: the request names no size."""

    def __init__(self, bus: Bus, default_model: str) -> None:
        """`default_model`: what sessions get that name no model."""
        self._bus, self._default = bus, default_model

    async def class_of(self, model: str | None, size: Size | None) -> str:
        """Return the name of the class (`SessionClass.of_name`). Workers are asked for only with a size.

        Raises UnavailableError, and InvalidInputError or UnknownModelError for a name that is too long for
        any worker.
        """
        if size is not None:
            workers, base = await self._workers(), SessionClass.of_name(model or self._default).model
            name = class_for(workers, base, size)
            if not is_id(name):
                raise refused(workers, base, size)
            return name
        if model is None or model == SessionClass.of_name(self._default).model:
            return self._default
        return model

    async def refusal(self, model: str | None, size: Size | None) -> TurboServeError:
        """Return the error for a class that the state store does not know. Raises UnavailableError."""
        named = SessionClass.of_name(model or self._default)
        if size is None:
            named = SessionClass.of_name(await self.class_of(model, None))
            size = (named.width, named.height) if named.width else None
        return refused(await self._workers(), named.model, size)

    async def _workers(self) -> tuple[WorkerRecord, ...]:
        return by_class((await self._bus.call(LIST_WORKERS, ListWorkers(include_gone=True))).workers)


def _ready(workers: Iterable[WorkerRecord]) -> Iterable[WorkerRecord]:
    return (one for one in workers if one.phase is WorkerPhase.READY)


def frame_size(width: int | None, height: int | None) -> Size | None:
    """Return the size that a request names; None: none. Raises InvalidInputError for one side alone."""
    if width is None and height is None:
        return None
    if width is None or height is None:
        missing = "width" if width is None else "height"
        raise InvalidInputError("width and height are given together, or neither is", field=missing)
    return width, height
