"""Memory for a migrating session at its target: a reserved slab, or host memory, filled page by page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from turboserve.worker.engine.decode_jobs import FAST, CacheApart
from turboserve.worker.engine.errors import SnapshotRejectedError
from turboserve.worker.engine.kv_ring import KVRing
from turboserve.worker.engine.memory import ALIGNMENT, Extent, HostPool, Slab, SlabLayout, aligned, size_of
from turboserve.worker.engine.snapshot import (
    DECODER,
    Snapshot,
    fidelity_of,
    fixed_of,
    floor_of,
    is_apart,
    pinned_of,
    values_of,
)
from turboserve.worker.engine.state import SessionState
from turboserve.worker.engine.state_pages import BY_POSITION, PROMPT, RECENT, flat_bytes, position_parts
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.rope import Rotation

OWN_LIMIT = 64
"""Largest number of whole tensors of one session."""
DIMENSIONS_LIMIT = 8
SMALL_BYTES = 1 << 20
"""Memory for the generator and the prompt's embedding beside latents and decoder cache, bytes."""
HOSTED = ("keys", "values", "text_keys", "text_values", "sink_keys")
"""A slab's tensors in host memory, in order."""
_TYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "uint8", "int64")}
_OWN_NAME = re.compile(rf"text|generator|{RECENT}/\d{{1,9}}|{re.escape(DECODER)}[A-Za-z0-9_.]{{1,128}}")


