"""The engine's stages: each gathers a batch, computes it and scatters results (NeuStream's stream module).

A stage does not depend on the others; the engine decides whose turn it is. The stage of forwards is in
`forwarding`, that of prompts in `text_stage`. Decoding runs in a stream executor. The service packages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from math import inf
from typing import Generic, TypeVar

import torch

from turboserve.static_frozen import statically_frozen
from turboserve.worker.engine.backend import Backend, Decoded, Decoding, next_decoding
from turboserve.worker.engine.gather import GatherPolicy, LatencyProfile
from turboserve.worker.engine.interface import ChunkReady, ChunkTimings, Event
from turboserve.worker.engine.pacing import Pacing
from turboserve.worker.engine.session import Session, UndecodedChunk
from turboserve.worker.engine.streams import DEVICE_LOST, settle

Waiting = TypeVar("Waiting")
Item = TypeVar("Item")
Result = TypeVar("Result")
Clock = Callable[[], float]
Fail = Callable[[Session, "Exception | None"], Event]
"""Ends a session that raised an error. Returns the event."""


@statically_frozen(eq=False)
class StageOutcome(Generic[Item, Result]):
    """A stage's result for one item, or the error that this item alone raises."""

    item: Item
    result: Result | None
    error: Exception | None = None


class Stage(ABC, Generic[Waiting, Item, Result]):
    """A step of the pipeline with a measured latency per batch size.

    The input queue is a view of the sessions in the matching state. The queue therefore cannot disagree with
    the sessions, however a session leaves.
    """

    def __init__(self, device: torch.device, clock: Clock, profile: LatencyProfile | None = None) -> None:
        self.profile = profile or LatencyProfile()
        self._gpu = device if device.type == "cuda" else None  # To ask for the type each time takes longer.
        self._clock = clock

    @abstractmethod
    def waiting(self, sessions: Iterable[Session]) -> list[Waiting]:
        """The input queue, in the order of the sessions."""

    @abstractmethod
    def gather(self, waiting: list[Waiting], now: float) -> list[Item]:
        """The next batch of the waiting items; empty only if none waits."""

    @abstractmethod
    def compute(self, batch: list[Item]) -> list[Result]:
        """Results of a batch, in its order. Repeating a call must give the same."""

    @abstractmethod
    def scatter(self, outcomes: list[StageOutcome[Item, Result]], fail: Fail) -> list[Event]:
        """Give each session its result, or make it fail."""

    def attempt(self, batch: list[Item]) -> tuple[list[StageOutcome[Item, Result]], float | None]:
        """Compute a batch and measure its duration. An error belongs to every item, and has no duration.

        Raises `DEVICE_LOST` errors, which no single item causes.
        """
        start = self._clock()
        try:
            results = self.compute(batch)
            # A GPU runs asynchronously: wait for it, so that the duration covers the computation.
            settle(self._gpu)
        except DEVICE_LOST:
            raise
        except Exception as error:
            return [StageOutcome(item, None, error) for item in batch], None
        seconds = self._clock() - start
        return [StageOutcome(item, result) for item, result in zip(batch, results, strict=True)], seconds

    def resolve(self, batch: list[Item]) -> tuple[list[StageOutcome[Item, Result]], float | None]:
        """Run `attempt`; if a batch raises, try each item alone, so that one bad session affects no other."""
        outcomes, seconds = self.attempt(batch)
        if seconds is None and len(batch) > 1:
            outcomes = [outcome for item in batch for outcome in self.attempt([item])[0]]
        return outcomes, seconds

    def run(self, batch: list[Item]) -> list[StageOutcome[Item, Result]]:
        """Run `resolve`, and refine the profile by its duration."""
        outcomes, seconds = self.resolve(batch)
        if seconds is not None:
            self.observe(batch, seconds)
        return outcomes

    def observe(self, batch: list[Item], seconds: float) -> None:
        """Refine the stage's profile."""
        self.profile.observe(len(batch), seconds)


class DecodeBatch:
    """Latents that are decoded at once: a job of the decode executor."""

    def __init__(self, stage: DecodeStage, batch: list[Decoding]) -> None:
        self.batch = batch
        self.outcomes: list[StageOutcome[Decoding, Decoded]] = []
        self.seconds: float | None = None
        """Duration of the decode. None: it raised an error, and each item was decoded alone."""
        self._stage = stage

    def run(self) -> None:
        """See `Job.run`."""
        self.outcomes, self.seconds = self._stage.resolve(self.batch)
        for item in self.batch:
            item.ready_s, item.seconds = self._stage.now(), self.seconds or 0.0


