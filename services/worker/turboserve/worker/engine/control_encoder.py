"""What a model that takes typed controls beside a prompt has to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from pydantic import JsonValue

    from turboserve.contracts.control_declarations import ControlDeclaration


class ControlEncoder(Protocol):
    """Encodes prompts together with the values of a model's typed controls."""

    @property
    def declarations(self) -> tuple[ControlDeclaration, ...]:
        """The controls that the model takes."""
        ...

    def encode(self, prompts: Sequence[str], values: Sequence[Mapping[str, JsonValue]]) -> Tensor:
        """Embeddings as `TextEncoder.encode` returns them, each under its own values.

        Each value is one that its declaration allows. Without values, an embedding is the prompt's own.
        """
        ...
