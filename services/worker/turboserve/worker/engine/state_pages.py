"""A session's state as pages, for migration: read while the session generates, and received by the target.

A page is one ring position over all layers, or one whole tensor. Each page carries a stamp. A page that was
read under an equal stamp has not changed, so that at the chunk boundary only the other pages are sent again.
`pages_in_use` and `pages_quiesced` run on the engine's thread.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from turboserve.worker.engine.session import Session
from turboserve.worker.engine.snapshot import DECODER, Snapshot, parts
from turboserve.worker.engine.work import ChunkWork
from turboserve.worker.model.config import ModelConfig

BY_POSITION = ("keys", "values", "sink_keys")
"""Tensors [layers, frames, …] of which each ring position is a page."""
PROMPT = ("text_keys", "text_values")
HASHERS = max(1, min(8, (os.cpu_count() or 1) // 4))
"""Number of threads that hash pages."""
HASHED_AT_ONCE_BYTES = 8 << 20
"""Smallest size for which hashing on several threads pays, bytes."""
HASHED_UNASKED_BYTES = 32 << 20
"""Bytes of a page that are hashed between two checks for an abort."""
SOURCES_AT_ONCE = 2
"""Largest number of sessions whose pages are sent while they generate. Meanwhile each has two decoder caches:
the one that is being sent, and the current one."""
RECENT = "recent"
_pinned = threading.local()
"""Memory of each hashing thread through which it reads a GPU's."""


class IdentityStamp:
    """Stamp of a tensor that is never changed in place: equal to a stamp of the same, existing tensor.

    The stamp does not keep the tensor alive: every chunk creates a new decoder cache, which takes gigabytes.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._hash = id(tensor)

    def __eq__(self, other: object) -> bool:
        tensor = self._tensor()
        return tensor is not None and isinstance(other, IdentityStamp) and other._tensor() is tensor

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, eq=False)
class Page:
    """A part of a session's state that is sent as a unit."""

    name: str
    """`keys/3`, `values/3`, `sink_keys/0` for ring positions; otherwise the tensor's name."""
    parts: tuple[Tensor, ...]
    """Flat bytes, uint8 [n] each, views of the session's own memory: one per layer, or one."""
    stamp: object
    """Equal stamps mean that the page was not written in between."""
    dtype: str = ""
    """Type of a whole tensor, such as `float32`; empty for pages of the slab."""
    shape: tuple[int, ...] = ()
    lasts_s: float = math.inf
    """Seconds until the session is expected to write the page again, while it plays. Infinite: not known."""
    guessed: bool = False
    """Whether `lasts_s` holds only if the page was seen to change: a decoder may keep parts of its cache."""

    @property
    def size(self) -> int:
        """Size in bytes."""
        return sum(part.numel() for part in self.parts)


def pages_in_use(session: Session, config: ModelConfig) -> list[Page]:
    """All pages that no current work writes to. The session may be anywhere in a chunk."""
    state, ring = session.state, session.state.ring
    pages: list[Page] = []
    # On average, half of the time to the next chunk has passed.
    next_chunk_s = math.inf if session.paused else config.chunk_media_s / 2
    if session.work is None or isinstance(session.work, ChunkWork):
        written_from = state.first_frame(config) if session.work is not None else ring.end
        for position, frame in enumerate(ring.frames):
            if frame < written_from:
                chunks = ring.chunks_until_written(position, config.frames_per_chunk)
                lasts_s = chunks * config.chunk_media_s + next_chunk_s
                stamps = dict.fromkeys(BY_POSITION, _ring_stamp(session, position))
                lasting = dict.fromkeys(BY_POSITION, lasts_s)
                if position < state.slab.sink_keys.shape[1]:
                    # The keys that are read are turned as the window rolls. The written ones stay.
                    stamps["keys"] = stamps["keys"], ring.shift
                    lasting["keys"] = next_chunk_s
                pages += _position_pages(ring.filled(), position, stamps, lasting)
        if ring.text_writes or state.text is not None:
            stamp = (IdentityStamp(state.slab.text_keys), ring, ring.text_writes)
            pages += [Page(name, _flat(tensor), stamp) for name, tensor in _prompt(ring.filled())]
    if state.text is not None:
        pages.append(_whole("text", state.text))
    # `recent` receives a chunk when it is finished; before that, `next_chunk` is the chunk's own number.
    first = state.next_chunk - len(state.recent)
    # They leave the window before long, and each would take memory at the target until then.
    pages += [_whole(f"{RECENT}/{first + n}", latents, 0.0) for n, latents in enumerate(state.recent)]
    cache = state.decoder_cache or {}
    return pages + [
        _whole(DECODER + name, tensor, next_chunk_s, guessed=True) for name, tensor in cache.items()
    ]


