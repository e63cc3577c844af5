"""How often rollouts show what was asked for, judged from the decoder's pixels, during and after training.

Sessions of held-out scenes play in step. All accuracies are shares of sessions, in 0..1.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from plans import Condition, say
from rollout import Sampler, Sessions
from torch import Tensor

from turboserve.experiments.toyworld import world
from turboserve.experiments.toyworld.judge import Verdict, has_colours, judge
from turboserve.experiments.toyworld.prompts import phrase
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.toy_steering import DIRECTIONS
from turboserve.worker.model.toy_text import ToyText
from turboserve.worker.model.toy_vae import ToyVae
from turboserve.worker.model.transformer import CausalWanTransformer

Clip = NDArray[np.uint8]
Task = tuple[Clip, tuple[str, ...] | None]
Result = Verdict | bool
BEFORE = 9
"""Latent frames before the first change."""


def examine(task: Task) -> Result:
    """Judge a clip; with colors, return whether the clip's figures have exactly these."""
    clip, colours = task
    return judge(clip) if colours is None else has_colours(clip, colours)


Mapper = Callable[[Callable[[Task], Result], Sequence[Task]], Sequence[Result]]


@dataclass(frozen=True)
class Trials:
    """Networks to try, and `mapper`, which applies a function to many tasks, perhaps in processes."""

    model: CausalWanTransformer
    vae: ToyVae
    text: ToyText
    mapper: Mapper

    def config(self, one: bool) -> ModelConfig:
        """Return the configuration for chunks of one latent frame, or of three."""
        config = self.model.config
        return dataclasses.replace(config, frames_per_chunk=1, sink_size=1) if one else config

    def embed(self, prompts: Sequence[str], directions: Sequence[str | None]) -> Tensor:
        """Return the embeddings of conditions."""
        plain = self.text.encode(list(prompts)).clone()
        rows = [
            row if direction is None else self.text.steered(row, direction)
            for row, direction in zip(plain, directions, strict=True)
        ]
        return torch.stack(rows)

    def steering(self, one: bool, count: int, seed: int) -> dict[str, Any]:
        """Steer single figures thrice, at intervals of two chunks; judge the two chunks after each change."""
        rng = random.Random(seed)
        conditions, prompts, directions = [], [], []
        for _ in range(count):
            prompt = world.random_scene(rng, 0.0, True)
            drawn = [rng.choice(DIRECTIONS) for _ in range(3)]
            conditions.append([Condition(prompt, direction) for direction in drawn])
            directions.append(drawn)
            prompts.append(phrase(prompt, rng, rng.random() < 0.5))
        config = self.config(one)
        sampler = Sampler(self.model, config)
        sessions = sampler.open(self.embed(prompts, [None] * count), seed)
        chunk = config.frames_per_chunk
        for _ in range(BEFORE // chunk):
            sampler.step(sessions)
        for turn in range(3):
            sampler.switch(sessions, self.embed(prompts, [drawn[turn] for drawn in directions]))
            for _ in range(2):
                sampler.step(sessions)
        frames = self._decode(sessions)
        tasks, wanted = [], []
        for row in range(count):
            for turn in range(3):
                start = 1 + 4 * (BEFORE - 1) + turn * 8 * chunk
                tasks.append((frames[row, start : start + 8 * chunk], None))
                wanted.append(conditions[row][turn])
        verdicts = self.mapper(examine, tasks)
        right = [_moves(v, c) for v, c in zip(verdicts, wanted, strict=True)]
        looks = [
            isinstance(v, Verdict) and v.shapes_match(c.scene) for v, c in zip(verdicts, wanted, strict=True)
        ]
        by_direction = {
            name: _mean([r for r, c in zip(right, wanted, strict=True) if c.direction == name])
            for name in DIRECTIONS
        }
        return {
            "right": _mean(right),
            "shape": _mean(looks),
            "draws": len(right),
            "by_direction": by_direction,
        }

    def prompts(self, one: bool, count: int, seed: int) -> dict[str, Any]:
        """Play held-out prompts, switch to others, and judge both, as `turboserve bench toyworld` does."""
        rng = random.Random(seed)
        pairs: list[tuple[world.Scene, world.Scene]] = []
        while len(pairs) < count:
            first, second = (world.random_scene(rng, 0.5, True) for _ in range(2))
            if not {f.colour for f in first.figures} & {f.colour for f in second.figures}:
                pairs.append((first, second))
        said = [[phrase(scene, rng, rng.random() < 0.5) for scene in pair] for pair in pairs]
        config = self.config(one)
        sampler = Sampler(self.model, config)
        sessions = sampler.open(self.embed([s[0] for s in said], [None] * count), seed)
        for half in range(2):
            for _ in range(BEFORE // config.frames_per_chunk):
                sampler.step(sessions)
            if not half:
                sampler.switch(sessions, self.embed([s[1] for s in said], [None] * count))
        frames = self._decode(sessions)
        boundary = 1 + 4 * (BEFORE - 1)
        before = self.mapper(examine, [(clip[9:boundary], None) for clip in frames])
        after = self.mapper(examine, [(clip[boundary + 12 :], None) for clip in frames])
        switched = self.mapper(
            examine,
            [
                (
                    clip[boundary + 12 * part : boundary + 12 * part + 12],
                    tuple(f.colour for f in second.figures),
                )
                for clip, (_, second) in zip(frames, pairs, strict=True)
                for part in range(2)
            ],
        )
        return {
            "before": _accuracies(before, [pair[0] for pair in pairs]),
            "after": _accuracies(after, [pair[1] for pair in pairs]),
            "switch": _mean([bool(a or b) for a, b in zip(switched[::2], switched[1::2], strict=True)]),
        }

    def long(self, one: bool, count: int, chunks: int, seed: int) -> dict[str, float]:
        """Judge the last 24 frames of long sessions, half of which are steered in the beginning."""
        rng = random.Random(seed)
        conditions = [
            Condition(world.random_scene(rng, 0.5, True), rng.choice(DIRECTIONS) if row % 2 else None)
            for row in range(count)
        ]
        prompts = [say(condition.prompt, rng) for condition in conditions]
        sampler = Sampler(self.model, self.config(one))
        sessions = sampler.open(self.embed(prompts, [c.direction for c in conditions]), seed)
        for _ in range(chunks):
            sampler.step(sessions)
        frames = self._decode(sessions, 8)
        verdicts = self.mapper(examine, [(clip[-24:], None) for clip in frames])
        return _accuracies(verdicts, [condition.scene for condition in conditions])

    @torch.no_grad()
    def _decode(self, sessions: Sessions, newest: int | None = None) -> Clip:
        latents = torch.cat(sessions.latents, 1)[:, -(newest or 0) :]
        clips = [self.vae.decode(part)[0] for part in latents.split(16)]
        return world.to_uint8(torch.cat(clips)).cpu().numpy()


def run_trials(trials: Trials, sessions: int, long_chunks: int, out: Path) -> None:
    """Print the results of all trials and write them after each one."""
    found: dict[str, Any] = {}
    kinds = {"three": False, "one": True}
    for name, one in kinds.items():
        found[f"steering_{name}"] = trials.steering(one, max(2, sessions // 2), 11)
        found[f"prompts_{name}"] = trials.prompts(one, sessions, 12)
        for part in (f"steering_{name}", f"prompts_{name}"):
            print(part, json.dumps(found[part]), flush=True)
        out.write_text(json.dumps(found, indent=1))
    for name, one in kinds.items():
        chunks = long_chunks * (2 if one else 1)
        found[f"long_{name}"] = trials.long(one, max(2, sessions // 4), chunks, 13)
        print(f"long_{name} {chunks} chunks", json.dumps(found[f"long_{name}"]), flush=True)
        out.write_text(json.dumps(found, indent=1))


def _moves(verdict: Result, condition: Condition) -> bool:
    figure = condition.scene.figures[0]
    seen = verdict.figures if isinstance(verdict, Verdict) else ()
    return any(s.colour == figure.colour and s.motion == figure.motion for s in seen)


def _accuracies(verdicts: Sequence[Result], scenes: Sequence[world.Scene]) -> dict[str, float]:
    pairs = [(v, s) for v, s in zip(verdicts, scenes, strict=True) if isinstance(v, Verdict)]
    return {
        "colour": _mean([v.colours_match(s) for v, s in pairs]),
        "motion": _mean([v.motions_match(s) for v, s in pairs]),
        "shape": _mean([v.shapes_match(s) for v, s in pairs]),
        "background": _mean([v.background == s.background for v, s in pairs]),
    }


def _mean(hits: Sequence[bool]) -> float:
    return round(sum(hits) / len(hits), 4) if hits else 0.0
