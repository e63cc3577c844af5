"""Plans of clips for training with steering and with both sizes of chunks, drawn without tensors.

A plan states what every pixel frame of a clip shows, and under which conditions. Processes draw plans, and
the device renders and encodes them by hundreds (`latents.py`). A clip has 15 groups of 4 frames, one for each
latent frame: three from the beginning of its session (the sink), then twelve in sequence.

Chunks of three latent frames: as `data.Clip`, and a change is a new prompt, a new direction or both.

Chunks of one latent frame: the twelve groups are numbered from 0, which is the session's first latent frame
if the clip `starts`. The last change comes before group `change`, and 0 is none. Earlier ones may be visible.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from data import other_scene
from turboserve.experiments.toyworld import world
from turboserve.experiments.toyworld.prompts import describe, phrase
from turboserve.experiments.toyworld.world import BACKGROUNDS, COLOURS, GROUP_FRAMES, SHAPES, Body, Scene
from turboserve.worker.model.toy_prompt import MAX_WORDS
from turboserve.worker.model.toy_steering import DIRECTIONS
from turboserve.worker.model.toy_text import ToyText

SINK_GROUPS, MAIN_GROUPS = 3, 12
GROUPS = SINK_GROUPS + MAIN_GROUPS
FRAME_WINDOW = 8
"""Frames that a chunk of one latent frame sees beside the sink, itself among them."""
_BACKGROUNDS, _SHAPES, _COLOURS = list(BACKGROUNDS), list(SHAPES), list(COLOURS)
STEERED_SHARE = 0.4
"""Share of conditions with a direction before any change."""

Attributes = tuple[int, int, int, int, int]
"""Background, then shape and color of two figures, as indices; -1 where there is no second figure."""


@dataclass(frozen=True)
class Condition:
    """What a session's controls ask for: the scene of its prompt, and perhaps a direction of steering."""

    prompt: Scene
    direction: str | None = None

    @property
    def scene(self) -> Scene:
        """The scene that is visible."""
        return world.steer(self.prompt, self.direction)


@dataclass
class Video:
    """A session's groups of frames, recorded from some boundary on."""

    condition: Condition
    bodies: tuple[Body, ...]
    attributes: list[Attributes] = field(default_factory=list)
    places: list[list[list[tuple[float, float]]]] = field(default_factory=list)

    @classmethod
    def start(cls, condition: Condition) -> Video:
        """Begin a session and record its first group, which is its first frame four times."""
        scene = condition.scene
        bodies = world.advance(scene, world.start(scene), -world.FIRST_CHUNK_FRAMES + 1)
        video = cls(condition, bodies)
        video._record([0] * GROUP_FRAMES)
        return video

    def roll(self, groups: int, record: bool = True) -> None:
        """Go on for some groups."""
        for _ in range(groups):
            if record:
                self._record(list(range(1, 1 + GROUP_FRAMES)))
            self.bodies = world.advance(self.condition.scene, self.bodies, GROUP_FRAMES)

    def change(self, condition: Condition) -> bool:
        """Apply new controls. Returns whether the video restarts from its beginning."""
        old, self.condition = self.condition.scene, condition
        self.bodies = world.switch(old, condition.scene, self.bodies)
        return world.restarts(old, condition.scene)

    def _record(self, frames: Sequence[int]) -> None:
        scene = self.condition.scene
        first, *others = scene.figures
        second = (-1, -1)
        if others:
            second = (_SHAPES.index(others[0].shape), _COLOURS.index(others[0].colour))
        own = (_SHAPES.index(first.shape), _COLOURS.index(first.colour))
        self.attributes.append((_BACKGROUNDS.index(scene.background), *own, *second))
        places = world.places(scene, self.bodies, frames)
        self.places.append([list(pair) for pair in zip(places[0], places[-1], strict=True)])


@dataclass
class Plan:
    """One clip; see the module. `first` is the condition of its sink, `last` the newest one."""

    sink: Video
    main: Video
    first: Condition
    last: Condition
    starts: bool
    change: int
    fixed: bool
    """Whether positions have a meaning, because the video starts or restarts in the clip."""


def draw_condition(rng: random.Random, pair: float, steered: float = STEERED_SHARE) -> Condition:
    """Draw a condition whose scene is not kept for the benchmark."""
    while True:
        direction = rng.choice(DIRECTIONS) if rng.random() < steered else None
        condition = Condition(world.random_scene(rng, pair), direction)
        if not world.held_out(condition.scene):
            return condition


def changed(old: Condition, rng: random.Random, pair: float, steer: float) -> Condition:
    """Draw a change of the direction (in a share `steer` of all), or of the prompt."""
    while True:
        if rng.random() < steer:
            new = replace(old, direction=None if rng.random() < 0.12 else rng.choice(DIRECTIONS))
        else:
            kept = old.direction if rng.random() < 0.6 else None
            new = Condition(other_scene(old.prompt, rng, pair), kept)
        if new.scene != old.scene and not world.held_out(new.scene):
            return new


def _sink(old: Condition, rng: random.Random, pair: float) -> Condition:
    """Draw the condition under which the session of a clip in its midst once began."""
    if rng.random() < 0.6:
        return old if rng.random() < 0.3 else Condition(old.prompt)
    return draw_condition(rng, pair, 0.15)


def _recorded_sink(condition: Condition) -> Video:
    video = Video.start(condition)
    video.roll(SINK_GROUPS - 1)
    return video


