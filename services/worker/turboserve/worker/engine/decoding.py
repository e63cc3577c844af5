"""The stage that turns clean latents into pictures, in a lane beside the forwards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from turboserve.worker.engine.events import ChunkReady, ChunkTimings, Event
from turboserve.worker.engine.pacing import Pacing
from turboserve.worker.engine.profile import LatencyProfile
from turboserve.worker.engine.session import Session
from turboserve.worker.engine.spec import Decoder
from turboserve.worker.engine.stages import Clock, Fail, Outcome, Stage
from turboserve.worker.engine.streams import to_host
from turboserve.worker.model.config import ModelConfig


@dataclass(frozen=True, eq=False)
class Decoded:
    """What one decode gives, on the host but for the cache."""

    frames: Tensor
    """uint8 [N, H, W, 3]"""
    latents: Tensor
    """What was decoded, [F, C, H, W]."""
    cache: dict[str, Tensor]
    """The session's decoder cache for its next latents."""


class Decoding:
    """One session's latents in the decode lane: a job."""

    def __init__(self, stage: DecodeStage, session: Session) -> None:
        """Takes the first of the session's undecoded latents; the session's cache stays until it is done."""
        self.session = session
        self.item = session.undecoded[0]
        self.cache = session.state.decoder_cache
        self.outcome: Outcome[Decoding, Decoded] = Outcome(self, None)
        self.seconds: float | None = None
        self.ready_s = 0.0
        self._stage = stage

    def run(self) -> None:
        """See `Job.run`."""
        [self.outcome], self.seconds = self._stage.attempt([self])
        self.ready_s = self._stage.now()


class DecodeStage(Stage[Session, Decoding, Decoded]):
    """Clean latents → pixel frames, through each session's own streaming cache."""

    def __init__(
        self,
        decoder: Decoder,
        device: torch.device,
        clock: Clock,
        pacing: Pacing,
        config: ModelConfig,
        profile: LatencyProfile | None = None,
    ) -> None:
        super().__init__(device, clock, profile)
        self._decoder = decoder
        self._pacing = pacing
        self._config = config

    def now(self) -> float:
        """The engine's clock."""
        return self._clock()

    def waiting(self, sessions: Iterable[Session]) -> list[Session]:
        """See `Stage.waiting`."""
        return [session for session in sessions if session.decodable]

    def gather(self, waiting: list[Session], now: float) -> list[Decoding]:
        """See `Stage.gather`. One: whose viewer has least video left."""
        if not waiting:
            return []
        session = min(waiting, key=lambda each: self._pacing.slack(each, now))
        session.in_lane = True
        return [Decoding(self, session)]

    @torch.inference_mode()
    def compute(self, batch: list[Decoding]) -> list[Decoded]:
        """See `Stage.compute`."""
        return [self._decode(each.item.latents, each.cache) for each in batch]

    def _decode(self, latents: Tensor, cache: dict[str, Tensor] | None) -> Decoded:
        frames, after = self._decoder.decode(latents, cache)
        return Decoded(to_host(frames), to_host(latents), after)

    def scatter(self, outcomes: list[Outcome[Decoding, Decoded]], fail: Fail) -> list[Event]:
        """See `Stage.scatter`."""
        events: list[Event] = []
        for outcome in outcomes:
            session, item, decoded = outcome.item.session, outcome.item.item, outcome.result
            if decoded is None:
                events.append(fail(session, outcome.error))
                continue
            session.in_lane = False
            session.undecoded.popleft()
            session.state.decoder_cache = decoded.cache
            if item.index is not None and item.timings is not None:
                session.delivered = item.index + 1
                timings = replace(item.timings, ready_s=outcome.item.ready_s)
                events.append(self._ready(session, item.index, item.control_seq, decoded, timings))
        return events

    def _ready(
        self, session: Session, index: int, control_seq: int, decoded: Decoded, timings: ChunkTimings
    ) -> ChunkReady:
        return ChunkReady(
            session=session.name,
            index=index,
            latents=decoded.latents,
            frames=decoded.frames,
            control_seq=control_seq,
            media_start_s=self._config.media_start(index),
            timings=timings,
        )
