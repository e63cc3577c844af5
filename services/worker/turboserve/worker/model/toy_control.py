"""The control `steer` of toyworld: where the first figure of a prompt moves, from its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from turboserve.worker.model.toy_text import ToyText

if TYPE_CHECKING:
    from pydantic import JsonValue

    from turboserve.contracts.control_declarations import ControlDeclaration

STEER = "steer"


class SteerControl:
    """The engine's `ControlEncoder` over the text encoder."""

    def __init__(self, text: ToyText, directions: Sequence[str]) -> None:
        """`directions`: the values that the weights take, of `toy_steering.DIRECTIONS`."""
        self._text, self._directions = text, list(directions)

    @cached_property
    def declarations(self) -> tuple[ControlDeclaration, ...]:
        """See `ControlEncoder.declarations`."""
        # The engine asks for it only where sessions have controls. Loading toyworld needs no pydantic.
        from turboserve.contracts.control_declarations import ControlDeclaration

        return (
            ControlDeclaration(
                name=STEER,
                description="Where the first figure moves from its place, instead of the prompt's motion.",
                value_schema={"type": "string", "enum": self._directions},
            ),
        )

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str], values: Sequence[Mapping[str, JsonValue]]) -> Tensor:
        """See `ControlEncoder.encode`."""
        rows = []
        for row, each in zip(self._text.encode(prompts), values, strict=True):
            direction = each.get(STEER)
            rows.append(self._text.steered(row, direction) if isinstance(direction, str) else row)
        return torch.stack(rows)
