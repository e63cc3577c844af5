"""What `/v1/models` describes of a model's prompts is what the shipped model understands."""

from __future__ import annotations

import httpx

from turboserve.experiments.toyworld.world import BACKGROUNDS, COLOURS, SHAPES
from turboserve.gateway.prompt_guides import PromptGuide, read_prompt_guides
from turboserve.worker.model import toy_prompt
from turboserve.worker.model.toy_prompt import split_words
from turboserve.worker.model.toyworld import read_toyworld


def _words(guide: PromptGuide) -> set[str]:
    texts = [
        text for kind in guide.kinds for choice in kind.choices for text in (choice.text, *choice.synonyms)
    ]
    return {word for text in (*texts, *guide.other_words) for word in text.split()}


async def test_the_default_model_describes_its_prompts(api: httpx.AsyncClient) -> None:
    [model] = [each for each in (await api.get("/v1/models")).json()["models"] if each["default"]]
    assert model["prompt_limit"] == 2_000
    assert PromptGuide.model_validate(model["prompt_guide"]) == read_prompt_guides()["toyworld"]


def test_the_guide_has_every_word_of_the_shipped_weights_and_no_other() -> None:
    known = set(read_toyworld().details["vocabulary"]) - {","}
    assert _words(read_prompt_guides()["toyworld"]) == known


def test_the_kinds_are_those_of_the_trained_world() -> None:
    guide = read_prompt_guides()["toyworld"]
    kinds = {kind.kind: [choice.text for choice in kind.choices] for kind in guide.kinds}
    assert sorted(kinds["color"]) == sorted(COLOURS)
    assert sorted(kinds["shape"]) == sorted(SHAPES)
    assert sorted(kinds["background"]) == sorted(BACKGROUNDS)
    assert guide.words_limit == toy_prompt.MAX_WORDS
    assert {kind.kind: kind.default for kind in guide.kinds}["color"] == toy_prompt.DEFAULT_COLOR
    for example in guide.examples:
        assert set(split_words(example)) <= _words(guide) | {","}
