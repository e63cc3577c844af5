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


def test_the_guide_has_every_word_that_the_model_reads_and_no_other() -> None:
    known = set(read_toyworld().details["vocabulary"]) - {","}
    known |= {*toy_prompt.SYNONYMS, *toy_prompt.SCENES, *toy_prompt.WORDS_OF_SCENES}
    assert _words(read_prompt_guides()["toyworld"]) == known


def test_each_choice_and_its_synonyms_are_read_alike() -> None:
    guide = read_prompt_guides()["toyworld"]
    [scenes] = [kind.choices for kind in guide.kinds if kind.kind == "scene"]
    read = {tuple(split_words(f"over {choice.text}")) for choice in scenes}
    assert read == {("over", name) for name in BACKGROUNDS}
    for scene in scenes:
        for text in scene.synonyms:
            if text not in ("grey", "navy blue", "dark blue"):  # trained themselves
                assert split_words(f"over {text}") == split_words(f"over {scene.text}"), text


def test_the_kinds_are_those_of_the_trained_world() -> None:
    guide = read_prompt_guides()["toyworld"]
    kinds = {kind.kind: [choice.text for choice in kind.choices] for kind in guide.kinds}
    assert sorted(kinds["color"]) == sorted(COLOURS)
    assert sorted(kinds["shape"]) == sorted(SHAPES)
    assert len(kinds["scene"]) == len(BACKGROUNDS)
    assert guide.words_limit == toy_prompt.MAX_WORDS
    assert {kind.kind: kind.default for kind in guide.kinds}["color"] == toy_prompt.DEFAULT_COLOR
    for example in guide.examples:
        assert set(split_words(example)) <= _words(guide) | {","}
