"""Steering of toyworld's first figure: eight directions and stop, each a learned token of the conditioning.

A prompt's embedding has one token for the motion of its first figure. Steering puts the direction's token in
its place and leaves all other tokens as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

STEPS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "up": (0, -1),
        "up-right": (1, -1),
        "right": (1, 0),
        "down-right": (1, 1),
        "down": (0, 1),
        "down-left": (-1, 1),
        "left": (-1, 0),
        "up-left": (-1, -1),
        "stop": (0, 0),
    }
)
"""Direction → latent cells that the figure moves in one latent frame, across and down."""
DIRECTIONS = tuple(STEPS)
"""Values of the control `steer`, in the order of their tokens."""

SENTENCES: Mapping[str, str] = MappingProxyType(
    {
        "up": "a red circle moving up",
        "right": "a red circle moving right",
        "down": "a red circle moving down",
        "left": "a red circle moving left",
        "stop": "a red circle standing still",
    }
)
"""Prompts whose motion tokens stand for directions before the directions' own tokens are trained."""
