"""What a simulated state contains: a number that every chunk changes.

Two states that make the same next chunk have the same number. A chunk carries the number it was made from and
the one it leads to, so that a copy, a resumption or a migration that loses or repeats a chunk shows in the
chunks that follow.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from torch import Tensor

from turboserve.worker.engine.session import Session
from turboserve.worker.engine.state import SessionState

LOST = 1
"""Number of a state that was begun without its context."""
_BODY = struct.Struct(">QQ")
_LATENTS = struct.Struct("<3q")
INIT = b"virtual-init"
"""Init segment of every chunk."""


def link(number: int, index: int) -> int:
    """The number after chunk `index`."""
    return (number * 6364136223846793005 + index * 1442695040888963407 + 12345) % (1 << 61)


def begin(seed: int) -> int:
    """The number of a session that has made nothing."""
    return link(seed + 2, -1)


@dataclass(frozen=True)
class ChunkContents:
    """What the payload of a published chunk says."""

    parent: int
    """Number of the state that it was made from."""
    number: int
    """Number of the state after it."""

    def to_bytes(self) -> bytes:
        """The fragment: what follows the init segment."""
        return _BODY.pack(self.parent, self.number)

    @classmethod
    def of_payload(cls, payload: bytes) -> ChunkContents:
        """Read a payload of the chunk log. Raises `ValueError` for one that no simulated device made."""
        if not payload.startswith(INIT) or len(payload) != len(INIT) + _BODY.size:
            raise ValueError(f"payload: {payload[:40]!r}… is not a simulated chunk")
        return cls(*_BODY.unpack_from(payload, len(INIT)))


@dataclass(frozen=True)
class Latents:
    """Clean latents of one chunk. The engine passes them on as if they were a tensor."""

    parent: int
    number: int
    index: int
    shape: ClassVar[tuple[int, int, int, int]] = (3, 1, 1, 1)
    dtype: ClassVar[str] = "int64"

    def to(self, _: Any) -> Latents:
        """They have no other type or device."""
        return self

    def to_bytes(self) -> bytes:
        """As the hot store keeps them."""
        return _LATENTS.pack(self.parent, self.number, self.index)

    @property
    def tensor(self) -> Tensor:
        """The same, for where the engine's types say tensor and nothing looks inside."""
        return cast(Tensor, self)


class Embedding:
    """A prompt's embedding without contents."""

    def clone(self) -> Embedding:
        return self


@dataclass(eq=False)
class VirtualState(SessionState):
    """A session's state without tensors. `recent` has `Latents`; slab, ring and generator are of no use."""

    number: int = LOST


def number_of(session: Session) -> int:
    """The number of a session's state."""
    assert isinstance(session.state, VirtualState)
    return session.state.number
