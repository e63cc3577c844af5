"""The renderer and the sentences: their guarantees to the model and to the judge."""

from __future__ import annotations

import random

import pytest
import torch

from turboserve.experiments.toyworld import world
from turboserve.experiments.toyworld.prompts import describe, phrase, vocabulary
from turboserve.experiments.toyworld.world import (
    PROMISED,
    Body,
    Figure,
    Scene,
    held_out,
    random_scene,
    single_scenes,
)
from turboserve.worker.model.toy_prompt import split_words
from turboserve.worker.model.toy_steering import DIRECTIONS, STEPS


def on_lattice(bodies: tuple[Body, ...]) -> bool:
    return all(abs(v / 8 - round(v / 8)) < 1e-6 for body in bodies for v in (body.x, body.y))


def test_shapes_stand_on_the_lattice_at_every_boundary_whatever_the_prompts() -> None:
    rng = random.Random(0)
    for _ in range(50):
        scene = random_scene(rng, 0.5, None)
        bodies = world.start(scene)
        for _ in range(6):
            assert on_lattice(bodies), (scene, bodies)
            new = random_scene(rng, 0.5, None)
            bodies = world.advance(new, world.switch(scene, new, bodies), world.CHUNK_FRAMES)
            scene = new


def test_a_switch_goes_on_from_where_the_shape_is() -> None:
    old, new = Scene((Figure("circle", "red", "left"),)), Scene((Figure("square", "blue", "up"),), "white")
    bodies = world.switch(old, new, (Body(40.0, 8.0),))
    assert (bodies[0].x, bodies[0].y) == (40.0, 8.0)
    (x, y) = world.centres(new, bodies, [1])[0, 0].tolist()
    assert (x, y) == (40.0, 6.0)


def test_a_second_figure_begins_apart_from_the_first() -> None:
    first, second = world.start(Scene((Figure("circle", "red", "left"), Figure("square", "blue", "up"))))
    assert ((second.x - first.x) % 64, (second.y - first.y) % 64) == world.SECOND_OFFSET


def test_two_figures_keep_their_places_if_their_colours_stay() -> None:
    red, blue, green = (Figure("circle", colour, "left") for colour in ("red", "blue", "green"))
    one, two, others = Scene((red,)), Scene((red, blue)), Scene((green, blue))
    bodies = (Body(8.0, 8.0), Body(40.0, 32.0))
    for old, new in ((one, two), (two, one), (two, others)):
        assert world.restarts(old, new)
        assert world.switch(old, new, bodies[: len(old.figures)]) == world.start(new)
    turned = Scene((Figure("square", "blue", "up"), red), "white")
    assert not world.restarts(two, turned)
    assert world.switch(two, turned, bodies) == bodies[::-1]
    assert not world.restarts(one, Scene((green,)))


def test_circling_keeps_its_phase_and_comes_round() -> None:
    scene = Scene((Figure("circle", "red", "circling"),))
    bodies = (Body(40.0, 32.0, 0.5),)
    (after,) = world.advance(scene, bodies, world.PERIOD)
    assert (after.x, after.y) == pytest.approx((40.0, 32.0), abs=1e-6)
    assert world.switch(scene, scene, bodies) == bodies


@pytest.mark.parametrize("shape", world.SHAPES)
def test_shapes_are_drawn_split_over_the_edges(shape: str) -> None:
    inside, across = world.coverage(shape, torch.tensor([[32.0, 32.0], [0.0, 0.0]]))
    assert torch.allclose(across, inside.roll((-32, -32), (0, 1)))
    assert 100 < float(inside.sum()) < 200


def test_rendering_many_equals_rendering_one() -> None:
    rng = random.Random(1)
    scenes = [random_scene(rng, 0.5, None) for _ in range(8)]
    places = [world.centres(scene, world.start(scene), range(-8, 1)) for scene in scenes]
    batch = world.render_batch(
        scenes, torch.stack([p.expand(2, -1, -1) if len(p) == 1 else p for p in places])
    )
    for i, scene in enumerate(scenes):
        assert torch.equal(world.to_uint8(batch)[i], world.render(scene, places[i]))


def test_a_fifth_of_the_scenes_is_held_out_and_the_promised_are_not() -> None:
    share = sum(held_out(scene) for scene in single_scenes()) / 576
    assert 0.15 < share < 0.25
    assert not any(held_out(scene) for scene in PROMISED)
    rng = random.Random(2)
    assert all(held_out(random_scene(rng, 0.5, True)) for _ in range(50))
    assert not any(held_out(random_scene(rng, 0.5, False)) for _ in range(50))


def test_plain_sentences() -> None:
    red, blue = Figure("circle", "red", "left"), Figure("square", "blue", "up")
    assert describe(Scene((red,))) == "a red circle moving left"
    assert describe(Scene((red, blue), "white")) == (
        "a red circle moving left and a blue square moving up on white"
    )
    assert describe(Scene((Figure("triangle", "orange", "still"),))) == "an orange triangle standing still"


def test_every_word_of_every_phrasing_is_known() -> None:
    known, rng = set(vocabulary()), random.Random(3)
    for _ in range(2000):
        scene = random_scene(rng, 0.5, None)
        for text in (describe(scene), phrase(scene, rng, None)):
            assert set(split_words(text)) <= known, text


def test_steered_figures_stand_on_the_lattice_at_every_latent_frame() -> None:
    rng = random.Random(1)
    for _ in range(50):
        scene = random_scene(rng, 0.3, None)
        bodies = world.advance(scene, world.start(scene), -8)
        for _ in range(12):
            steered = world.steer(scene, rng.choice(DIRECTIONS))
            bodies = world.switch(scene, steered, bodies)
            visible = world.centres(steered, bodies, [4])[0, 0]
            bodies, scene = world.advance(steered, bodies, 4), steered
            assert on_lattice(bodies[:1]), (scene, bodies)
            assert bodies[0].slip == (0.0, 0.0)
            assert visible.tolist() == pytest.approx([bodies[0].x, bodies[0].y])


def test_a_circling_figure_slips_to_the_lattice_without_a_jump() -> None:
    circling = Scene((Figure("circle", "red", "circling"),))
    for frames in (4, 8, 16, 20):
        before = world.advance(circling, world.start(circling), frames)
        left = world.steer(circling, "left")
        after = world.switch(circling, left, before)
        here = world.centres(left, after, [0])[0, 0].tolist()
        assert here == pytest.approx([before[0].x, before[0].y])
        path = world.centres(left, after, [0, 1, 2, 3, 4])[0]
        steps = (path[1:] - path[:-1]).norm(dim=1)
        assert steps.max() < world.SPEED + 1.1


def test_steering_moves_the_first_figure_one_cell_in_each_latent_frame() -> None:
    scene = Scene((Figure("circle", "red", "circling"), Figure("square", "blue", "left")), "white")
    for name, (across, down) in STEPS.items():
        steered = world.steer(scene, name)
        bodies = world.switch(scene, steered, (Body(24.0, 24.0), Body(56.0, 40.0)))
        after = world.advance(steered, bodies, 4)
        assert (after[0].x, after[0].y) == (24.0 + 8 * across, 24.0 + 8 * down)
        assert (after[1].x, after[1].y) == (48.0, 40.0)
    assert world.steer(scene, None) is scene
