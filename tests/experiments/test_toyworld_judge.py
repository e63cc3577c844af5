"""The judge against the renderer: right about every kind of clip, also a blurred one, and strict."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from turboserve.experiments.toyworld import scenery, world
from turboserve.experiments.toyworld.judge import judge
from turboserve.experiments.toyworld.world import Figure, Scene, random_scene, single_scenes
from turboserve.worker.model.toy_steering import DIRECTIONS

Clip = NDArray[np.uint8]


def starting(scene: Scene, seed: int) -> tuple[world.Body, ...]:
    """Return bodies at a random place of the torus."""
    rng = random.Random(seed)
    right, down = rng.random() * 64, rng.random() * 64
    return tuple(world.Body((b.x + right) % 64, (b.y + down) % 64, b.phase) for b in world.start(scene))


def clip(scene: Scene, seed: int, frames: range = range(1, 13)) -> Clip:
    bodies = starting(scene, seed)
    return world.render(scene, world.centres(scene, bodies, frames)).numpy()


def in_scenery(scene: Scene, seed: int, frames: range = range(1, 13)) -> Clip:
    """Draw as the shipped decoder does: larger, shaded, and before a landscape."""
    places = world.centres(scene, starting(scene, seed), frames)
    drawn = scenery.draw_batch([scene], places[None], scenery.landscapes())
    return world.to_uint8(drawn)[0].numpy()


def as_spoiled(spoil: str, scene: Scene, seed: int, frames: range = range(1, 13)) -> Clip:
    if spoil == "scenery":
        return in_scenery(scene, seed, frames)
    plain = clip(scene, seed, frames)
    return blurred(plain, seed) if spoil == "blurred" else plain


def blurred(frames: Clip, seed: int) -> Clip:
    """Blur as a low bit rate does: softer edges, half the color resolution, some noise."""
    x = torch.from_numpy(frames).float().movedim(-1, 1)
    soft = F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="circular"), 3, 1) * 0.5 + x * 0.5
    luma = soft.mean(1, keepdim=True)
    chroma = F.interpolate(F.avg_pool2d(soft - luma, 2), scale_factor=2, mode="bilinear")
    noise = 6 * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    return (luma + chroma + noise).movedim(1, -1).round().clamp(0, 255).to(torch.uint8).numpy()


def right(frames: Clip, scene: Scene) -> bool:
    seen = judge(frames)
    return seen.background == scene.background and seen.shapes_match(scene) and seen.motions_match(scene)


EVERY = pytest.mark.parametrize("every", [16, pytest.param(1, marks=pytest.mark.soak)])
"""Every sixteenth clip, and in `make soak` all of them."""
SPOIL = pytest.mark.parametrize("spoil", ["clean", "blurred", "scenery"])


@SPOIL
@EVERY
def test_single_scenes(spoil: str, every: int) -> None:
    scenes = random.Random(1).sample(found := list(single_scenes()), len(found) // every)
    wrong = []
    for seed, scene in enumerate(scenes):
        if not right(as_spoiled(spoil, scene, seed), scene):
            wrong.append(scene)
    assert len(wrong) <= 0.01 * len(scenes), wrong


@SPOIL
@EVERY
def test_two_figures(spoil: str, every: int) -> None:
    rng = random.Random(3)
    scenes = [random_scene(rng, 1.0, None) for _ in range(400 // every)]
    wrong = []
    for seed, scene in enumerate(scenes):
        frames = range(-8, 1) if seed % 2 else range(1, 13)
        if not right(as_spoiled(spoil, scene, seed, frames), scene):
            wrong.append(scene)
    assert len(wrong) <= 0.01 * len(scenes), wrong


@EVERY
def test_a_wrong_prompt_never_passes(every: int) -> None:
    rng = random.Random(4)
    for seed in range(200 // every):
        shown = random_scene(rng, 0.5, None)
        asked = random_scene(rng, 0.5, None)
        if {(f.shape, f.colour, f.motion) for f in shown.figures} == {
            (f.shape, f.colour, f.motion) for f in asked.figures
        } and shown.background == asked.background:
            continue
        assert not right(clip(shown, seed), asked), (shown, asked)


def test_one_wrong_attribute_is_noticed() -> None:
    shown = Scene((Figure("circle", "red", "left"),), "white")
    seen = judge(clip(shown, 0))
    assert not seen.shapes_match(Scene((Figure("square", "red", "left"),), "white"))
    assert not seen.colours_match(Scene((Figure("circle", "pink", "left"),), "white"))
    assert not seen.motions_match(Scene((Figure("circle", "red", "circling"),), "white"))
    assert not seen.colours_match(Scene((*shown.figures, Figure("square", "blue", "up")), "white"))
    assert seen.background != "black"


def test_blends_noise_and_nothing_are_no_figures() -> None:
    empty = np.zeros((12, 64, 64, 3), dtype=np.uint8)
    assert judge(empty).figures == ()
    for behind in scenery.landscapes():
        assert judge(world.to_uint8(behind).expand(12, -1, -1, -1).numpy()).figures == ()
    noise = np.random.default_rng(0).integers(0, 256, (12, 64, 64, 3), dtype=np.uint8)
    assert all(seen.shape is None or seen.motion is None for seen in judge(noise).figures)
    # A mean over all starts: the output of a model that has learned nothing.
    scene = Scene((Figure("circle", "red", "left"),))
    mean = np.mean([clip(scene, seed).astype(np.float64) for seed in range(64)], axis=0).astype(np.uint8)
    assert not right(mean, scene)


def test_a_shape_that_jumps_has_no_motion() -> None:
    frames = clip(Scene((Figure("circle", "red", "left"),)), 0)
    shuffled = frames[np.random.default_rng(1).permutation(len(frames))]
    assert judge(shuffled).figures[0].motion is None


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("spoil", ["", "blurred", "scenery"])
def test_directions_of_steering_in_eight_frames(direction: str, spoil: str) -> None:
    scene = world.steer(Scene((Figure("triangle", "green", "up"),), "gray"), direction)
    assert right(as_spoiled(spoil, scene, 3, range(1, 9)), scene)
