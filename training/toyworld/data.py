"""Encoded clips for the transformer: a pool that is refreshed during training."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from turboserve.experiments.toyworld import world
from turboserve.experiments.toyworld.world import Scene, held_out, random_scene
from turboserve.worker.model.toy_vae import TIME_STRIDE, ToyVae

MAIN_CHUNKS = 4
_FIRST_GROUPS = range(-8, 1)
_GROUP_FRAMES = range(1, 1 + MAIN_CHUNKS * world.CHUNK_FRAMES)


@dataclass
class Clip:
    """The sink chunk [3, 16, 8, 8] under its prompt, and four chunks [12, 16, 8, 8] from chunk m on.

    If `starts`, m is 0 and the first of the four is the sink. If the prompt `switched` at chunk m, that chunk
    shows the scene before `scene`; the others show `scene`. If `fixed`, the positions have a meaning, because
    the video starts or restarts there, and the clip is not rolled.
    """

    sink_scene: Scene
    scene: Scene
    starts: bool
    switched: bool
    fixed: bool
    sink: Tensor
    main: Tensor


def other_scene(old: Scene, rng: random.Random, pair: float) -> Scene:
    """Draw a scene to switch to: unrelated, or with one attribute changed."""
    if rng.random() < 0.65:
        return random_scene(rng, pair)
    while True:
        fresh = random_scene(rng, 1.0 if len(old.figures) == 2 else 0.0, None)
        kind = rng.choice(("colour", "motion", "shape", "background"))
        if kind == "background":
            new = Scene(old.figures, fresh.background)
        else:
            which = rng.randrange(len(old.figures))
            figures = list(old.figures)
            figures[which] = replace(figures[which], **{kind: getattr(fresh.figures[which], kind)})
            new = Scene(tuple(figures), old.background)
        distinct = len({figure.colour for figure in new.figures}) == len(new.figures)
        if distinct and new != old and random_scene_allowed(new):
            return new


def random_scene_allowed(scene: Scene) -> bool:
    """Return False for the scenes kept for the benchmark."""
    return not held_out(scene)


def _history(scene: Scene, rng: random.Random) -> tuple[world.Body, ...]:
    """Return the bodies of a session that plays `scene` for a while, possibly after other prompts."""
    before, bodies = scene, world.start(scene)
    if rng.random() < 0.4:
        before = random_scene(rng, 0.5, None)
        bodies = world.start(before)
        bodies = world.advance(before, bodies, world.CHUNK_FRAMES * rng.randrange(8))
        bodies = world.switch(before, scene, bodies)
    return world.advance(scene, bodies, world.CHUNK_FRAMES * rng.choice((0, 1, 1, 2, 3, rng.randrange(8))))


def draw_clip(vae: ToyVae, rng: random.Random, pair: float) -> Clip:
    """Render and encode one clip."""
    starts = rng.random() < 0.25
    switches = rng.random() < 0.75
    old = random_scene(rng, pair)
    if not any(figure.motion == "circling" for figure in old.figures) and rng.random() < 0.25:
        # Circling is one motion of six, and harder than the others.
        old = random_scene(rng, pair)
    new = other_scene(old, rng, pair) if switches else old
    sink_scene = old if starts or rng.random() < 0.6 else random_scene(rng, pair)
    sink_bodies = world.start(sink_scene)
    first = world.render_batch([sink_scene], _places(sink_scene, sink_bodies, _FIRST_GROUPS)[None])
    with torch.no_grad():
        sink = vae.encode(first)[0]
        if starts:
            after = world.switch(old, new, sink_bodies)
            frames = range(1, 1 + (MAIN_CHUNKS - 1) * world.CHUNK_FRAMES)
            moving = world.render_batch([new], _places(new, after, frames)[None])
        else:
            bodies = _history(old, rng)
            moving = world.render_batch([old], _places(old, bodies, range(1, 1 + world.CHUNK_FRAMES))[None])
            after = world.switch(old, new, world.advance(old, bodies, world.CHUNK_FRAMES))
            frames = range(1, 1 + (MAIN_CHUNKS - 1) * world.CHUNK_FRAMES)
            later = world.render_batch([new], _places(new, after, frames)[None])
            moving = torch.cat((moving, later), 1)
        main = vae.encode_groups(moving.unflatten(1, (-1, TIME_STRIDE)))[0]
        if starts:
            main = torch.cat((sink, main))
    fixed = starts or (switches and world.restarts(old, new))
    return Clip(sink_scene, new, starts, switches, fixed, sink.half(), main.half())


def _places(scene: Scene, bodies: tuple[world.Body, ...], frames: range) -> Tensor:
    return world.centres(scene, bodies, frames)


class ClipPool:
    """Clips to draw from.

    Rolling latents over the torus by whole cells gives further true clips at no cost.
    """

    def __init__(self, vae: ToyVae, rng: random.Random, size: int, pair: float) -> None:
        self._vae, self._rng, self.pair = vae, rng, pair
        self._clips = [draw_clip(vae, rng, pair) for _ in range(size)]
        self._oldest = 0

    def refresh(self, count: int) -> None:
        """Replace the oldest `count` clips."""
        for _ in range(count):
            self._clips[self._oldest] = draw_clip(self._vae, self._rng, self.pair)
            self._oldest = (self._oldest + 1) % len(self._clips)

    def batch(self, count: int) -> tuple[list[Clip], Tensor, Tensor]:
        """Draw a batch of `count` clips, with latents rolled.

        Returns the clips, their sinks [count, 3, 16, 8, 8] and main chunks [count, 12, 16, 8, 8]. Sinks are
        not rolled.
        """
        clips = self._rng.sample(self._clips, count)
        sinks, mains = [], []
        for clip in clips:
            shift = (0, 0) if clip.fixed else tuple(self._rng.randrange(8) for _ in range(2))
            sinks.append(clip.sink)
            mains.append(clip.main.roll(shift, (2, 3)))
        return clips, torch.stack(sinks).float(), torch.stack(mains).float()