def own_limit(config: ModelConfig, cache_bytes: int) -> int:
    """Largest memory of a session beside its slab, bytes. `cache_bytes`: size of the decoder's cache."""
    latents = torch.Size(config.latent_shape).numel() * torch.float32.itemsize
    chunks = -(-config.window_frames // config.frames_per_chunk) + 1
    # The first round may leave latents of chunks that are too old by the rest. The others have none.
    return cache_bytes + 4 * chunks * latents + SMALL_BYTES


class HostAllocation:
    """A piece of the host pool for a session that arrives suspended: a slab's tensors, then whole tensors."""

    def __init__(self, extent: Extent, slab: Slab, own: Tensor) -> None:
        """`own`: uint8 [n], memory for whole tensors, at the end of the extent."""
        self.extent, self.slab = extent, slab
        self._own = own
        self._used = 0

    @property
    def used_bytes(self) -> int:
        """Bytes used of the extent, from its beginning."""
        return self.extent.size - aligned(self._own.numel()) + self._used

    def clear(self) -> None:
        """Discard the whole tensors; they will be received again."""
        self._used = 0

    def take(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Memory for a whole tensor. Raises `SnapshotRejectedError`."""
        size = torch.Size(shape).numel() * dtype.itemsize
        if self._used + aligned(size) > self._own.numel():
            raise SnapshotRejectedError("bytes", self._used + size, f"at most {self._own.numel()}")
        place = self._own[self._used : self._used + size]
        self._used += aligned(size)
        return place.view(dtype).view(*shape)


def host_bytes(layout: SlabLayout, own_bytes: int) -> int:
    """Host memory for any session of this layout, with `own_bytes` beside its slab, in bytes."""
    return size_of(_hosted(layout, own_bytes))


def allocate_host(
    host: HostPool, layout: SlabLayout, own_bytes: int, *, cell: bool = False
) -> HostAllocation:
    """Allocate host memory for any session of this layout, with `own_bytes` beside its slab. `cell`: a cell.

    Raises `HostPoolFullError` or `HostMemoryUnavailableError`; then nothing has changed.
    """
    like = _hosted(layout, own_bytes)
    extent = host.take_cell() if cell else host.take(size_of(like))
    try:
        tensors = host.tensors(extent, like)
    except BaseException:
        host.give_back(extent)
        raise
    return HostAllocation(extent, Slab(-1, *(tensors[name] for name in HOSTED)), tensors["own"])


def _hosted(layout: SlabLayout, own_bytes: int) -> dict[str, Tensor]:
    """Types and shapes of the tensors in such an allocation."""
    frame = (layout.tokens_per_frame, layout.heads, layout.head_dim)
    text = (layout.layers, layout.text_len, layout.heads, layout.head_dim)
    window = (layout.layers, layout.frames, *frame)
    sink = (layout.layers, layout.kept_sink_frames, *frame)
    shapes = dict(zip(HOSTED, (window, window, text, text, sink), strict=True))
    like = {name: torch.empty(shape, dtype=layout.dtype, device="meta") for name, shape in shapes.items()}
    room = aligned(own_bytes + OWN_LIMIT * ALIGNMENT)
    like["own"] = torch.empty(room, dtype=torch.uint8, device="meta")
    return like


class PagedReceiveBuffer:
    """Receives pages in any order and any number of times; the last version of a page counts."""

    def __init__(
        self,
        slab: Slab,
        config: ModelConfig,
        model: str,
        rotation: Rotation,
        device: torch.device,
        own_bytes: int,
        room: HostAllocation | None = None,
        *,
        apart: bool = False,
    ) -> None:
        """Map the slab's tensors to pages.

        `model`: see `snapshot.parts`. `own_bytes`: largest memory beside the slab. `room`: where `slab` lies,
        if the session arrives suspended. `apart`: see `EngineOptions.decode_apart`.
        """
        self.slab = slab
        self.room = room
        self._config, self._model, self._rotation, self._device = config, model, rotation, device
        self._apart = apart
        self._limit_bytes = own_bytes
        self._by_position = dict(zip(BY_POSITION, (slab.keys, slab.values, slab.sink_keys), strict=True))
        self._prompt = dict(zip(PROMPT, (slab.text_keys, slab.text_values), strict=True))
        self._own: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Begin another attempt: drop what earlier attempts stored beside the slab."""
        self._own.clear()
        if self.room is not None:
            self.room.clear()

    @property
    def extent(self) -> Extent | None:
        """The piece of the host pool, if the session arrives suspended."""
        return None if self.room is None else self.room.extent

    @property
    def used_bytes(self) -> int:
        """Bytes used of the extent, from its beginning."""
        return 0 if self.room is None else self.room.used_bytes

    @property
    def most_bytes(self) -> int:
        """Largest size of a state of this model, bytes."""
        slab = [*self._by_position.values(), *self._prompt.values()]
        return self._limit_bytes + sum(t.numel() * t.element_size() for t in slab)

    @property
    def own_bytes(self) -> int:
        """Bytes taken beside the slab."""
        return sum(t.numel() * t.element_size() for t in self._own.values())

    def place(self, name: str, size: int, dtype: str = "", shape: Sequence[int] = ()) -> tuple[Tensor, ...]:
        """Memory for a page of `size` bytes, uint8 [n] each. Raises `SnapshotRejectedError`."""
        base, _, position = name.partition("/")
        if base in self._by_position:
            tensor = self._by_position[base]
            if not (position.isascii() and position.isdigit() and int(position) < tensor.shape[1]):
                raise SnapshotRejectedError("ring position", name[:64], f"below {tensor.shape[1]}")
            found = position_parts(tensor, int(position))
        elif name in self._prompt:
            found = (flat_bytes(self._prompt[name]),)
        else:
            found = (flat_bytes(self._room(name, dtype, tuple(shape))),)
        room = sum(part.numel() for part in found)
        if room != size:
            raise SnapshotRejectedError(f"{name[:64]} bytes", size, room)
        return found

    def check(self, header: Mapping[str, Any], names: Iterable[str]) -> list[int]:
        """Check that the pages are those of one state of this model. Returns its frames by ring position.

        Pages that are not among `names` are dropped. Raises `SnapshotRejectedError`.
        """
        names = set(names)
        is_apart(header)
        if header.get("model") != self._model:
            raise SnapshotRejectedError("model", header.get("model"), self._model)
        fidelity_of(header, self._config)
        fixed_of(header)
        floor_of(header)
        pinned_of(header)
        values_of(header)
        frames = [int(frame) for frame in header["ring"]["slots"]]
        self._own = {name: tensor for name, tensor in self._own.items() if name in names}
        limit = self._config.window_frames
        if len(frames) > limit or len(set(frames)) != len(frames):
            raise SnapshotRejectedError("ring frames", frames[: limit + 1], f"at most {limit}, each once")
        tensors = self._by_position.items()
        needed = {f"{n}/{p}" for n, t in tensors for p in range(min(len(frames), t.shape[1]))}
        needed |= set(PROMPT) | {"generator"}
        if missing := needed - names:
            raise SnapshotRejectedError("pages", f"without {sorted(missing)[0]}", f"{len(needed)} pages")
        _, *frame = self._config.latent_shape
        recent = self._recent()
        if any(list(t.shape) != [self._config.frames_per_chunk, *frame] for t in recent):
            raise SnapshotRejectedError(RECENT, [tuple(t.shape) for t in recent], self._config.latent_shape)
        if int(header["next_chunk"]) < len(recent):
            raise SnapshotRejectedError("next_chunk", header["next_chunk"], f"at least {len(recent)}")
        return frames

    def state(self, header: Mapping[str, Any], names: Iterable[str]) -> SessionState:
        """The session's state from its pages. Raises `SnapshotRejectedError` unless they are one state's."""
        frames = self.check(header, names)
        ring = KVRing(self.slab, self._config, self._rotation)
        ring.restore(frames, int(header["ring"]["next"]), int(header["ring"]["shift"]))
        generator = torch.Generator(self._device)
        generator.set_state(self._own["generator"])
        state = SessionState(
            session=str(header["session"]),
            slab=self.slab,
            ring=ring,
            generator=generator,
            seed=int(header["seed"]),
            prompt=str(header["prompt"]),
            text=self._own.get("text"),
            values=values_of(header),
            fidelity=fidelity_of(header, self._config),
            fixed_fidelity=fixed_of(header),
            floor=floor_of(header),
            pinned=pinned_of(header),
            control_seq=int(header["control_seq"]),
            next_chunk=int(header["next_chunk"]),
            recent=self._recent(),
        )
        if is_apart(header) or (self._apart and header["decoding"]):
            state.decoder_cache = CacheApart()
        elif header["decoding"]:
            state.decoder_cache = {
                name.removeprefix(DECODER): t for name, t in self._own.items() if name.startswith(DECODER)
            }
        return state

    def snapshot(self, header: Mapping[str, Any], names: Iterable[str]) -> Snapshot:
        """The snapshot of a session that arrived suspended, in place. Only its latents are copied.

        Raises the errors of `check`.
        """
        assert self.room is not None
        frames = len(self.check(header, names))
        tensors = {name: t[:, :frames] for name, t in self._by_position.items()}
        recent = self._recent()
        if recent:
            first = recent[0]
            tensors[RECENT] = self.room.take(first.dtype, (len(recent) * len(first), *first.shape[1:]))
            torch.cat(recent, out=tensors[RECENT])
        whole = {name: t for name, t in self._own.items() if not name.startswith(f"{RECENT}/")}
        return Snapshot(dict(header), tensors | self._prompt | whole)

    def _recent(self) -> list[Tensor]:
        numbers = sorted(int(name.split("/")[1]) for name in self._own if name.startswith(f"{RECENT}/"))
        return [self._own[f"{RECENT}/{number}"] for number in numbers]

    def _room(self, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
        if _OWN_NAME.fullmatch(name) is None:
            raise SnapshotRejectedError("page", name[:64], "a part of a session")
        kind = _TYPES.get(dtype)
        if kind is None:
            raise SnapshotRejectedError(f"{name} dtype", dtype[:32], sorted(_TYPES))
        if len(shape) > DIMENSIONS_LIMIT or any(type(size) is not int or size < 0 for size in shape):
            raise SnapshotRejectedError(f"{name} shape", shape[:DIMENSIONS_LIMIT], "sizes")
        known = self._own.get(name)
        if known is not None and (known.dtype, tuple(known.shape)) == (kind, shape):
            return known
        if known is None and name.startswith(DECODER):
            # There is memory for one decoder's cache. Earlier rounds may have brought the other's.
            fast = name.startswith(DECODER + FAST)
            for each in [each for each in self._own if each.startswith(DECODER)]:
                if each.startswith(DECODER + FAST) is not fast:
                    del self._own[each]
        size = kind.itemsize
        for extent in shape:
            size *= extent
        taken = self.own_bytes - (0 if known is None else known.numel() * known.element_size())
        if size + taken > self._limit_bytes or (known is None and len(self._own) >= OWN_LIMIT):
            raise SnapshotRejectedError(f"{name} bytes", size + taken, f"at most {self._limit_bytes}")
        if self.room is not None:
            self._own[name] = self.room.take(kind, shape)
        else:
            device = torch.device("cpu") if name == "generator" else self._device
            self._own[name] = torch.empty(shape, dtype=kind, device=device)
        return self._own[name]
