"""The text encoder: its input, and equal results of the shipped one for different words."""

from __future__ import annotations

import pytest
import torch

from turboserve.worker.model.toy_text import BUCKETS, MAX_WORDS, SUMMARY, ToyText, split_words
from turboserve.worker.model.toyworld import read_toyworld


def test_words_without_case_and_punctuation() -> None:
    assert split_words("A RED circle -- moving: left!") == ["a", "red", "circle", "moving", "left"]
    assert split_words("red,blue") == ["red", ",", "blue"]
    assert len(split_words("red " * 500)) == MAX_WORDS


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
