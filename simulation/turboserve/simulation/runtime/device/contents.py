"""Contents of a simulated state: a number that every chunk changes.

Two states that make the same next chunk have the same number. A chunk carries the number from which it was
made and the number after it. A copy, a resumption or a migration that loses or repeats a chunk therefore
shows in the chunks that follow.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from torch import Tensor

from turboserve.static_frozen import statically_frozen
from turboserve.worker.engine.session import Session
from turboserve.worker.engine.state import SessionState

LOST = 1
"""Number of a state that began without its context."""
_BODY = struct.Struct(">QQ")
_LATENTS = struct.Struct("<3q")
INIT = b"virtual-init"
"""Init segment of every chunk."""


def link(number: int, index: int) -> int:
    """Return the number after chunk `index`."""
    return (number * 6364136223846793005 + index * 1442695040888963407 + 12345) % (1 << 61)


def begin(seed: int) -> int:
    """Return the number of a session that has made no chunk."""
    return link(seed + 2, -1)


@statically_frozen()
class ChunkContents:
    """Contents of the payload of a published chunk."""

    parent: int
    """Number of the state from which the chunk was made."""
    number: int
    """Number of the state after the chunk."""

    def to_bytes(self) -> bytes:
        """Return the fragment: the part after the init segment."""
        return _BODY.pack(self.parent, self.number)

    @classmethod
    def of_payload(cls, payload: bytes) -> ChunkContents:
        """Read a payload of the chunk log. Raises `ValueError` if no simulated device made it."""
        if not payload.startswith(INIT) or len(payload) != len(INIT) + _BODY.size:
            raise ValueError(f"payload: {payload[:40]!r}… is not a simulated chunk")
        return cls(*_BODY.unpack_from(payload, len(INIT)))


@statically_frozen()
class Latents:
    """Clean latents of one chunk. The engine passes them on as if they were a tensor."""

    parent: int
    number: int
    index: int
    shape: ClassVar[tuple[int, int, int, int]] = (3, 1, 1, 1)
    dtype: ClassVar[str] = "int64"

    def to(self, _: Any) -> Latents:
        """Return the latents: they have no other type or device."""
        return self

    def to_bytes(self) -> bytes:
        """Return the latents as the hot store keeps them."""
        return _LATENTS.pack(self.parent, self.number, self.index)

    @property
    def tensor(self) -> Tensor:
        """The latents, typed as the tensor that the engine expects and does not read."""
        return cast(Tensor, self)


class Embedding:
    """A prompt's embedding without contents."""

    def clone(self) -> Embedding:
        return self


@dataclass(eq=False)
class VirtualState(SessionState):
    """A session's state without tensors. `recent` holds `Latents`; slab, ring and generator are unused."""

    number: int = LOST

    def forget(self) -> None:
        """See `SessionState.forget`. A chunk that is generated from it later shows in the log."""
        super().forget()
        self.number = LOST


def virtual(state: SessionState) -> VirtualState:
    """Return a state of a virtual device as such."""
    assert isinstance(state, VirtualState)
    return state


def number_of(session: Session) -> int:
    """Return the number of a session's state."""
    return virtual(session.state).number


def latents_of(kept: Tensor, frames: int) -> list[Latents]:
    """Return the latents of each chunk.

    `kept` is either the engine's `Latents`, or int64 [3·n, 1, 1, 1] from the hot store.
    """
    ours: object = kept
    if isinstance(ours, Latents):
        return [ours]
    numbers = kept.reshape(-1, frames).tolist()
    return [Latents(*(int(each) for each in row)) for row in numbers]