def _in_midst(old: Condition, rng: random.Random, pair: float, unit: int, longest: int) -> Video:
    """Return a session that plays `old` for a while, possibly after other conditions; nothing recorded."""
    if rng.random() < 0.5:
        before = changed(old, rng, pair, 0.5)
        video = Video(before, world.start(before.scene))
        video.roll(unit * rng.randrange(longest), record=False)
        video.change(old)
    else:
        video = Video(old, world.start(old.scene))
    video.roll(unit * rng.choice((0, 1, 1, 2, 3, rng.randrange(longest))), record=False)
    return video


def draw_of_three(rng: random.Random) -> Plan:
    """Draw a clip for chunks of three latent frames."""
    pair, starts, switches = 0.5, rng.random() < 0.25, rng.random() < 0.75
    old = draw_condition(rng, pair)
    if not any(f.motion == "circling" for f in old.scene.figures) and rng.random() < 0.25:
        # Circling is harder than the other motions.
        old = draw_condition(rng, pair)
    new = changed(old, rng, pair, 0.45) if switches else old
    if starts:
        main, first = Video.start(old), old
        main.roll(2)
    else:
        main, first = _in_midst(old, rng, pair, 3, 8), _sink(old, rng, pair)
        main.roll(3)
    restarts = main.change(new) if switches else False
    main.roll(9)
    return Plan(_recorded_sink(first), main, first, new, starts, int(switches), starts or restarts)


def draw_of_one(rng: random.Random) -> Plan:
    """Draw a clip for chunks of one latent frame."""
    pair, starts = 0.35, rng.random() < 0.25
    old = draw_condition(rng, pair)
    if not any(f.motion == "circling" for f in old.scene.figures) and rng.random() < 0.2:
        old = draw_condition(rng, pair)
    draw = rng.random()
    change = 0 if draw < 0.27 else FRAME_WINDOW if draw < 0.7 and not starts else rng.randrange(1, 9)
    earlier = 0
    if rng.random() < 0.4:
        # Quick changes: the context shows one more turn.
        earlier = rng.randrange(1, change or FRAME_WINDOW - 1) if change != 1 else 0
    begin = changed(old, rng, pair, 0.8) if earlier else old
    new = changed(old, rng, pair, 0.7) if change else old
    if starts:
        main, first, length = Video.start(begin), begin, 1
    else:
        main, first, length = _in_midst(begin, rng, pair, 1, 24), _sink(old, rng, pair), 0
    if earlier:
        main.roll(earlier - length)
        main.change(old)
        length = earlier
    restarts = False
    if change:
        main.roll(change - length)
        restarts = main.change(new)
        length = change
    main.roll(MAIN_GROUPS - length)
    if starts and not change:
        # Without a recache, the sink was written under the condition that still holds.
        change = earlier
    return Plan(_recorded_sink(first), main, first, new, starts, change, starts or restarts)


def draw_for_decoder(rng: random.Random, groups: int) -> Video:
    """Draw a short video from any place of the lattice, with changes, for the decoder."""
    pair = 0.5
    prompt = world.random_scene(rng, pair, None)
    old = Condition(prompt, rng.choice(DIRECTIONS) if rng.random() < 0.5 else None)
    bodies = tuple(
        Body(8.0 * rng.randrange(8), 8.0 * rng.randrange(8), rng.randrange(6) / 6) for _ in prompt.figures
    )
    video = Video(old, bodies)
    video._record([0] * GROUP_FRAMES)
    change = rng.randrange(1, groups) if rng.random() < 0.6 else 0
    if change:
        video.roll(change - 1)
        video.change(changed(old, rng, pair, 0.7))
    video.roll(groups - len(video.attributes))
    return video


def say(scene: Scene, rng: random.Random) -> str:
    """Return a sentence for a scene."""
    return describe(scene) if rng.random() < 0.25 else phrase(scene, rng)


Arrays = dict[str, NDArray[np.generic]]


def stack_videos(videos: Sequence[Video]) -> Arrays:
    """Stack equally long videos: attributes int64 [n, groups, 5], places float32 [n, groups, 4, 2, 2]."""
    return {
        "attributes": np.array([video.attributes for video in videos], dtype=np.int64),
        "places": np.array([video.places for video in videos], dtype=np.float32),
    }


def stack(plans: Sequence[Plan], text: ToyText, rng: random.Random) -> Arrays:
    """Stack plans as arrays, with words int64 [n, 2, MAX_WORDS] of the first and of the last prompt."""
    words = np.zeros((len(plans), 2, MAX_WORDS), dtype=np.int64)
    for row, plan in enumerate(plans):
        for side, condition in enumerate((plan.first, plan.last)):
            tokens = text.tokenize([say(condition.prompt, rng)])[0].numpy()
            words[row, side, : len(tokens)] = tokens
    sinks = stack_videos([plan.sink for plan in plans])
    mains = stack_videos([plan.main for plan in plans])
    steer = [
        [-1 if c.direction is None else DIRECTIONS.index(c.direction) for c in (plan.first, plan.last)]
        for plan in plans
    ]
    return {
        **{name: np.concatenate((sinks[name], mains[name]), 1) for name in sinks},
        "words": words,
        "steer": np.array(steer, dtype=np.int64),
        "starts": np.array([plan.starts for plan in plans]),
        "change": np.array([plan.change for plan in plans], dtype=np.int64),
        "fixed": np.array([plan.fixed for plan in plans]),
    }
