"""What the engine relies on in a model: checks that a model's own tests run.

    CONTRACT = ModelContract(lambda: load(ModelOptions(torch.device("cpu"), torch.float32)))

    @pytest.mark.parametrize("check", ModelContract.CHECKS)
    def test_the_model_keeps_the_contract(check: str) -> None:
        CONTRACT.run(check)

Each check runs the networks, or a whole engine with them, on the model's own device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from turboserve.worker.engine.budget import plan
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.interface import (
    ChunkReady,
    Control,
    ControlApplied,
    EngineOptions,
    SessionSpec,
    Suspended,
)
from turboserve.worker.engine.memory import SlabLayout
from turboserve.worker.engine.models import Models
from turboserve.worker.replicas.comparison import largest, largest_level, same_chunks
from turboserve.worker.replicas.contract_steps import SESSION, chunks, migrate, require, until
from turboserve.worker.replicas.contract_steps import ModelContractError as ModelContractError
from turboserve.worker.replicas.control_contract import check_controls

TEXT_TOLERANCE = 1e-4
"""Largest difference of an embedding that was computed alone and beside others, relative to its largest."""
LEVELS = 2
"""Largest difference of a pixel that was decoded alone and beside others, of 255."""
CHUNKS = 4
"""Chunks of the sessions that are compared with each other."""


class ModelContract:
    """The checks of one model. Each raises `ModelContractError`."""

    CHECKS = (
        "text",
        "decoder",
        "weights",
        "memory",
        "seeds",
        "prompts",
        "controls",
        "window",
        "suspension",
        "migration",
    )
    """Names of all checks."""

    def __init__(
        self,
        load: Callable[[], Models],
        prompts: tuple[str, str] = ("a red circle moving left", "a blue square moving up"),
    ) -> None:
        """`load` returns the networks, with the same weights at each call. `prompts`: two prompts with
        different pictures."""
        self._load = load
        self._prompts = prompts

    def run(self, check: str) -> None:
        """Run one of `CHECKS`."""
        getattr(self, f"_check_{check}")()

    @cached_property
    def models(self) -> Models:
        """The networks, loaded at the first use."""
        return self._load()

    # Networks

    @torch.inference_mode()
    def _check_text(self) -> None:
        config, encode = self.models.transformer.config, self.models.text.encode
        both = encode(self._prompts)
        rows, length, width = both.shape if both.ndim == 3 else (0, 0, 0)
        require("text", rows == 2, f"two prompts have the shape {tuple(both.shape)}, not [2, L, text_dim]")
        require("text", 0 < length <= config.text_len, f"L is {length}, not in 1..{config.text_len}")
        require("text", width == config.text_dim, f"width is {width}, not text_dim {config.text_dim}")
        require("text", both.is_floating_point(), f"embeddings are {both.dtype}")
        require("text", both.device == self._device, f"embeddings are on {both.device}, not {self._device}")
        require("text", bool(both.isfinite().all()), "an embedding is not finite")
        for prompt, row in zip(self._prompts, both, strict=True):
            alone = encode([prompt])[0]
            shared = min(len(alone), len(row))
            off = largest(alone[:shared] - row[:shared])
            limit = TEXT_TOLERANCE * max(1.0, largest(row))
            require("text", off <= limit, f"a prompt alone differs by {off:.2e} from one beside another")
            rest = max(largest(alone[shared:]), largest(row[shared:]))
            require("text", rest == 0, "what pads a shorter prompt is not zero")

    @torch.inference_mode()
    def _check_decoder(self) -> None:
        config, decoder = self.models.transformer.config, self.models.decoder
        latents = torch.randn(2, *config.latent_shape, generator=torch.Generator().manual_seed(1))
        latents = latents.to(self._device)
        first, caches = decoder.decode(latents, None)
        self._frames("decoder", first, 2, config.pixel_frames(0))
        require("decoder", len(caches) == 2, f"two sessions have {len(caches)} caches")
        used = [sum(part.nbytes for part in cache.values()) for cache in caches]
        size = f"a cache has {max(used)} bytes, more than cache_bytes {decoder.cache_bytes}"
        require("decoder", max(used) <= decoder.cache_bytes, size)
        memory = [{part.untyped_storage().data_ptr() for part in cache.values()} for cache in caches]
        require("decoder", not memory[0] & memory[1], "caches of two sessions share memory")
        before = [{name: part.clone() for name, part in cache.items()} for cache in caches]
        second, _ = decoder.decode(latents, caches)
        self._frames("decoder", second, 2, config.pixel_frames(1))
        kept = all(
            torch.equal(part, was[name])
            for cache, was in zip(caches, before, strict=True)
            for name, part in cache.items()
        )
        require("decoder", kept, "decode changes the caches that it is given")
        for row in range(2):
            alone, cache = decoder.decode(latents[row : row + 1], None)
            more, _ = decoder.decode(latents[row : row + 1], cache)
            off = max(largest_level(alone[0], first[row]), largest_level(more[0], second[row]))
            require("decoder", off <= LEVELS, f"a session alone differs by {off} levels from one beside it")

    def _check_weights(self) -> None:
        require("weights", bool(self.models.weights), "Models.weights is empty")
        again = self._load()
        equal = again.weights == self.models.weights
        require("weights", equal, f"two loads have the digests {self.models.weights} and {again.weights}")

    def _check_memory(self) -> None:
        models = self.models
        own = sum(each.nbytes for each in models.transformer.parameters())
        require("memory", models.weight_bytes >= own, "weight_bytes is less than the transformer's weights")
        for name, value in (
            ("text.workspace_bytes", models.text.workspace_bytes),
            ("decoder.workspace_bytes", models.decoder.workspace_bytes),
            ("decoder.cache_bytes", models.decoder.cache_bytes),
        ):
            require("memory", value >= 0, f"{name} is {value}")
        budget = plan(models, 0)
        fits = plan(models, budget.expected_bytes(3)).sessions()
        require("memory", fits == 3, f"the memory of three sessions holds {fits}")

    # Sessions in an engine

    def _check_seeds(self) -> None:
        first, again = (self._played(7) for _ in range(2))
        require("seeds", same_chunks(first, again), "two runs of one seed and prompt differ")
        for index, chunk in enumerate(first):
            self._frames("seeds", chunk.frames[None], 1, self.models.transformer.config.pixel_frames(index))
        other = self._played(8)
        require("seeds", not same_chunks(first, other), "two seeds have the same video")

    def _check_prompts(self) -> None:
        stayed = self._played(7)
        engine = self._engine()
        engine.admit(self._spec(7), time.monotonic())
        before = chunks(engine, 1)
        engine.control(SESSION, Control(1, prompt=self._prompts[1]))
        applied: list[ControlApplied] = []
        after = chunks(engine, self._count - 1, applied)
        require("prompts", bool(applied), "no chunk showed the second prompt")
        made = [*before, *after]
        switch = applied[-1].chunk
        require("prompts", same_chunks(made[:switch], stayed[:switch]), "a prompt changed a chunk before it")
        differs = not same_chunks(made[switch:], stayed[switch:])
        require("prompts", differs, "the second prompt changed nothing")

    def _check_controls(self) -> None:
        check_controls(
            self.models, self._load().controls, self._prompts, self._engine, self._spec(7), self._count
        )

    def _check_window(self) -> None:
        config = self.models.transformer.config
        count = config.window_frames // config.frames_per_chunk + 2
        if config.session_frames is not None:
            count = min(count, config.session_frames // config.frames_per_chunk)
        engine = self._engine()
        engine.admit(self._spec(7), time.monotonic())
        made = chunks(engine, count)
        finite = all(bool(chunk.latents.isfinite().all()) for chunk in made)
        require("window", finite, "latents beyond the window are not finite")

    def _check_suspension(self) -> None:
        stayed = self._played(7)
        engine = self._engine(host=True)
        engine.admit(self._spec(7), time.monotonic())
        before = chunks(engine, 1)
        engine.suspend(SESSION)
        events = until(engine, Suspended)
        before += [event for event in events if isinstance(event, ChunkReady)]
        engine.resume(SESSION, time.monotonic())
        after = chunks(engine, self._count - len(before))
        same = same_chunks([*before, *after], stayed)
        require("suspension", same, "a session that was suspended continues with another video")

    def _check_migration(self) -> None:
        stayed = self._played(7)
        source, target = self._engine(), self._engine()
        source.admit(self._spec(7), time.monotonic())
        before = chunks(source, 1)
        before += migrate(source, target)
        after = chunks(target, self._count - len(before))
        same = same_chunks([*before, *after], stayed)
        require("migration", same, "a session that was migrated continues with another video")

    # Helpers

    @property
    def _count(self) -> int:
        """Chunks of the sessions that are compared: fewer where the model's sessions are shorter."""
        config = self.models.transformer.config
        frames = config.session_frames
        return CHUNKS if frames is None else min(CHUNKS, frames // config.frames_per_chunk)

    @property
    def _device(self) -> torch.device:
        return self.models.transformer.patch_embedding.weight.device

    def _engine(self, *, host: bool = False) -> Engine:
        models = self.models
        slab = SlabLayout.of(models.transformer.config, models.transformer.patch_embedding.weight.dtype)
        host_bytes = 2 * slab.total_bytes + (64 << 20) + models.decoder.cache_bytes if host else 0
        options = EngineOptions(
            slab_bytes=slab.total_bytes, host_bytes=host_bytes, max_lead_s=float("inf"), max_batch=1
        )
        return Engine(models, options)

    def _spec(self, seed: int) -> SessionSpec:
        return SessionSpec(SESSION, self._prompts[0], seed)

    def _played(self, seed: int) -> list[ChunkReady]:
        """The first chunks of a session that nothing disturbs."""
        engine = self._engine()
        engine.admit(self._spec(seed), time.monotonic())
        return chunks(engine, self._count)

    def _frames(self, check: str, frames: Tensor, rows: int, count: int) -> None:
        config = self.models.transformer.config
        size = config.pixels_per_latent
        wanted = (rows, count, config.latent_height * size, config.latent_width * size, 3)
        require(check, tuple(frames.shape) == wanted, f"frames are {tuple(frames.shape)}, not {wanted}")
        require(check, frames.dtype is torch.uint8, f"frames are {frames.dtype}, not uint8")
