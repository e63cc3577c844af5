"""How toyworld reads a prompt: words, synonyms, scenes, and figures in colors that no figure was trained in.

`split_words` keeps the learned encoder within its training data:

- Words that were not trained become their trained synonym (`SYNONYMS`).
- A scene becomes the background that the decoder paints so (`SCENES`): "over the sea" is "over navy".
- The training data has figures in eight colors and backgrounds in four others. The encoder therefore reads
  "a white square" as a white background without a figure, and a shape without a color as no figure. Such a
  figure gets the nearest color that figures have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

MAX_WORDS = 48
"""Number of words read of a prompt; further words are ignored."""
SHAPE_WORDS = frozenset({"circle", "ball", "disc", "dot", "square", "box", "block", "triangle"})
FIGURE_COLORS = frozenset(
    {"red", "green", "blue", "yellow", "orange", "purple", "violet", "cyan", "turquoise", "pink", "magenta"}
)
NEAREST_FIGURE_COLOR: Mapping[str, str] = MappingProxyType(
    {"white": "yellow", "gray": "purple", "grey": "purple", "black": "purple", "navy": "blue", "dark": "blue"}
)
"""Words of backgrounds → the figures' color of the nearest luminance; navy keeps its hue."""
SYNONYMS: Mapping[str, str] = MappingProxyType(
    {
        word: trained
        for trained, words in {
            "red": "crimson scarlet ruby",
            "green": "lime emerald",
            "blue": "azure sapphire",
            "yellow": "gold golden lemon",
            "orange": "amber tangerine",
            "purple": "lilac lavender",
            "cyan": "teal aqua",
            "pink": "rose fuchsia",
            "ball": "sphere balloon bubble coin",
            "box": "cube crate tile",
            "triangle": "pyramid tent sail",
            "moving up": "rising climbing ascending",
            "moving down": "falling sinking descending",
            "circling": "spinning whirling",
            "standing still": "resting waiting hovering",
        }.items()
        for word in words.split()
    }
)
"""Word → the trained words of the same meaning."""
SCENES: Mapping[str, str] = MappingProxyType(
    {
        word: background
        for background, words in {
            "black": "night stars starry space",
            "white": "snow snowy winter ice",
            "gray": "mist misty fog foggy mountains hills",
            "navy": "sea ocean waves water",
        }.items()
        for word in words.split()
    }
)
"""Word of a scene → the background that the decoder paints so."""
_COMPLETIONS = frozenset({"sky", "field", "landscape", "scene"})
"""Words that only complete the name of a scene: "a night sky"."""
_ARTICLES = frozenset({"a", "an", "the"})
_BEFORE_BACKGROUNDS = frozenset({"on", "over", "against", "with", ","})
"""Words before which the training data has backgrounds."""
_PLACES = frozenset({"in", "at", "by", "above", "across", "near", "through", "under"})
WORDS_OF_SCENES = _COMPLETIONS | _PLACES
"""Further words that are read with the name of a scene."""
DEFAULT_COLOR = "blue"
"""Color of a figure whose prompt names no color. It is visible on every background."""

_WORD = re.compile(r"[a-z]+|[0-9]+|,")


def split_words(prompt: str) -> list[str]:
    """Split a prompt into at most `MAX_WORDS` lower-case words, numbers and commas, all as trained.

    Other punctuation is dropped. A figure in a background's color gets the nearest color of figures, and the
    figures of a prompt without any figure color get `DEFAULT_COLOR`.
    """
    words = _WORD.findall(prompt.lower())[:MAX_WORDS]
    words = [trained for word in words for trained in SYNONYMS.get(word, word).split()]
    return _scenes_as_backgrounds(_figures_in_trained_colors(words))[:MAX_WORDS]


def _scenes_as_backgrounds(words: list[str]) -> list[str]:
    read: list[str] = []
    named = False
    """Whether the last word named a scene."""
    for word in words:
        if word in _COMPLETIONS and named:
            continue
        if word not in SCENES:
            read.append(word)
            named = False
            continue
        if not named:
            while read and read[-1] in _ARTICLES:
                read.pop()
            if read and read[-1] in _PLACES:
                read.pop()
            if not read or read[-1] not in _BEFORE_BACKGROUNDS:
                read.append("on")
            read.append(SCENES[word])
        named = True
    return read


def _figures_in_trained_colors(words: list[str]) -> list[str]:
    read: list[str] = []
    for place, word in enumerate(words):
        if word in SHAPE_WORDS:
            # "a dark blue ball": the background's name has two words, and the ball is blue.
            if read[-1:] == ["blue"] and read[-2:-1] in (["dark"], ["navy"]):
                del read[-2]
            elif read and read[-1] in NEAREST_FIGURE_COLOR:
                read[-1] = NEAREST_FIGURE_COLOR[read[-1]]
        elif place > 1 and words[place - 1] == "in" and words[place - 2] in SHAPE_WORDS:
            # "a ball in white"
            word = NEAREST_FIGURE_COLOR.get(word, word)
        read.append(word)
    if FIGURE_COLORS.isdisjoint(read):
        return [part for word in read for part in ((DEFAULT_COLOR, word) if word in SHAPE_WORDS else (word,))]
    return read
