"""A virtual state as two pages: one that each chunk changes, and one whose bytes never change."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from turboserve.simulation.runtime.device.contents import Embedding, Latents, VirtualState
from turboserve.simulation.runtime.device.profile import DeviceProfile
from turboserve.worker.engine.decode_jobs import CacheApart
from turboserve.worker.engine.errors import SnapshotRejectedError
from turboserve.worker.engine.kv_ring import KVRing
from turboserve.worker.engine.memory import Extent, Slab, aligned
from turboserve.worker.engine.snapshot import (
    APART_VERSION,
    VERSION,
    Snapshot,
    fidelity_of,
    fixed_of,
    floor_of,
    pinned_of,
)
from turboserve.worker.engine.state_pages import IdentityStamp, Page
from turboserve.worker.model.config import ModelConfig

_KEPT = 3
"""Chunks of a window."""
_NUMBERS = struct.Struct(f"<qq{3 * _KEPT}q")
_NOTHING: Any = None


def state_size(profile: DeviceProfile) -> int:
    """Return the bytes of a state in host memory."""
    return aligned(_NUMBERS.size) + aligned(profile.state_bytes)


def tensors_of(state: VirtualState, profile: DeviceProfile) -> dict[str, Tensor]:
    """Return both pages, uint8 [n]. The first is a copy."""
    kept = [cast(Latents, latents) for latents in state.recent]
    numbers = [number for each in kept for number in (each.parent, each.number, each.index)]
    packed = _NUMBERS.pack(state.number, len(kept), *numbers, *[0] * (3 * _KEPT - len(numbers)))
    return {
        "numbers": torch.frombuffer(bytearray(packed), dtype=torch.uint8),
        "window": _window(profile.state_bytes),
    }


def pages_of_tensors(tensors: Mapping[str, Tensor], stamp: object) -> list[Page]:
    """Return the pages; `stamp` is equal for equal numbers."""
    numbers, window = tensors["numbers"], tensors["window"]
    return [Page("numbers", (numbers,), stamp), Page("window", (window,), IdentityStamp(window))]


def restore(
    header: Mapping[str, Any], numbers: Tensor, slab: Slab, config: ModelConfig, *, apart: bool = False
) -> VirtualState:
    """Return the state that a header and its first page describe. `apart`: without a decoder's cache."""
    cache: dict[str, Tensor] = CacheApart() if apart else {}
    number, count, *rest = _NUMBERS.unpack(numbers.numpy().tobytes())
    recent = [Latents(*rest[3 * place : 3 * place + 3]) for place in range(count)]
    return VirtualState(
        session=str(header["session"]),
        slab=slab,
        ring=cast(KVRing, _NOTHING),
        generator=_NOTHING,
        seed=int(header["seed"]),
        prompt=str(header["prompt"]),
        text=cast(Tensor, Embedding()),
        fidelity=fidelity_of(header, config),
        fixed_fidelity=fixed_of(header),
        floor=floor_of(header),
        pinned=pinned_of(header),
        control_seq=int(header["control_seq"]),
        next_chunk=int(header["next_chunk"]),
        recent=[latents.tensor for latents in recent],
        decoder_cache=cache if header["decoding"] else None,
        number=number,
    )


class VirtualBuffer:
    """See `backend.ReceiveBuffer`."""

    def __init__(self, slab: Slab | None, extent: Extent | None, model: str, profile: DeviceProfile) -> None:
        """Pass `slab` for a session that arrives on the device, `extent` for one that arrives suspended."""
        self.apart = False
        """Whether states have no decoder's cache."""
        self._slab, self.extent = slab, extent
        self._model, self._config = model, profile.config
        self._sizes = {"numbers": _NUMBERS.size, "window": profile.state_bytes}
        self._pages: dict[str, Tensor] = {}
        self.used_bytes = 0 if extent is None else extent.size

    @property
    def slab(self) -> Slab:
        """See `ReceiveBuffer.slab`."""
        assert self._slab is not None
        return self._slab

    @property
    def most_bytes(self) -> int:
        """See `ReceiveBuffer.most_bytes`."""
        return sum(self._sizes.values())

    def begin(self) -> None:
        """See `ReceiveBuffer.begin`."""
        self._pages.clear()

    def place(self, name: str, size: int, dtype: str = "", shape: Sequence[int] = ()) -> tuple[Tensor, ...]:
        """See `ReceiveBuffer.place`."""
        if self._sizes.get(name) != size:
            raise SnapshotRejectedError(f"{name[:64]} bytes", size, self._sizes.get(name))
        if name not in self._pages:
            self._pages[name] = torch.empty(size, dtype=torch.uint8)
        return (self._pages[name],)

    def check(self, header: Mapping[str, Any], names: Iterable[str]) -> None:
        """See `ReceiveBuffer.check`."""
        version = APART_VERSION if self.apart and header.get("decoding") else VERSION
        for field, wanted in (("version", version), ("model", self._model)):
            if header.get(field) != wanted:
                raise SnapshotRejectedError(field, header.get(field), wanted)
        if set(names) != self._sizes.keys() or self._pages.keys() != self._sizes.keys():
            raise SnapshotRejectedError("pages", sorted(self._pages), sorted(self._sizes))

    def state(self, header: Mapping[str, Any], names: Iterable[str]) -> VirtualState:
        """See `ReceiveBuffer.state`."""
        self.check(header, names)
        return restore(header, self._pages["numbers"], self.slab, self._config, apart=self.apart)

    def snapshot(self, header: Mapping[str, Any], names: Iterable[str]) -> Snapshot:
        """See `ReceiveBuffer.snapshot`."""
        self.check(header, names)
        return Snapshot(dict(header), dict(self._pages))


@cache
def _window(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8)
