"""A worker on toyworld whose forwards take a declared time: `python -m … SECONDS`.

Only the device differs: a forward computes as ever, and then its thread sleeps. So a machine without a GPU
plays workers that are too slow for their sessions, and keeps processor time for everything else.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from torch import Tensor

from turboserve import service
from turboserve.clock import Clock
from turboserve.service import Runtime
from turboserve.worker.engine.backend import Backend
from turboserve.worker.engine.interface import EngineOptions
from turboserve.worker.engine.models import Models
from turboserve.worker.engine.tensor_backend import TensorBackend
from turboserve.worker.engine.work import Work
from turboserve.worker.service.app import compose, expose
from turboserve.worker.service.host_platform import HostPlatform
from turboserve.worker.service.models import load_models
from turboserve.worker.service.ports import Loaded
from turboserve.worker.service.warm_up import BATCHES
from turboserve.worker.settings import Settings


class PacedBackend(TensorBackend):
    """A device without any gain by batching: a forward takes `forward_s` for each chunk in its rows.

    A forward that computes for longer than that takes as long as it computes.
    """

    def __init__(
        self,
        models: Models,
        options: EngineOptions,
        forward_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Raises the errors of `TensorBackend`."""
        super().__init__(
            models.transformer, models.text, models.decoder, models.fingerprint, options, compiler=None
        )
        self._forward_s, self._clock, self._sleep = forward_s, clock, sleep

    def forward(self, works: Sequence[Work]) -> list[Tensor]:
        """See `Backend.forward`."""
        began_s = self._clock()
        flows = super().forward(works)
        chunks = sum(work.frames for work in works) / self.config.frames_per_chunk
        self._sleep(max(0.0, began_s + chunks * self._forward_s - self._clock()))
        return flows


@dataclass(frozen=True, eq=False)
class PacedModels(Models):
    """Models on a paced device."""

    forward_s: float = 0.0
    """Seconds of a forward of one row."""

    def backend(self, options: EngineOptions) -> Backend:
        """See `Replica.backend`."""
        return PacedBackend(self, options, self.forward_s)


class PacedPlatform(HostPlatform):
    """This machine with a paced device. L(b) is declared: a warm-up on a CPU measures no sleep."""

    def __init__(self, settings: Settings, clock: Clock, forward_s: float) -> None:
        """Raises the errors of `HostPlatform`."""
        super().__init__(settings, clock, functools.partial(paced_models, forward_s=forward_s))
        self._forward_s = forward_s

    def _loaded(self) -> Loaded:
        engine = super()._loaded().engine
        chunk_s = engine.config.chunk_forwards * self._forward_s
        return Loaded(engine, {size: size * chunk_s for size in BATCHES if size <= engine.slots})


def paced_models(settings: Settings, forward_s: float) -> PacedModels:
    """Load the configured model on a paced device."""
    models = load_models(settings)
    return PacedModels(
        **{each.name: getattr(models, each.name) for each in fields(models)}, forward_s=forward_s
    )


async def start(runtime: Runtime, forward_s: float) -> None:
    """Compose the worker. See `app.start`."""
    settings = runtime.settings
    assert isinstance(settings, Settings)
    expose(await compose(runtime, settings, PacedPlatform(settings, runtime.clock, forward_s)))


if __name__ == "__main__":
    seconds = float(sys.argv[1])
    service.run("worker", service.load("worker", Settings), functools.partial(start, forward_s=seconds))