class DecodeStage(Stage[Session, Decoding, Decoded]):
    """Decodes clean latents to frames, with each session's own streaming cache.

    The gather policy chooses the sessions and their number by this stage's profile. All rows of a batch have
    equally many latent frames, and either all or none of them begin their video, because a session that
    begins has no cache. With at most one row (`EngineOptions.decode_batch`, as on CPU workers), a session's
    latents give the same frames bit for bit whatever else is decoded. With more rows, a pixel may differ by
    one of 255.
    """

    def __init__(
        self,
        backend: Backend,
        clock: Clock,
        pacing: Pacing,
        policy: GatherPolicy,
        max_batch: int,
        profile: LatencyProfile | None = None,
    ) -> None:
        super().__init__(backend.device, clock, profile)
        self._backend = backend
        self._pacing = pacing
        self._config = backend.config
        self._policy = policy
        self._max_batch = max_batch

    def now(self) -> float:
        """Time on the engine's clock."""
        return self._clock()

    def waiting(self, sessions: Iterable[Session]) -> list[Session]:
        """See `Stage.waiting`."""
        return [session for session in sessions if session.undecoded and session.decodable]

    def gather(self, waiting: list[Session], now: float) -> list[Decoding]:
        """See `Stage.gather`. The gathered sessions count as being in the decode executor from then on."""
        chosen = waiting
        if len(waiting) > 1:
            by_name = {session.name: session for session in waiting}
            ready = self._pacing.decodings(waiting, now)
            gathered = self._policy.gather(ready, self.profile, self._max_batch)
            chosen = [by_name[candidate.session] for candidate in gathered]
        batch = []
        for session in chosen:
            session.in_decode_executor = True
            batch.append(next_decoding(session))
        return batch

    def compute(self, batch: list[Decoding]) -> list[Decoded]:
        """See `Stage.compute`."""
        return self._backend.decode(batch)

    def scatter(self, outcomes: list[StageOutcome[Decoding, Decoded]], fail: Fail) -> list[Event]:
        """See `Stage.scatter`."""
        events: list[Event] = []
        for outcome in outcomes:
            session, item, decoded = outcome.item.session, outcome.item.item, outcome.result
            if decoded is None:
                events.append(fail(session, outcome.error))
                continue
            session.in_decode_executor = False
            session.undecoded.popleft()
            session.state.decoder_cache = decoded.cache
            if isinstance(item, UndecodedChunk):
                session.delivered = item.index + 1
                timings = item.timings.decoded(outcome.item.ready_s, outcome.item.seconds)
                events.append(self._ready(session, item, decoded, timings))
        return events

    def observe(self, batch: list[Decoding], seconds: float) -> None:
        """See `Stage.observe`. Only usual decodings tell how long a chunk takes."""
        if all(each.is_usual for each in batch):
            self.profile.observe(len(batch), seconds)

    def _ready(
        self, session: Session, item: UndecodedChunk, decoded: Decoded, timings: ChunkTimings
    ) -> ChunkReady:
        return ChunkReady(
            session.name,
            item.index,
            decoded.latents,
            decoded.frames,
            item.control_seq,
            self._config.media_start(item.index),
            timings,
            item.fidelity,
            item.lowered,
        )


class Isolation:
    """Alternates between isolated sessions and all others.

    A device error does not say whose input caused it. A session that was in a failing step therefore begins
    with steps of its own, while nothing else computes: if a device fails again, that session is the cause.
    """

    def __init__(self) -> None:
        self._alone = False
        """Whether the last batch was an isolated session."""

    def choose(self, waiting: list[Waiting], session_of: Callable[[Waiting], Session]) -> list[Waiting]:
        """The candidates of the next batch: one isolated item of `waiting`, or all that are not isolated."""
        isolated = [each for each in waiting if session_of(each).isolated]
        if not isolated:
            return waiting
        others = [each for each in waiting if not session_of(each).isolated]
        self._alone = not (self._alone and others)
        if not self._alone:
            return others
        return [min(isolated, key=lambda each: _due(session_of(each)))]


def _due(session: Session) -> float:
    return inf if session.task is None else session.task.due_at_s
