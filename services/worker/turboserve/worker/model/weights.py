"""The size of networks' weights, and a digest that identifies a checkpoint."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

PIECE_BYTES = 32 << 20
"""Bytes hashed at once: large tensors are distributed over the threads."""
HASHERS = max(1, min(16, len(os.sched_getaffinity(0))))
"""Number of threads that hash. A worker computes nothing else while it loads."""


def weight_bytes(network: nn.Module) -> int:
    """Bytes of a network's parameters and buffers; a tensor with two names counts once."""
    tensors = {id(t): t for t in (*network.parameters(), *network.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def weights_digest(networks: Mapping[str, nn.Module], details: str = "") -> str:
    """BLAKE2b over the weights of all networks, in the order of names; 32 hexadecimal digits.

    Equal for equal names, types, shapes and bytes, on any device. A tensor with two names counts under the
    first. `details`: other data on which a session's state depends. Each byte is read once.
    """
    tensors = list(_tensors(networks))
    hasher = hashlib.blake2b(details.encode(), digest_size=16)
    with ThreadPoolExecutor(HASHERS, thread_name_prefix="digest") as threads:
        for (name, tensor), pieces in zip(tensors, _hashed(threads, tensors), strict=True):
            hasher.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
            hasher.update(b"".join(pieces))
    return hasher.hexdigest()


def _tensors(networks: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    seen: set[int] = set()
    for part in sorted(networks):
        # Without buffers that are computed at every start.
        for name, tensor in sorted(networks[part].state_dict(keep_vars=True).items()):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{part}.{name}", tensor.detach()


def _hashed(threads: ThreadPoolExecutor, tensors: list[tuple[str, Tensor]]) -> Iterator[list[bytes]]:
    """Digests of each tensor's pieces."""
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for _, tensor in tensors]
    pieces = [torch.split(memory, PIECE_BYTES) if memory.numel() else () for memory in flat]
    digests = threads.map(_digest, (piece for of_one in pieces for piece in of_one))
    for of_one in pieces:
        yield [next(digests) for _ in of_one]


def _digest(piece: Tensor) -> bytes:
    return hashlib.blake2b(piece.cpu().numpy().data, digest_size=32).digest()
