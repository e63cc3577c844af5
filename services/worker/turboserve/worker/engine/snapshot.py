"""A session's state as host tensors and a small header, and its transfer to the host or back, in pieces."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turboserve.worker.engine.decode_jobs import CacheApart
from turboserve.worker.engine.errors import InvalidFidelityError, SnapshotRejectedError
from turboserve.worker.engine.fidelity import Fidelity, check_floor
from turboserve.worker.engine.kv_ring import KVRing
from turboserve.worker.engine.memory import Slab
from turboserve.worker.engine.state import SessionState
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.rope import Rotation

VERSION = 1
APART_VERSION = 2
"""Version of a state without its decoder's cache (`CacheApart`), which earlier releases refuse."""
VERSIONS = (VERSION, APART_VERSION)
DECODER = "decoder."
"""Prefix of the names of the decoder cache's tensors."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """One session between two chunks. `header` is JSON. `tensors` are on the host; those by ring position are
    contiguous per layer, the others as a whole."""

    header: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def session(self) -> str:
        """The session's name."""
        return str(self.header["session"])

    @property
    def next_chunk(self) -> int:
        """The chunk that a worker continues with."""
        return int(self.header["next_chunk"])

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def digest(self) -> str:
        """BLAKE2b over header and tensors, hexadecimal: equal exactly when the states are bit-equal."""
        hasher = hashlib.blake2b(json.dumps(self.header, sort_keys=True).encode(), digest_size=32)
        for name in sorted(self.tensors):
            tensor = self.tensors[name]
            hasher.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
            if tensor.numel():
                hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return hasher.hexdigest()


def fingerprint(config: ModelConfig) -> str:
    """Short digest of a model's configuration. A latency profile is bound to it."""
    return hashlib.blake2b(config.to_json().encode(), digest_size=8).hexdigest()


def state_fingerprint(config: ModelConfig, weights: str) -> str:
    """Digest of a model's configuration and weights (`weights_digest`), 32 hexadecimal digits. A session's
    state continues only where this digest is equal."""
    return hashlib.blake2b(f"{config.to_json()}\0{weights}".encode(), digest_size=16).hexdigest()