@torch.inference_mode()
def pages_quiesced(session: Session, config: ModelConfig, model: str) -> tuple[dict[str, Any], list[Page]]:
    """Header and all pages of a session while nothing is computed for it. `model`: see `snapshot.parts`."""
    generator = session.state.generator.get_state()
    pages = [*pages_in_use(session, config), _whole("generator", generator)]
    header, _ = parts(session.state, model)
    return header, sorted(pages, key=lambda page: page.name)


def pages_of(snapshot: Snapshot, config: ModelConfig) -> tuple[dict[str, Any], list[Page]]:
    """Header and all pages of a session in host memory."""
    pages: list[Page] = []
    for name, tensor in snapshot.tensors.items():
        if name == RECENT:
            chunks = torch.split(tensor, config.frames_per_chunk)
            first = snapshot.next_chunk - len(chunks)
            # Each call splits it again.
            stamp = IdentityStamp(tensor)
            pages += [
                replace(_whole(f"{RECENT}/{first + n}", each), stamp=(stamp, n))
                for n, each in enumerate(chunks)
            ]
        elif name in PROMPT:
            pages.append(Page(name, _flat(tensor), IdentityStamp(tensor)))
        elif name not in BY_POSITION:
            pages.append(_whole(name, tensor))
    for position in range(len(snapshot.header["ring"]["slots"])):
        stamps = dict.fromkeys(BY_POSITION, IdentityStamp(snapshot.tensors["keys"]))
        pages += _position_pages(snapshot.tensors, position, stamps)
    return dict(snapshot.header), sorted(pages, key=lambda page: page.name)


def changed(pages: Sequence[Page], sent: Mapping[str, object]) -> list[Page]:
    """The pages whose bytes may differ from what was read under the stamps `sent`, by name."""
    return [page for page in pages if page.name not in sent or page.stamp != sent[page.name]]


def fingerprint_of(page_parts: Sequence[Tensor], check: Callable[[], object] | None = None) -> bytes:
    """BLAKE2b of one page's bytes. `check` is called repeatedly, and ends the hashing by raising an error."""
    hasher = hashlib.blake2b(digest_size=32)
    for part in page_parts:
        for piece in torch.split(part, HASHED_UNASKED_BYTES) if part.numel() else ():
            if check is not None:
                check()
            hasher.update(_on_host(piece).numpy().data)
    return hasher.digest()


def _on_host(piece: Tensor) -> Tensor:
    """The piece in host memory: itself, or a copy that is valid until this thread's next call."""
    if piece.device.type != "cuda":
        return piece.cpu()
    room = getattr(_pinned, "room", None)
    if room is None or room.numel() < piece.numel():
        size = min(HASHED_UNASKED_BYTES, 1 << (piece.numel() - 1).bit_length())
        _pinned.room = room = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return room[: piece.numel()].copy_(piece)


def digest_of(header: Mapping[str, Any], fingerprints: Mapping[str, bytes]) -> str:
    """Digest of a state: equal exactly when header and all pages are bit-equal, as in `Snapshot.digest`.

    The digest covers the pages' digests rather than their bytes. A page that was hashed while the session
    generated, and has not changed since, is not read again while a viewer waits.
    """
    hasher = hashlib.blake2b(json.dumps(header, sort_keys=True).encode(), digest_size=32)
    for name in sorted(fingerprints):
        hasher.update(f"\0{name}\0".encode() + fingerprints[name])
    return hasher.hexdigest()


def _ring_stamp(session: Session, position: int) -> tuple[object, ...]:
    ring = session.state.ring
    return IdentityStamp(session.state.slab.keys), ring, ring.writes[position]


def _position_pages(
    tensors: Mapping[str, Tensor],
    position: int,
    stamps: Mapping[str, object],
    lasts_s: Mapping[str, float] = MappingProxyType({}),
) -> list[Page]:
    return [
        Page(
            f"{name}/{position}",
            position_parts(tensors[name], position),
            stamps[name],
            lasts_s=lasts_s.get(name, math.inf),
        )
        for name in BY_POSITION
        if position < tensors[name].shape[1]
    ]


def position_parts(tensor: Tensor, position: int) -> tuple[Tensor, ...]:
    """One ring position of [layers, frames, …] as flat bytes per layer."""
    return tuple(flat_bytes(layer[position]) for layer in tensor)


def flat_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory, uint8 [n]."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _prompt(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    return [(name, tensors[name]) for name in PROMPT]


def _flat(tensor: Tensor) -> tuple[Tensor, ...]:
    return (flat_bytes(tensor),)


def _whole(name: str, tensor: Tensor, lasts_s: float = math.inf, *, guessed: bool = False) -> Page:
    """A page of a tensor that is never changed in place."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape, stamp = tuple(tensor.shape), IdentityStamp(tensor)
    return Page(name, _flat(tensor.contiguous()), stamp, dtype, shape, lasts_s, guessed)
