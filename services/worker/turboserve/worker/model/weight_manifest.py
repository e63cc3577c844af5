"""The manifest of a model's weights: each tensor's name, shape, type and digests, without the bytes.

A manifest's digest covers all of it but the size of a piece. So a worker that knows the digest can check a
manifest that it gets from anywhere, and then each piece of the weights as it arrives.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

PIECE_BYTES = 32 << 20
"""Bytes hashed at once: large tensors are distributed over threads."""
SHARD_BYTES = 32 << 20
"""Bytes from which a shard has enough pieces."""
ITEM_BYTES = {
    "torch.float64": 8,
    "torch.int64": 8,
    "torch.float32": 4,
    "torch.int32": 4,
    "torch.bfloat16": 2,
    "torch.float16": 2,
    "torch.int16": 2,
    "torch.float8_e4m3fn": 1,
    "torch.float8_e5m2": 1,
    "torch.int8": 1,
    "torch.uint8": 1,
    "torch.bool": 1,
}
"""Bytes of a number, by type. A model with weights of another type is loaded from its files."""


class WeightManifestError(ValueError):
    """A manifest is malformed, or is not the expected one. Another source may have the right one."""


@dataclass(frozen=True)
class WeightTensor:
    """One tensor of the weights."""

    name: str
    dtype: str
    """As torch prints it: `torch.float32`."""
    shape: tuple[int, ...]
    pieces: tuple[bytes, ...]
    """BLAKE2b digests of the tensor's pieces, 32 bytes each, in order."""

    @property
    def size(self) -> int:
        """Bytes of the tensor. Raises `WeightManifestError` for a type without a known size."""
        if self.dtype not in ITEM_BYTES:
            raise WeightManifestError(f"tensor {self.name}: type {self.dtype} is not known")
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class WeightPiece:
    """A run of one tensor's bytes that has a digest of its own."""

    tensor: str
    offset: int
    """Where the piece begins in the tensor, bytes."""
    size: int
    digest: bytes


@dataclass(frozen=True)
class WeightShard:
    """Successive pieces that are transferred together."""

    number: int
    pieces: tuple[WeightPiece, ...]

    @property
    def size(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.size for piece in self.pieces)


@dataclass(frozen=True)
class WeightManifest:
    """All tensors of a model's weights, in the order of names."""

    tensors: tuple[WeightTensor, ...]
    details: str = ""
    """Other data on which a session's state depends, such as a vocabulary."""
    piece_bytes: int = PIECE_BYTES
    """Bytes of each piece of a tensor but its last, which may have less."""

    @cached_property
    def digest(self) -> str:
        """BLAKE2b over details, names, types, shapes and the pieces' digests; 32 hexadecimal digits."""
        hasher = hashlib.blake2b(self.details.encode(), digest_size=16)
        for tensor in self.tensors:
            hasher.update(f"\0{tensor.name}\0{tensor.dtype}\0{tensor.shape}\0".encode())
            hasher.update(b"".join(tensor.pieces))
        return hasher.hexdigest()

    @property
    def size(self) -> int:
        """Bytes of all tensors. Raises `WeightManifestError` for a type without a known size."""
        return sum(tensor.size for tensor in self.tensors)

    def pieces(self) -> Iterator[WeightPiece]:
        """Yield all pieces, in order."""
        for tensor in self.tensors:
            for number, digest in enumerate(tensor.pieces):
                offset = number * self.piece_bytes
                yield WeightPiece(tensor.name, offset, min(self.piece_bytes, tensor.size - offset), digest)

    def shards(self, shard_bytes: int = SHARD_BYTES) -> tuple[WeightShard, ...]:
        """Cut the pieces, in order, into shards of at least `shard_bytes` each, but for the last.

        Small tensors share a shard. A shard is larger than `shard_bytes` by less than one piece.
        """
        shards: list[WeightShard] = []
        waiting: list[WeightPiece] = []
        for piece in self.pieces():
            waiting.append(piece)
            if sum(each.size for each in waiting) >= shard_bytes:
                shards.append(WeightShard(len(shards), tuple(waiting)))
                waiting = []
        if waiting:
            shards.append(WeightShard(len(shards), tuple(waiting)))
        return tuple(shards)
