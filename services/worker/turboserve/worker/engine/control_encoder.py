"""What a model that takes typed controls beside a prompt has to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from turboserve.worker.engine.errors import InvalidFirstChunkError
from turboserve.worker.engine.streams import DEVICE_LOST
from turboserve.worker.model.config import ModelConfig

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


@runtime_checkable
class FirstChunkEncoder(ControlEncoder, Protocol):
    """A control encoder whose values may show a session's first chunk, such as its first frame."""

    def first_chunk(self, values: Mapping[str, JsonValue]) -> Tensor | None:
        """Clean latents of the first chunk [F, C, H, W], on the model's device. None: it is generated.

        The same values return the same latents. An error means that the values cannot be read, as those of a
        broken image, and fails the session. Only an error of `streams.DEVICE_LOST` does not.
        """
        ...


def given_chunk(
    controls: ControlEncoder | None, values: Mapping[str, JsonValue], config: ModelConfig
) -> Tensor | None:
    """Return the latents of a session's first chunk, if `values` have it. Raises InvalidFirstChunkError."""
    if not values or not isinstance(controls, FirstChunkEncoder):
        return None
    try:
        given = controls.first_chunk(values)
    except DEVICE_LOST:
        raise
    except Exception as error:  # The model is code of another distribution.
        raise InvalidFirstChunkError(str(error) or repr(error)) from error
    if given is not None and tuple(given.shape) != config.latent_shape:
        raise InvalidFirstChunkError(f"latents: shape {tuple(given.shape)}, need {config.latent_shape}")
    return None if given is None else given.float()
