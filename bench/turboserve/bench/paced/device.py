"""A device with declared latencies and states: forwards take their declared time, of which the CPU sleeps."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields

import torch
from torch import Tensor

from turboserve.contracts.errors import InvalidInputError
from turboserve.worker.engine.backend import Backend
from turboserve.worker.engine.gather import LatencyProfile
from turboserve.worker.engine.interface import Decoder, EngineOptions
from turboserve.worker.engine.models import Models
from turboserve.worker.engine.tensor_backend import TensorBackend
from turboserve.worker.engine.work import Work

PADDING = "padding"


@dataclass(frozen=True)
class PacedDevice:
    """What is declared. The defaults change nothing."""

    forward_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds of one forward by number of chunks in its rows; see `LatencyProfile`. Empty: as computed."""
    computes: bool = True
    """Whether forwards also compute. Otherwise every latent stays the noise that it begins with."""
    state_bytes: int = 0
    """Bytes of each session's state in addition to the model's own. They never change."""
    encodes: bool = True
    """Whether each chunk's video is encoded. Otherwise all chunks of a length repeat the first."""
    start_s: float = 0.0
    """Least time from the start of the worker's process until it has loaded its model."""
    pinned: bool = False
    """Whether the worker runs on one core: the one of its member's number."""

    def to_json(self) -> str:
        """Return the argument of the worker's command."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> PacedDevice:
        """Read what `to_json` wrote. Raises InvalidInputError that names the field."""
        try:
            given = json.loads(text)
        except ValueError as error:
            raise InvalidInputError(f"device: {error}", field="device") from None
        known = [each.name for each in fields(cls)]
        if not isinstance(given, dict) or given.keys() - set(known):
            raise InvalidInputError("device: unknown fields", field="device", limit=", ".join(known))
        times = {int(size): float(seconds) for size, seconds in given.pop("forward_s", {}).items()}
        for size, seconds in times.items():
            if size < 1 or not 0 <= seconds < math.inf:
                detail = f"forward_s: {seconds} at {size} chunks is no time"
                raise InvalidInputError(detail, field="forward_s", limit="seconds by chunks from 1")
        return cls(forward_s=times, **given)


class PaddedDecoder:
    """Keeps `pad_bytes` more of each session than the decoder it wraps.

    They stand for a large model's KV window, of which a chunk rewrites a small part only.
    """

    def __init__(self, inner: Decoder, pad_bytes: int) -> None:
        self._inner, self._pad_bytes = inner, pad_bytes
        self.cache_bytes = inner.cache_bytes + pad_bytes
        self.weight_bytes, self.workspace_bytes = inner.weight_bytes, inner.workspace_bytes

    def decode(
        self, latents: Tensor, caches: Sequence[dict[str, Tensor]] | None
    ) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """See `Decoder.decode`."""
        kept = None if caches is None else [dict(cache) for cache in caches]
        padding = [cache.pop(PADDING) for cache in kept or ()]
        if kept is None:
            padding = [torch.arange(self._pad_bytes // 8, dtype=torch.int64) for _ in latents]
        frames, after = self._inner.decode(latents, kept)
        return frames, [{**cache, PADDING: pad} for cache, pad in zip(after, padding, strict=True)]


class PacedBackend(TensorBackend):
    """A forward takes the declared time, or as long as it computes if that is longer."""

    def __init__(
        self,
        models: Models,
        options: EngineOptions,
        device: PacedDevice,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Raises the errors of `TensorBackend`."""
        super().__init__(
            models.transformer,
            models.text,
            models.decoder,
            models.fingerprint,
            options,
            compiler=None,
            controls=models.controls,
            fast_decoder=models.fast_decoder,
        )
        self._seconds, self._computes = LatencyProfile(device.forward_s), device.computes
        self._clock, self._sleep = clock, sleep

    def forward(self, works: Sequence[Work]) -> list[Tensor]:
        """See `Backend.forward`."""
        began_s = self._clock()
        flows = super().forward(works) if self._computes else [work.row().latents for work in works]
        chunks = round(sum(work.frames for work in works) / self.config.frames_per_chunk)
        self._sleep(max(0.0, began_s + self._seconds(max(chunks, 1)) - self._clock()))
        return flows


@dataclass(frozen=True, eq=False)
class PacedModels(Models):
    """Models on a paced device."""

    device: PacedDevice = PacedDevice()

    def backend(self, options: EngineOptions) -> Backend:
        """See `Replica.backend`."""
        return PacedBackend(self, options, self.device) if self.device.forward_s else super().backend(options)


def paced(models: Models, device: PacedDevice) -> PacedModels:
    """Put models on a paced device."""
    given = {each.name: getattr(models, each.name) for each in fields(models)}
    if device.state_bytes:
        given["decoder"] = PaddedDecoder(models.decoder, device.state_bytes)
    return PacedModels(**given, device=device)
