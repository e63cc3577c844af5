"""The text encoder: its input, and equal results of the shipped one for different words."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from turboserve.experiments.toyworld.judge import judge
from turboserve.experiments.toyworld.quality import Job, generate
from turboserve.experiments.toyworld.world import Scene
from turboserve.worker.model.toy_prompt import MAX_WORDS, split_words
from turboserve.worker.model.toy_steering import DIRECTIONS
from turboserve.worker.model.toy_text import BUCKETS, SUMMARY, ToyText
from turboserve.worker.model.toyworld import read_toyworld
from turboserve.worker.replicas.toyworld import load_toyworld


def test_words_without_case_and_punctuation() -> None:
    assert split_words("A RED circle -- moving: left!") == ["a", "red", "circle", "moving", "left"]
    assert split_words("red,blue") == ["red", ",", "blue"]
    assert len(split_words("red " * 500)) == MAX_WORDS


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        # Regression: the encoder read a white background without a figure, and the screen turned white.
        ("a white square moving in circles", "a yellow square moving in circles"),
        ("a box in gray on navy", "a box in purple on navy"),
        ("a dark blue ball and a navy triangle", "a blue ball and a blue triangle"),
        # A shape without a color was no figure, and the screen stayed black.
        ("a triangle and a box on white", "a blue triangle and a blue box on white"),
        # What training had stays as it is.
        ("a red square on a white background", "a red square on a white background"),
        ("on navy blue , a ball in red", "on navy blue , a ball in red"),
        ("a red ball over dark blue", "a red ball over dark blue"),
        ("in white", "in white"),
        # Synonyms
        ("a crimson balloon rising", "a red ball moving up"),
        ("golden cube, whirling", "yellow box , circling"),
        # Scenes
        ("a red ball over the sea", "a red ball over navy"),
        ("a red ball in the snow", "a red ball on white"),
        ("a red ball at night", "a red ball on black"),
        ("a starry night sky with a red ball", "on black with a red ball"),
        ("misty mountains: a teal tent sinking", "on gray a cyan triangle moving down"),
        ("a snow ball", "on white blue ball"),
    ],
)
def test_figures_get_colors_that_figures_have(prompt: str, read: str) -> None:
    assert split_words(prompt) == read.split()


@pytest.mark.parametrize(
    ("prompt", "figure"),
    [
        ("a white square moving in circles", ("square", "yellow", "circling")),
        ("a triangle moving up", ("triangle", "blue", "up")),
    ],
)
def test_the_picture_has_the_figure_on_black(prompt: str, figure: tuple[str, str, str]) -> None:
    played = generate(load_toyworld(), [Job(Scene(()), prompt, 7)], 3)
    verdict = judge(np.concatenate(played[0].chunks[1:]))
    assert verdict.background == "black"
    assert [(seen.shape, seen.colour, seen.motion) for seen in verdict.figures] == [figure]


def test_unknown_words_share_buckets_and_known_ones_do_not() -> None:
    text = ToyText(["red", "blue"])
    known, unknown = text.tokenize(["red blue", "zebra qwerty"])
    assert known.min() > BUCKETS
    assert ((unknown >= 1) & (unknown <= BUCKETS)).all()


@pytest.mark.parametrize("prompt", ["", "!!!", "汉字 кириллица", "red " * 400])
def test_any_string_can_be_encoded(prompt: str) -> None:
    made = ToyText(["red"]).encode([prompt, "red"])
    assert made.shape == (2, len(SUMMARY), 128)
    assert torch.isfinite(made).all()


def test_a_prompt_means_the_same_in_any_company() -> None:
    text = ToyText(["red", "blue"]).eval()
    alone = text.encode(["red"])
    together = text.encode(["red", "blue and something that is much longer"])
    assert torch.allclose(alone[0], together[0], atol=1e-5)


def test_the_shipped_encoder_hears_the_same_in_different_words() -> None:
    text = read_toyworld().text
    said = [
        "a red circle moving left",
        "A RED CIRCLE MOVING LEFT!",
        "please show a red ball that drifts to the left on a black background",
        "blorp a red circle moving left",
    ]
    other = ["a blue circle moving left", "a red square moving left", "a red circle moving right"]
    same = text.encode(said)
    near = (same[0] - same[1:]).square().mean((1, 2))
    far = (same[0] - text.encode(other)).square().mean((1, 2))
    assert near.max() < 0.5 * far.min()


def test_steering_replaces_the_motion_of_the_first_figure_alone() -> None:
    text = read_toyworld().text
    plain = text.encode(["a red circle moving left and a blue square moving up"])
    kept = plain.clone()
    steered = [text.steered(plain, direction) for direction in DIRECTIONS]
    assert torch.equal(plain, kept)
    others = [i for i in range(len(SUMMARY)) if i != SUMMARY.index("motion1")]
    for each in steered:
        assert torch.equal(each[:, others], plain[:, others])
    tokens = torch.stack([each[0, SUMMARY.index("motion1")] for each in steered])
    assert torch.cdist(tokens, tokens).fill_diagonal_(float("inf")).min() > 1.0
    with pytest.raises(ValueError, match="steer: 'north' is not one of up, "):
        text.steered(plain, "north")
