"""A session's state as pages, for migration: read while the session generates, and received by the target.

A page is one ring position over all layers, or one whole tensor. Each page carries a stamp. A page that was
read under an equal stamp has not changed, so that at the chunk boundary only the other pages are sent again.
`pages_in_use` and `pages_quiesced` run on the engine's thread.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
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

    @property
    def size(self) -> int:
        """Size in bytes."""
        return sum(part.numel() for part in self.parts)


def pages_in_use(session: Session, config: ModelConfig) -> list[Page]:
    """All pages that no current work writes to. The session may be anywhere in a chunk."""
    state, ring = session.state, session.state.ring
    pages: list[Page] = []
    if session.work is None or isinstance(session.work, ChunkWork):
        written_from = state.first_frame(config) if session.work is not None else ring.end
        for position, frame in enumerate(ring.frames):
            if frame < written_from:
                pages += _position_pages(ring.filled(), position, _ring_stamp(session, position))
        if ring.text_writes or state.text is not None:
            stamp = (IdentityStamp(state.slab.text_keys), ring, ring.text_writes)
            pages += [Page(name, _flat(tensor), stamp) for name, tensor in _prompt(ring.filled())]
    own: dict[str, Tensor] = {} if state.text is None else {"text": state.text}
    # `recent` receives a chunk when it is finished; before that, `next_chunk` is the chunk's own number.
    first = state.next_chunk - len(state.recent)
    own |= {f"{RECENT}/{first + n}": latents for n, latents in enumerate(state.recent)}
    own |= {DECODER + name: tensor for name, tensor in (state.decoder_cache or {}).items()}
    return pages + [_whole(name, tensor, IdentityStamp(tensor)) for name, tensor in own.items()]


@torch.inference_mode()
def pages_quiesced(session: Session, config: ModelConfig, model: str) -> tuple[dict[str, Any], list[Page]]:
    """Header and all pages of a session while nothing is computed for it. `model`: see `snapshot.parts`."""
    generator = session.state.generator.get_state()
    pages = [*pages_in_use(session, config), _whole("generator", generator, IdentityStamp(generator))]
    header, _ = parts(session.state, model)
    return header, sorted(pages, key=lambda page: page.name)


def pages_of(snapshot: Snapshot, config: ModelConfig) -> tuple[dict[str, Any], list[Page]]:
    """Header and all pages of a session in host memory."""
    pages: list[Page] = []
    for name, tensor in snapshot.tensors.items():
        if name == RECENT:
            chunks = torch.split(tensor, config.frames_per_chunk)
            first = snapshot.next_chunk - len(chunks)
            pages += [_whole(f"{RECENT}/{first + n}", t, IdentityStamp(t)) for n, t in enumerate(chunks)]
        elif name in PROMPT:
            pages.append(Page(name, _flat(tensor), IdentityStamp(tensor)))
        elif name not in BY_POSITION:
            pages.append(_whole(name, tensor, IdentityStamp(tensor)))
    for position in range(len(snapshot.header["ring"]["slots"])):
        pages += _position_pages(snapshot.tensors, position, IdentityStamp(snapshot.tensors["keys"]))
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
            hasher.update(piece.cpu().numpy().data)
    return hasher.digest()


def fingerprints_of(
    pages: Mapping[str, Sequence[Tensor]], check: Callable[[], object] | None = None
) -> dict[str, bytes]:
    """BLAKE2b of many pages, by name. Several pages are hashed at once where there are enough cores: hashing
    a large state takes longer than sending it, and a viewer may be waiting."""
    size = sum(part.numel() for page in pages.values() for part in page)
    if HASHERS == 1 or size < HASHED_AT_ONCE_BYTES:
        return {name: fingerprint_of(page, check) for name, page in pages.items()}
    with ThreadPoolExecutor(HASHERS, thread_name_prefix="hash") as threads:
        prints = threads.map(partial(fingerprint_of, check=check), pages.values())
        return dict(zip(pages, prints, strict=True))


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
    turned = ring.shift if position < session.state.slab.sink_keys.shape[1] else 0
    return IdentityStamp(session.state.slab.keys), ring, ring.writes[position], turned


def _position_pages(tensors: Mapping[str, Tensor], position: int, stamp: object) -> list[Page]:
    return [
        Page(f"{name}/{position}", position_parts(tensors[name], position), stamp)
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


def _whole(name: str, tensor: Tensor, stamp: object) -> Page:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Page(name, _flat(tensor.contiguous()), stamp, dtype, tuple(tensor.shape))
