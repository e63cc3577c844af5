"""The classes of a worker that serves several, as its reports and its sessions' logs need them."""

from __future__ import annotations

from collections.abc import Mapping

from turboserve.contracts.worker_offers import FrameSize, ServedClass
from turboserve.worker import metrics
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.gather import LatencyProfile
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.service.class_slots import ClassSlots, MediaStarts
from turboserve.worker.service.packager import PackagedChunk
from turboserve.worker.service.ports import Loaded

NOT_DECLARED: Mapping[str, int] = {}


class WorkerClasses:
    """What a worker has loaded, by class. A worker of one class has only `first`."""

    def __init__(self, loaded: Loaded, served: Mapping[str, int]) -> None:
        """`served`: n_j of each class. Empty: the worker serves one class."""
        self.first = loaded.engine
        self._classes = loaded.classes
        self.slots = ClassSlots(served) if loaded.classes else None
        """Slots for the worker's table. None: it counts sessions alone."""
        self._returns = (0, 0)
        """Returns to slabs that are counted, and the late ones among them."""
        self.profile = LatencyProfile(loaded.seconds)
        """L(b) of the first class."""
        self._profiles = {name: LatencyProfile(one.seconds) for name, one in loaded.classes.items()}
        if loaded.classes:
            self.profile = next(iter(self._profiles.values()))

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engines, the first class's first."""
        return tuple(one.engine for one in self._classes.values()) or (self.first,)

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """Fingerprint of each class; empty with one."""
        return {name: one.engine.fingerprint for name, one in self._classes.items()}

    @property
    def starts(self) -> MediaStarts:
        """Media starts of each class; empty with one."""
        return {name: one.engine.config.media_start for name, one in self._classes.items()}

    def config_of(self, model: str) -> ModelConfig:
        """The configuration of a class; the first one's for a class that is not served."""
        known = self._classes.get(model)
        return self.first.config if known is None else known.engine.config

    def observe(self, made: PackagedChunk) -> None:
        """Refine L(b) of the chunk's class, if its time tells it."""
        profile = self._profiles.get(made.model, self.profile)
        sample = made.sample
        if sample is None:
            return
        seconds = made.compute_s if sample.device_s is None else sample.device_s
        if sample.lowered:
            profile.observe_lowered(made.concurrent_sessions, seconds, sample.share)
        else:
            profile.observe(made.concurrent_sessions, seconds)

    def count_returns(self) -> None:
        """Count the sessions that have returned to slabs. A worker of several classes has none outside."""
        counts, counted = self.first.residency.counts, self._returns
        self._returns = counts.returns, counts.late_returns
        metrics.residency_returns.add(self._returns[0] - counted[0])
        metrics.residency_late_returns.add(self._returns[1] - counted[1])

    def report(self) -> tuple[ServedClass, ...] | None:
        """See `LoadReport.classes`."""
        slots = self.slots
        if slots is None:
            return None
        offered = slots.offered()
        return tuple(self._reported(name, one.engine, offered[name]) for name, one in self._classes.items())

    def _reported(self, name: str, engine: Engine, capacity: int) -> ServedClass:
        width, height = engine.config.frame_size
        return ServedClass(
            model=name,
            capacity=capacity,
            weights_digest=engine.fingerprint,
            controls=engine.declarations,
            frame=FrameSize(width=width, height=height),
            chunk_latency_s=self._profiles[name].to_mapping(),
        )
