"""The stage that decodes clean latents to frames, in a stream executor beside the forwards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from turboserve.worker.engine.backend import Backend, Decoded, Decoding
from turboserve.worker.engine.boundary import Pacing
from turboserve.worker.engine.gather import GatherPolicy, LatencyProfile
from turboserve.worker.engine.interface import ChunkReady, ChunkTimings, Event
from turboserve.worker.engine.session import Session, UndecodedChunk
from turboserve.worker.engine.stages import Clock, Fail, Stage, StageOutcome


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
        return [session for session in sessions if session.decodable]

    def gather(self, waiting: list[Session], now: float) -> list[Decoding]:
        """See `Stage.gather`. The gathered sessions count as being in the decode executor from then on."""
        candidates = [self._pacing.decoding(session, now) for session in waiting]
        chosen = self._policy.gather(candidates, self.profile, self._max_batch)
        by_name = {session.name: session for session in waiting}
        batch = []
        for session in (by_name[candidate.session] for candidate in chosen):
            session.in_decode_executor = True
            batch.append(Decoding(session, session.undecoded[0], session.state.decoder_cache))
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
                timings = replace(item.timings, ready_s=outcome.item.ready_s, decode_s=outcome.item.seconds)
                events.append(self._ready(session, item, decoded, timings))
        return events

    def observe(self, batch: list[Decoding], seconds: float) -> None:
        """See `Stage.observe`. A first chunk has fewer frames, and the warming of a decoder has more latents
        than a chunk: neither tells how long a chunk takes."""
        if all(isinstance(each.item, UndecodedChunk) and each.cache is not None for each in batch):
            self.profile.observe(len(batch), seconds)

    def _ready(
        self, session: Session, item: UndecodedChunk, decoded: Decoded, timings: ChunkTimings
    ) -> ChunkReady:
        return ChunkReady(
            session=session.name,
            index=item.index,
            latents=decoded.latents,
            frames=decoded.frames,
            control_seq=item.control_seq,
            media_start_s=self._config.media_start(item.index),
            timings=timings,
            fidelity=item.fidelity,
        )
