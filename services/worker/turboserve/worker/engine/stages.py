"""The engine's stages: each gathers a batch, computes, and scatters results (NeuStream's stream module).

A stage knows nothing of the others; the engine decides whose turn it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from turboserve.worker.engine.attention import attention_kind
from turboserve.worker.engine.gather import Candidate, GatherPolicy
from turboserve.worker.engine.profile import LatencyProfile
from turboserve.worker.engine.rows import RowsForward
from turboserve.worker.engine.session import Session
from turboserve.worker.engine.spec import Decoder, TextEncoder
from turboserve.worker.engine.streams import settle, to_host
from turboserve.worker.model.transformer import CausalWanTransformer

Item = TypeVar("Item")
Result = TypeVar("Result")
Clock = Callable[[], float]


@dataclass(frozen=True, eq=False)
class Outcome(Generic[Item, Result]):
    """What a stage made of one item: a result, or the error that this item alone raises."""

    item: Item
    result: Result | None
    error: Exception | None = None


class Stage(ABC, Generic[Item, Result]):
    """A step of the pipeline with a measured latency per batch size."""

    def __init__(self, device: torch.device, clock: Clock, profile: LatencyProfile | None = None) -> None:
        self.profile = profile or LatencyProfile()
        self._device = device
        self._clock = clock

    @abstractmethod
    def compute(self, batch: list[Item]) -> list[Result]:
        """Results of a batch, in its order. Repeating a call must give the same."""

    def attempt(self, batch: list[Item]) -> tuple[list[Outcome[Item, Result]], float | None]:
        """Compute a batch, and how long that took; an error is every item's, and took no time."""
        start = self._clock()
        try:
            results = self.compute(batch)
            # A GPU is given its work long before it has done it; without waiting, that would be measured.
            settle(self._device)
        except Exception as error:
            return [Outcome(item, None, error) for item in batch], None
        seconds = self._clock() - start
        return [Outcome(item, result) for item, result in zip(batch, results, strict=True)], seconds

    def run(self, batch: list[Item]) -> list[Outcome[Item, Result]]:
        """Compute a batch. If it raises, each item is tried alone, so that one bad session harms no other."""
        outcomes, seconds = self.attempt(batch)
        if seconds is not None:
            self.observe(batch, seconds)
        elif len(batch) > 1:
            return [outcome for item in batch for outcome in self.run([item])]
        return outcomes

    def observe(self, batch: list[Item], seconds: float) -> None:
        """Refine the stage's profile."""
        self.profile.observe(len(batch), seconds)


class TextStage(Stage[str, Tensor]):
    """Prompts → embeddings [L, text_dim]."""

    def __init__(
        self,
        encoder: TextEncoder,
        device: torch.device,
        clock: Clock,
        profile: LatencyProfile | None = None,
    ) -> None:
        super().__init__(device, clock, profile)
        self._encoder = encoder

    @torch.inference_mode()
    def compute(self, batch: list[str]) -> list[Tensor]:
        """See `Stage.compute`."""
        return list(self._encoder.encode(batch).unbind(0))


class ForwardStage(Stage[Session, Tensor]):
    """Transformer forwards of any kind: denoising steps, clean passes, recaches, replays.

    A recache covers a whole window and not a chunk; it is a batch of its own and has a profile of its own.
    """

    def __init__(
        self,
        model: CausalWanTransformer,
        policy: GatherPolicy,
        max_batch: int,
        clock: Clock,
        profile: LatencyProfile | None = None,
        recache_profile: LatencyProfile | None = None,
        attention: str = "rows",
        compiler: str | None = None,
    ) -> None:
        """`attention`: see `EngineOptions`; `compiler`: see `RowsForward`. Raises `AttentionUnavailable`."""
        super().__init__(model.patch_embedding.weight.device, clock, profile)
        self.recache_profile = recache_profile or LatencyProfile()
        weight = model.patch_embedding.weight
        self._kind = attention_kind(attention, model.config, weight.device, weight.dtype)
        self._forward = RowsForward(model, self._kind.memory, compiler)
        self._frames_per_chunk = model.config.frames_per_chunk
        self._policy = policy
        self._max_batch = max_batch

    def gather(self, sessions: dict[str, Session], candidates: list[Candidate]) -> list[Session]:
        """The next batch."""
        chosen = self._policy.gather(candidates, self.profile, self._max_batch)
        if chosen and chosen[0].frames > self._frames_per_chunk:
            # A recache's rows are longer: as many as have a full batch's tokens, for so much memory there is.
            chosen = chosen[: max(1, self._max_batch * self._frames_per_chunk // chosen[0].frames)]
        return [sessions[candidate.session] for candidate in chosen]

    def compute(self, batch: list[Session]) -> list[Tensor]:
        """See `Stage.compute`. Flows [F, C, H, W]."""
        rows = [session.work.row() for session in batch if session.work is not None]
        with self._kind.chosen():
            return list(self._forward(rows).unbind(0))

    def observe(self, batch: list[Session], seconds: float) -> None:
        """See `Stage.observe`."""
        work = batch[0].work
        usual = work is not None and work.frames == self._frames_per_chunk
        (self.profile if usual else self.recache_profile).observe(len(batch), seconds)


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


class DecodeStage(Stage[Decoding, Decoded]):
    """Clean latents → pixel frames, through each session's own streaming cache."""

    def __init__(
        self,
        decoder: Decoder,
        device: torch.device,
        clock: Clock,
        profile: LatencyProfile | None = None,
    ) -> None:
        super().__init__(device, clock, profile)
        self._decoder = decoder

    def now(self) -> float:
        """The engine's clock."""
        return self._clock()

    @torch.inference_mode()
    def compute(self, batch: list[Decoding]) -> list[Decoded]:
        """See `Stage.compute`."""
        return [self._decode(each.item.latents, each.cache) for each in batch]

    def _decode(self, latents: Tensor, cache: dict[str, Tensor] | None) -> Decoded:
        frames, after = self._decoder.decode(latents, cache)
        return Decoded(to_host(frames), to_host(latents), after)
