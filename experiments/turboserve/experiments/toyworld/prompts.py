"""Sentences for scenes of the toy world, in many phrasings.

An omitted part has a default: the background is black, the motion is still, the shape is a circle.
"""

from __future__ import annotations

import random
import zlib

from turboserve.experiments.toyworld.world import Figure, Scene

_SHAPES = {
    "circle": ("circle", "circle", "circle", "ball", "disc", "dot"),
    "square": ("square", "square", "square", "box", "block"),
    "triangle": ("triangle",),
}
_COLOURS = {
    "purple": ("purple", "purple", "violet"),
    "cyan": ("cyan", "cyan", "turquoise"),
    "pink": ("pink", "pink", "magenta"),
}
_BACKGROUNDS = {"gray": ("gray", "grey"), "navy": ("navy", "navy", "navy blue", "dark blue")}
_DIRECTIONS = {
    "left": ("left", "left", "to the left", "leftward", "leftwards"),
    "right": ("right", "right", "to the right", "rightward", "rightwards"),
    "up": ("up", "up", "upward", "upwards", "to the top"),
    "down": ("down", "down", "downward", "downwards", "to the bottom"),
    "circling": ("in circles", "in circles", "in a circle", "around in circles", "in a loop"),
}
_VERBS = (
    ("moving", "moves", "move"),
    ("moving", "moves", "move"),
    ("going", "goes", "go"),
    ("drifting", "drifts", "drift"),
    ("sliding", "slides", "slide"),
    ("travelling", "travels", "travel"),
    ("flying", "flies", "fly"),
    ("running", "runs", "run"),
    ("floating", "floats", "float"),
)
_CIRCLING = (
    "circling",
    "circles around",
    "orbiting",
    "going around",
    "going round and round",
    "that circles",
)
_STILL = (
    "still",
    "standing still",
    "not moving",
    "stationary",
    "at rest",
    "that stays still",
    "staying in place",
    "",
)
_BEHIND = (
    "on {}",
    "on {}",
    "on a {} background",
    "over {}",
    "in front of {}",
    "against a {} background",
    "with a {} background",
    ", {} background",
)
_FIRST = ("on a {} background, ", "on {}: ", "{} background, ", "on {}, ")
_JOIN = (" and ", " and ", ", ", ", and ", " with ", " next to ", " together with ")
_BEFORE = (
    "please show ",
    "a video of ",
    "show me ",
    "i want to see ",
    "generate ",
    "make ",
    "draw ",
    "now ",
    "please make a video of ",
    "there is ",
    "let us see ",
)
_AFTER = (" please", ", smooth", " in high quality", ", thanks", " now", " forever")

HELD_OUT_IN = 5
"""One combination of phrasing choices in this many is never trained on."""


def describe(scene: Scene) -> str:
    """Return the plain sentence: "a red circle moving left", "… and a blue square moving up on white"."""
    motions = {"circling": "moving in circles", "still": "standing still"}
    parts = [
        f"{_article(f.colour)} {f.colour} {f.shape} {motions.get(f.motion, 'moving ' + f.motion)}"
        for f in scene.figures
    ]
    behind = "" if scene.background == "black" else f" on {scene.background}"
    return " and ".join(parts) + behind


def phrase(scene: Scene, rng: random.Random, want_held_out: bool | None = False, fillers: bool = True) -> str:
    """Return a random sentence for a scene. `want_held_out`: as in `draw.random_scene`, for phrasings."""
    while True:
        core, choices = _core(scene, rng)
        out = zlib.crc32("|".join(choices).encode()) % HELD_OUT_IN == 0
        if want_held_out is None or out == want_held_out:
            break
    if fillers and rng.random() < 0.3:
        core = rng.choice(_BEFORE) + core
    if fillers and rng.random() < 0.2:
        core += rng.choice(_AFTER)
    style = rng.random()
    if style < 0.1:
        return core.upper()
    return core.capitalize() + "." if style < 0.4 else core


def _core(scene: Scene, rng: random.Random) -> tuple[str, list[str]]:
    choices: list[str] = []

    def pick(options: tuple[str, ...]) -> str:
        chosen = rng.choice(options)
        choices.append(chosen)
        return chosen

    figures = scene.figures
    if len(figures) == 2 and figures[0].motion == figures[1].motion != "still" and rng.random() < 0.5:
        pair = " and ".join(_noun(f, rng) for f in figures)
        together = pick(_DIRECTIONS[figures[0].motion])
        text = f"{pair} {pick(tuple(v[rng.choice((0, 2))] for v in _VERBS))} {together}"
        if rng.random() < 0.3:
            text = text.replace(" and ", ", ", 1) if rng.random() < 0.3 else "both " + text
    else:
        text = (
            pick(_JOIN).join(_figure(f, rng, choices) for f in figures)
            if len(figures) == 2
            else _figure(figures[0], rng, choices)
        )
    if scene.background == "black" and rng.random() < 0.5:
        return text, choices
    name = rng.choice(_BACKGROUNDS.get(scene.background, (scene.background,)))
    if rng.random() < 0.2:
        return pick(_FIRST).format(name) + text, choices
    behind = pick(_BEHIND).format(name)
    return text + ("" if behind.startswith(",") else " ") + behind, choices


def _figure(figure: Figure, rng: random.Random, choices: list[str]) -> str:
    noun = _noun(figure, rng)
    if figure.motion == "still":
        motion = rng.choice(_STILL)
    elif figure.motion == "circling" and rng.random() < 0.4:
        motion = rng.choice(_CIRCLING)
    else:
        verb = rng.choice(_VERBS)
        form = rng.choice((verb[0], verb[0], verb[1], "that " + verb[1], "which " + verb[1], "is " + verb[0]))
        motion = f"{form} {rng.choice(_DIRECTIONS[figure.motion])}"
    choices.append(motion)
    return f"{noun} {motion}".strip()


def _noun(figure: Figure, rng: random.Random) -> str:
    shape = rng.choice(_SHAPES[figure.shape])
    colour = rng.choice(_COLOURS.get(figure.colour, (figure.colour,)))
    style = rng.random()
    if style < 0.1:
        return f"a {shape} in {colour}"
    if style < 0.3:
        return f"{colour} {shape}"
    article = "the" if style < 0.4 else "one" if style < 0.45 else _article(colour)
    return f"{article} {colour} {shape}"


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def vocabulary() -> tuple[str, ...]:
    """Return every word that `phrase` and `describe` can use, sorted."""
    from turboserve.worker.model.toy_prompt import split_words

    texts: list[str] = ["a an the one both that which is and in moving move circle"]
    for table in (_SHAPES, _COLOURS, _BACKGROUNDS, _DIRECTIONS):
        texts += [" ".join((key, *values)) for key, values in table.items()]
    texts += [" ".join(verb) for verb in _VERBS]
    for group in (_CIRCLING, _STILL, _BEHIND, _FIRST, _JOIN, _BEFORE, _AFTER):
        texts.extend(group)
    texts.append("red green blue yellow orange black white ")
    return tuple(sorted({word for text in texts for word in split_words(text)}))
