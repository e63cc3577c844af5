"""How toyworld reads a prompt: words, and figures in colors that no figure was trained in.

The training data has figures in eight colors and backgrounds in four others. The learned encoder therefore
reads "a white square" as a white background without a figure, and a shape without a color as no figure.
`split_words` keeps the encoder within its training data: it gives such a figure the nearest color that
figures have.
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
DEFAULT_COLOR = "blue"
"""Color of a figure whose prompt names no color. It is visible on every background."""

_WORD = re.compile(r"[a-z]+|[0-9]+|,")


def split_words(prompt: str) -> list[str]:
    """Split a prompt into at most `MAX_WORDS` lower-case words, numbers and commas.

    Other punctuation is dropped. A figure in a background's color gets the nearest color of figures, and the
    figures of a prompt without any figure color get `DEFAULT_COLOR`.
    """
    words = _figures_in_trained_colors(_WORD.findall(prompt.lower())[:MAX_WORDS])
    return words[:MAX_WORDS]


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
