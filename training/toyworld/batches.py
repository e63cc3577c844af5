"""Batches for training the transformer of toyworld, and their losses."""

from __future__ import annotations

import random

import torch
from memory import CHUNK, TrainingMemory
from torch import Tensor

from data import Clip, ClipPool
from turboserve.experiments.toyworld import world
from turboserve.experiments.toyworld.prompts import describe, phrase
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.schedule import Schedule
from turboserve.worker.model.toy_text import ToyText
from turboserve.worker.model.transformer import CausalWanTransformer

CONTEXT_NOISE = 0.2
AT_THE_STEPS = 0.85
STEP_SHARES = torch.tensor([0.3, 0.2, 0.2, 0.3])
"""Shares of the four steps' noise levels."""
WINDOW_MODE = 1.0
FARTHEST_CHUNK = 336
PAIRS_EARLY, PAIRS_LATE, EARLY = 0.25, 0.55, 0.1
"""Share of scenes with two figures before and after a part of the run, and the length of that part."""


class Batches:
    """Converts clips to the transformer's inputs and targets."""

    def __init__(self, pool: ClipPool, text: ToyText, config: ModelConfig, rng: random.Random) -> None:
        self._pool, self._text, self._rng = pool, text, rng
        self._schedule = Schedule(config)
        self._steps = torch.tensor(self._schedule.step_sigmas)

    def draw(self, count: int) -> dict[str, Tensor]:
        """Draw a batch of `count` clips.

        Returns latents, timesteps, frame_index, flow and sigma (of the four noisy chunks), m, the sink's
        shift, whether it is recached, and text.
        """
        clips, sinks, mains = self._pool.batch(count)
        chunks = mains.unflatten(1, (4, CHUNK))
        clean = torch.cat((sinks[:, None], chunks[:, :3]), 1)
        clean = clean + CONTEXT_NOISE * torch.rand(count, 4, 1, 1, 1, 1) * torch.randn_like(clean)
        target = torch.cat((sinks[:, None], chunks[:, 1:]), 1)
        sigma = self._sigmas(count)
        wide = sigma[:, :, None, None, None, None]
        noise = torch.randn_like(target)
        noisy = (1 - wide) * target + wide * noise
        flow = (noisy - target) / wide
        latents = torch.cat((clean[:, :1], noisy[:, :1], clean[:, 1:], noisy[:, 1:]), 1).flatten(1, 2)
        times = (
            torch.cat((torch.zeros(count, 1), sigma[:, :1], torch.zeros(count, 3), sigma[:, 1:]), 1) * 1000
        )
        m, index, shift = self._positions(clips)
        return {
            "latents": latents,
            "timesteps": times.repeat_interleave(CHUNK, 1),
            "frame_index": index,
            "flow": flow,
            "sigma": sigma,
            "m": m,
            "shift": shift,
            "recached": self._recached(clips, m),
            "text": self._texts(clips),
        }

    def _sigmas(self, count: int) -> Tensor:
        fixed = self._steps[torch.multinomial(STEP_SHARES, count * 4, replacement=True)].view(count, 4)
        u = torch.rand(count, 4)
        free = self._schedule.sigmas[(u * 999).long()]
        return torch.where(torch.rand(count, 4) < AT_THE_STEPS, fixed, free)

    def _positions(self, clips: list[Clip]) -> tuple[Tensor, Tensor, Tensor]:
        rows, shifts, firsts = [], [], []
        for clip in clips:
            m = 0 if clip.starts else self._rng.choice((1, 1, 2, 3, self._rng.randrange(1, FARTHEST_CHUNK)))
            window = self._rng.random() < WINDOW_MODE
            chunks = (0, 0, m, m + 1, m + 2, m + 1, m + 2, m + 3)
            rows.append([CHUNK * chunk + i for chunk in chunks for i in range(CHUNK)])
            shifts.append([CHUNK * max(0, chunk - 2) if window else 0 for chunk in chunks[2:]])
            firsts.append(m)
        return torch.tensor(firsts), torch.tensor(rows), torch.tensor(shifts)

    def _recached(self, clips: list[Clip], m: Tensor) -> Tensor:
        """Draw whether a switch recached the sink.

        A switch recaches the window's 9 frames, with the sink if it comes by chunk 3. For later chunks it is
        unknown.
        """
        early = [clip.switched and int(chunk) <= 2 for clip, chunk in zip(clips, m, strict=True)]
        return torch.tensor([self._rng.random() < (0.9 if soon else 0.3) for soon in early])

    def _texts(self, clips: list[Clip]) -> Tensor:
        scenes = [clip.sink_scene for clip in clips] + [clip.scene for clip in clips]
        with torch.no_grad():
            return self._text(self._text.tokenize([self._say(scene) for scene in scenes]))

    def _say(self, scene: world.Scene) -> str:
        return describe(scene) if self._rng.random() < 0.25 else phrase(scene, self._rng)


def losses(model: CausalWanTransformer, batch: dict[str, Tensor]) -> Tensor:
    """Return the squared flow error per noisy chunk [B, 4]."""
    text = model.project_text(batch["text"])
    memory = TrainingMemory(model.config, text, batch["m"], batch["recached"], batch["shift"])
    flow = model(batch["latents"], batch["timesteps"], batch["frame_index"], memory)
    chunks = flow.unflatten(1, (8, CHUNK))
    made = torch.cat((chunks[:, 1:2], chunks[:, 5:]), 1)
    return (made - batch["flow"]).square().mean((2, 3, 4, 5))