def parts(state: SessionState, model: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a session between two chunks; the tensors are the session's own, not copies.

    `model`: the `state_fingerprint` of the models that generated the state.
    """
    tensors = dict(state.ring.filled())
    tensors["generator"] = state.generator.get_state()
    if state.text is not None:
        tensors["text"] = state.text
    if state.recent:
        tensors["recent"] = torch.cat(state.recent)
    for name, tensor in (state.decoder_cache or {}).items():
        tensors[DECODER + name] = tensor
    return {**header_of(state, model), "ring": state.ring.bookkeeping()}, tensors


def header_of(state: SessionState, model: str) -> dict[str, Any]:
    """A snapshot's header without the window. `model`: see `parts`."""
    return {
        "version": APART_VERSION if isinstance(state.decoder_cache, CacheApart) else VERSION,
        "model": model,
        "session": state.session,
        "seed": state.seed,
        "prompt": state.prompt,
        "values": dict(state.values),
        "control_seq": state.control_seq,
        "next_chunk": state.next_chunk,
        "fidelity": None if state.fidelity is None else state.fidelity.to_mapping(),
        "fixed_fidelity": state.fixed_fidelity,
        "floor": state.floor,
        "pinned": state.pinned,
        "decoding": state.decoder_cache is not None,
    }


@torch.inference_mode()
def export(state: SessionState, model: str) -> Snapshot:
    """Copy a session's state, between two chunks, to newly allocated host memory. `model`: see `parts`."""
    header, tensors = parts(state, model)
    return Snapshot(header, {name: t.to("cpu", copy=True).contiguous() for name, t in tensors.items()})


@torch.inference_mode()
def prepare(
    snapshot: Snapshot, slab: Slab, config: ModelConfig, model: str, rotation: Rotation, device: torch.device
) -> tuple[SessionState, dict[str, Tensor]]:
    """Create the state of a snapshot. Returns it, and its tensors by name, which are still to be filled.

    `model`: see `parts`. Raises `SnapshotRejectedError` if the snapshot is of another model, other weights or
    another version, or its tensors do not fit.
    """
    header, tensors = snapshot.header, snapshot.tensors
    apart = is_apart(header)
    _require("model", header.get("model"), model)
    ring = KVRing(slab, config, rotation)
    marks = header["ring"]
    ring.restore(marks["slots"], marks["next"], marks["shift"])
    targets = ring.filled()
    for name, view in targets.items():
        found = tensors.get(name)
        _require(
            name,
            None if found is None else (tuple(found.shape), found.dtype),
            (tuple(view.shape), view.dtype),
        )
    generator = torch.Generator(device)
    generator.set_state(tensors["generator"].clone())
    for name, tensor in tensors.items():
        if name in ("text", "recent") or name.startswith(DECODER):
            targets[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    recent = targets.get("recent")
    decoder = {n.removeprefix(DECODER): t for n, t in targets.items() if n.startswith(DECODER)}
    state = SessionState(
        session=snapshot.session,
        slab=slab,
        ring=ring,
        generator=generator,
        seed=int(header["seed"]),
        prompt=str(header["prompt"]),
        text=targets.get("text"),
        values=values_of(header),
        fidelity=fidelity_of(header, config),
        fixed_fidelity=fixed_of(header),
        floor=floor_of(header),
        pinned=pinned_of(header),
        control_seq=int(header["control_seq"]),
        next_chunk=snapshot.next_chunk,
        recent=[] if recent is None else list(torch.split(recent, config.frames_per_chunk)),
        decoder_cache=CacheApart() if apart else decoder if header["decoding"] else None,
    )
    return state, targets


def outline(state: SessionState, header: Mapping[str, Any], config: ModelConfig) -> None:
    """Give a state without tensors what a snapshot's header says. Raises `SnapshotRejectedError`."""
    state.fidelity, state.fixed_fidelity = fidelity_of(header, config), fixed_of(header)
    state.floor, state.pinned = floor_of(header), pinned_of(header)
    state.values = values_of(header)
    state.control_seq, state.next_chunk = int(header["control_seq"]), int(header["next_chunk"])


def is_apart(header: Mapping[str, Any]) -> bool:
    """Whether the state of a snapshot's header lacks its decoder's cache. Raises `SnapshotRejectedError`."""
    version = header.get("version")
    if version not in VERSIONS:
        raise SnapshotRejectedError("version", version, f"one of {VERSIONS}")
    return bool(version == APART_VERSION)


def fidelity_of(header: Mapping[str, Any], config: ModelConfig) -> Fidelity | None:
    """The configuration in a snapshot's header. Raises `SnapshotRejectedError`."""
    value = header.get("fidelity")
    if value is None:
        return None
    try:
        return Fidelity(**value).check(config)
    except (TypeError, InvalidFidelityError) as error:
        raise SnapshotRejectedError("fidelity", value, "a configuration of this model") from error


def floor_of(header: Mapping[str, Any]) -> float | None:
    """The session's least quality in a snapshot's header. Raises `SnapshotRejectedError`."""
    value = header.get("floor")
    try:
        return None if value is None else check_floor(value)
    except InvalidFidelityError as error:
        raise SnapshotRejectedError("floor", value, error.limit) from error


def fixed_of(header: Mapping[str, Any]) -> bool:
    """Whether no policy changes the configuration in a snapshot's header. Raises `SnapshotRejectedError`."""
    return _flag(header, "fixed_fidelity")


def pinned_of(header: Mapping[str, Any]) -> bool:
    """Whether the session of a snapshot's header is pinned. Raises `SnapshotRejectedError`."""
    return _flag(header, "pinned")


def values_of(header: Mapping[str, Any]) -> dict[str, Any]:
    """Values of the controls in a snapshot's header. Raises `SnapshotRejectedError`."""
    values = header.get("values", {})
    if not isinstance(values, dict):
        raise SnapshotRejectedError("values", values, "values by name")
    return values


def _flag(header: Mapping[str, Any], field: str) -> bool:
    value = header.get(field, False)
    if not isinstance(value, bool):
        raise SnapshotRejectedError(field, value, "true or false")
    return value


def _require(field: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise SnapshotRejectedError(field, found, wanted)
