"""The whole engine under several viewers, on a clock that is the processor's time.

Every step of the engine takes as long as it took the device. If nothing is due, the clock advances until
something is. The numbers are therefore those of a machine without other load, and other load distorts them
less.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from turboserve.bench.engine.measure import Timer
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.interface import ChunkReady, EngineOptions, Event, SessionFailed, SessionSpec
from turboserve.worker.engine.memory import SlabLayout
from turboserve.worker.engine.models import Models

TICK_S = 0.005
"""Step of the clock while nothing is due."""


class EngineSessionError(RuntimeError):
    """A session failed while it was measured."""


@dataclass
class EngineViewer:
    """Plays a session from its first chunk on, and stalls when no chunk is ready."""

    begun: bool = False
    position_s: float = 0.0
    generated_s: float = 0.0
    at_s: float = 0.0
    stalled: bool = False
    stalls: int = 0

    def move(self, now: float) -> None:
        """Play until `now`, or until the generated video ends."""
        if self.begun:
            wanted = self.position_s + now - self.at_s
            starved = wanted > self.generated_s
            self.stalls += starved and not self.stalled
            self.stalled = starved
            self.position_s = min(wanted, self.generated_s)
        self.at_s = now


@dataclass
class Traffic:
    """Results of one policy with one number of viewers, in seconds."""

    latencies_s: list[float] = field(default_factory=list)
    """Latency of each chunk, from becoming due to being decoded."""
    stalls: int = 0
    elapsed_s: float = 0.0
    busy_s: float = 0.0


class WatchedEngine:
    """An engine, its viewers and their clock."""

    def __init__(self, models: Models, sessions: int, policy: str, prompts: Iterable[str]) -> None:
        weight = models.transformer.patch_embedding.weight
        layout = SlabLayout.of(models.transformer.config, weight.dtype)
        options = EngineOptions(sessions * layout.total_bytes, max_batch=sessions, policy=policy)
        self.engine = Engine(models, options, clock=self.now)
        self._timer = Timer(weight.device)
        self._now = 0.0
        self._step_began: float | None = None
        self._viewers: dict[str, EngineViewer] = {}
        for number, prompt in zip(range(sessions), prompts, strict=False):
            self.engine.admit(SessionSpec(str(number), prompt, seed=number), 0.0)
            self._viewers[str(number)] = EngineViewer()

    def now(self) -> float:
        """The engine's clock, which also advances within a step."""
        running = 0.0 if self._step_began is None else self._timer() - self._step_began
        return self._now + running

    def run(self, chunks: int) -> Traffic:
        """Run until every session has made `chunks` more chunks. Raises `EngineSessionError`."""
        traffic, made = Traffic(), dict.fromkeys(self._viewers, 0)
        before = sum(viewer.stalls for viewer in self._viewers.values())
        begun = self._now
        while min(made.values()) < chunks:
            if not self.engine.has_work(self._now):
                self._now += TICK_S
            else:
                for event in self._step(traffic):
                    self._take(event, traffic, made)
            for name, viewer in self._viewers.items():
                viewer.move(self._now)
                self.engine.playhead(name, viewer.position_s, now=self._now, playing=viewer.begun)
        traffic.stalls = sum(viewer.stalls for viewer in self._viewers.values()) - before
        traffic.elapsed_s = self._now - begun
        return traffic

    def _step(self, traffic: Traffic) -> list[Event]:
        self._step_began = self._timer()
        events = self.engine.step(self._now)
        seconds = self._timer() - self._step_began
        self._step_began = None
        self._now += seconds
        traffic.busy_s += seconds
        return events

    def _take(self, event: Event, traffic: Traffic, made: dict[str, int]) -> None:
        if isinstance(event, SessionFailed):
            raise EngineSessionError(f"session {event.session}: {event.error}")
        if isinstance(event, ChunkReady):
            viewer = self._viewers[event.session]
            made[event.session] += 1
            viewer.begun = True
            viewer.generated_s = self.engine.config.media_start(event.index + 1)
            traffic.latencies_s.append(event.timings.ready_s - event.timings.due_s)
