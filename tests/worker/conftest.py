"""A tiny model with random weights, stand-ins for its text encoder and decoder, and a driver for engines."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.fidelity_ladder import FidelityLadder
from turboserve.worker.engine.interface import ChunkReady, EngineOptions, Event
from turboserve.worker.engine.memory import SlabLayout
from turboserve.worker.engine.models import Models
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.transformer import CausalWanTransformer


class HashedText:
    """Encodes prompts as embeddings that depend on the prompt alone."""

    weight_bytes = 0
    workspace_bytes = 0

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self.calls: list[list[str]] = []

    def encode(self, prompts: Sequence[str]) -> Tensor:
        self.calls.append(list(prompts))
        return torch.stack([self._one(prompt) for prompt in prompts])

    def _one(self, prompt: str) -> Tensor:
        if prompt == "raise":
            raise RuntimeError("the text encoder fails for this prompt")
        seed = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:6], "big")
        shape = (self._config.text_len - 1, self._config.text_dim)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class RunningSumDecoder:
    """Streaming decoder whose frames depend on every latent since the session's first."""

    cache_bytes = 16 * 4
    weight_bytes = 0
    workspace_bytes = 1 << 16

    def decode(
        self, latents: Tensor, caches: Sequence[dict[str, Tensor]] | None
    ) -> tuple[Tensor, list[dict[str, Tensor]]]:
        rows = [self._one(row, None if caches is None else caches[i]) for i, row in enumerate(latents)]
        return torch.stack([frames for frames, _ in rows]), [cache for _, cache in rows]

    def _one(self, latents: Tensor, cache: dict[str, Tensor] | None) -> tuple[Tensor, dict[str, Tensor]]:
        total = torch.zeros(latents.shape[1]) if cache is None else cache["total"]
        frames = []
        for i, latent in enumerate(latents):
            total = total + latent.mean((1, 2))
            level = (total.mean() * 50).round().to(torch.int64).remainder(256).to(torch.uint8)
            frames += [level.expand(8, 8, 3)] * (1 if cache is None and i == 0 else 4)
        return torch.stack(frames), {"total": total}


class Driver:
    """An engine under a clock that moves only by the driver."""

    def __init__(
        self, models: Models, options: EngineOptions, ladder: FidelityLadder | None = None, **profiles: Any
    ) -> None:
        self.now = 100.0
        self.engine = Engine(models, options, lambda: self.now, profiles or None, ladder)

    def run(self, until: Callable[[list[Event]], bool] | None = None, limit: int = 2000) -> list[Event]:
        """Step until there is no work, or until `until` holds for all events so far."""
        events: list[Event] = []
        for _ in range(limit):
            if not self.engine.has_work(self.now):
                if not self.engine.executors_busy:
                    return events
                self.engine.wait(120.0)
            events += self.engine.step(self.now)
            self.now += 0.001
            if until is not None and until(events):
                return events
        raise AssertionError(f"still working after {limit} steps")

    def chunks(self, session: str, count: int) -> list[ChunkReady]:
        """Run until `session` has delivered `count` more chunks; other sessions' events are dropped."""

        def enough(events: list[Event]) -> bool:
            return len(delivered(events, session)) >= count

        return delivered(self.run(enough), session)


def delivered(events: list[Event], session: str) -> list[ChunkReady]:
    return [event for event in events if isinstance(event, ChunkReady) and event.session == session]


@pytest.fixture
def tiny_config() -> ModelConfig:
    return ModelConfig(
        dim=48,
        ffn_dim=96,
        num_heads=2,
        num_layers=2,
        text_dim=12,
        text_len=5,
        latent_height=4,
        latent_width=4,
        freq_dim=32,
        local_attn_size=9,
        sink_size=3,
        rotation="window",
    )


@pytest.fixture
def make_models() -> Callable[..., Models]:
    def make(config: ModelConfig, seed: int = 5) -> Models:
        torch.manual_seed(seed)
        transformer = CausalWanTransformer(config)
        torch.nn.init.normal_(transformer.head.head.weight, std=0.2)
        for index in range(len(transformer.blocks)):
            values = transformer.get_parameter(f"blocks.{index}.cross_attn.v.weight")
            torch.nn.init.normal_(values, std=0.5)
        transformer.requires_grad_(False).eval()
        return Models(transformer, HashedText(config), RunningSumDecoder())

    return make


@pytest.fixture
def make_driver(tiny_config: ModelConfig, make_models: Callable[..., Models]) -> Callable[..., Driver]:
    """Make a driver. Arguments: `slabs`, `config`, `profiles` (seconds by batch size, by stage), `ladder`,
    and any field of `EngineOptions`."""

    def make(
        slabs: int = 4,
        config: ModelConfig = tiny_config,
        profiles: Mapping[str, Any] | None = None,
        ladder: FidelityLadder | None = None,
        **options: Any,
    ) -> Driver:
        slab_bytes = slabs * SlabLayout.of(config, torch.float32).total_bytes
        return Driver(make_models(config), EngineOptions(slab_bytes, **options), ladder, **(profiles or {}))

    return make
