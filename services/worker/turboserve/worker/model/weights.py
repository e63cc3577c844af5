"""The size of networks' weights, and a digest that identifies a checkpoint."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from turboserve.worker.model.weight_manifest import PIECE_BYTES, WeightManifest, WeightTensor

HASHERS = max(1, min(16, len(os.sched_getaffinity(0))))
"""Number of threads that hash. A worker computes nothing else while it loads."""


def weight_bytes(network: nn.Module) -> int:
    """Bytes of a network's parameters and buffers; a tensor with two names counts once."""
    tensors = {id(t): t for t in (*network.parameters(), *network.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def weights_digest(networks: Mapping[str, nn.Module], details: str = "") -> str:
    """`WeightManifest.digest` of the weights of all networks; 32 hexadecimal digits.

    Equal for equal names, types, shapes and bytes, on any device.
    """
    return manifest_of(networks, details).digest


def manifest_of(networks: Mapping[str, nn.Module], details: str = "") -> WeightManifest:
    """The manifest of the weights of all networks, in the order of names. Each byte is read once.

    `details`: other data on which a session's state depends.
    """
    tensors = named_weights(networks)
    with ThreadPoolExecutor(HASHERS, thread_name_prefix="digest") as threads:
        return WeightManifest(
            tuple(
                WeightTensor(name, str(tensor.dtype), tuple(tensor.shape), tuple(pieces))
                for (name, tensor), pieces in zip(
                    tensors.items(), _hashed(threads, tensors.values()), strict=True
                )
            ),
            details,
            PIECE_BYTES,
        )


def named_weights(networks: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """The weights of all networks by `NETWORK.NAME`, in the order of names.

    A tensor with two names is there under the first. Buffers that are computed at every start are left out.
    """
    seen: set[int] = set()
    named: dict[str, Tensor] = {}
    for part in sorted(networks):
        for name, tensor in sorted(networks[part].state_dict(keep_vars=True).items()):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                named[f"{part}.{name}"] = tensor.detach()
    return named


def weight_memory(tensor: Tensor) -> Tensor:
    """A weight's bytes, uint8 [n]: its own memory if it is contiguous, else a copy."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def piece_digest(piece: Tensor) -> bytes:
    """Digest of one piece's bytes, uint8 [n] on any device: BLAKE2b, 32 bytes."""
    return hashlib.blake2b(piece.cpu().numpy().data, digest_size=32).digest()


def _hashed(threads: ThreadPoolExecutor, tensors: Iterable[Tensor]) -> Iterator[list[bytes]]:
    """Digests of each tensor's pieces."""
    flat = [weight_memory(tensor) for tensor in tensors]
    pieces = [torch.split(memory, PIECE_BYTES) if memory.numel() else () for memory in flat]
    digests = threads.map(piece_digest, (piece for of_one in pieces for piece in of_one))
    for of_one in pieces:
        yield [next(digests) for _ in of_one]
