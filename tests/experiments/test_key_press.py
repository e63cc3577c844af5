"""From key to pixel: which frame is the first that answers, and what the report says of it."""

from __future__ import annotations

import io
import itertools
import json

import numpy as np
import pytest
import torch
from rich.console import Console

from turboserve.experiments.key_press.command import PARTS, report, table
from turboserve.experiments.key_press.motion import Frame, first_answer
from turboserve.experiments.key_press.page import Press, directions, read
from turboserve.experiments.toyworld import scenery, world

FPS = 16
LEFT = world.Scene((world.Figure("square", "red", "left"),), "black")
BEFORE = 8
"""Frames that move left."""


def frames(direction: str | None, skipped: int = 0, after: int = 14) -> list[Frame]:
    """Draw a figure that moves left, and from frame `BEFORE` on as steered. `skipped`: frames not shown."""
    start = world.start(LEFT)
    path = world.centres(LEFT, start, range(1, BEFORE + 1))
    turned = world.advance(LEFT, start, BEFORE + skipped)
    scene = world.steer(LEFT, direction)
    path = torch.cat((path, world.centres(scene, turned, range(1, after + 1))), dim=1)
    drawn = scenery.draw_batch([LEFT], path[None], scenery.landscapes())
    pixels = world.to_uint8(drawn)[0].numpy()
    return [Frame(10 + number / FPS, image) for number, image in enumerate(pixels)]


def press(direction: str, shown: list[Frame], pressed_s: float = 10.2) -> Press:
    marks = (pressed_s + 0.02, pressed_s + 0.1, pressed_s + 0.15, None)
    return Press(direction, pressed_s, *marks, tuple(shown))


@pytest.mark.parametrize("skipped", [0, 4, 12])
@pytest.mark.parametrize("direction", ["up", "down"])
def test_the_answer_is_the_first_frame_that_moves_as_steered(direction: str, skipped: int) -> None:
    found = first_answer(frames(direction, skipped), direction, 10.2)
    assert found == pytest.approx(10 + BEFORE / FPS)


def test_no_answer_without_the_motion() -> None:
    moving, turned = frames(None), frames("up")
    assert first_answer(moving, "up", 10.2) is None
    assert first_answer(turned, "down", 10.2) is None
    still = [Frame(frame.shown_s, moving[0].pixels) for frame in moving]
    assert first_answer(still, "up", 10.2) is None
    black = [Frame(frame.shown_s, np.zeros_like(frame.pixels)) for frame in moving]
    assert first_answer(black, "up", 10.2) is None
    assert first_answer(turned[: BEFORE + 2], "up", 10.2) is None
    # A motion from before the press is no answer to it.
    late = first_answer(turned, "up", 10.8)
    assert late is not None
    assert late >= 10.8


def test_the_report_counts_only_answered_presses() -> None:
    found = report(
        [press("up", frames("up")), press("up", frames(None)), press("down", frames("down"), 10.3)]
    )
    assert (found["presses"], found["shown"]) == (3, 2)
    assert found["key_to_pixel_s"] == {"p50": 0.25, "p90": 0.29, "p100": 0.3}
    assert found["parts_s"].keys() == PARTS.keys()
    assert found["parts_s"]["request"]["p50"] == pytest.approx(0.02)
    assert found["parts_s"]["boundary"]["p50"] == pytest.approx(0.08)
    assert found["parts_s"]["player"]["p50"] is None
    json.dumps(found, allow_nan=False)
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(table({"presses": 3, "transports": {"webrtc": found}}))
    text = console.export_text()
    assert "0.250" in text
    assert "2/3" in text


def test_a_press_that_the_page_has_not_seen_has_no_time_and_no_answer() -> None:
    seen = read("up", {"frames": [], "pressed": 10_200, "chunk": None})
    unseen = read("up", {"frames": [[10_300, ""]], "pressed": None, "chunk": None})
    assert (seen.pressed_s, unseen.pressed_s) == (10.2, None)
    found = report([press("up", frames("up")), unseen])
    assert (found["presses"], found["shown"]) == (2, 1)


def test_each_direction_is_at_a_right_angle_to_the_last() -> None:
    across = {"left", "right"}
    drawn = ["left", *directions(30, 3)]
    assert all((before in across) != (after in across) for before, after in itertools.pairwise(drawn))
    assert directions(30, 3) == drawn[1:]
