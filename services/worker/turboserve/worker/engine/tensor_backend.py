"""The backend that computes: states are tensors on a device, and stream executors are threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from turboserve.worker.engine.backend import Decoded, Decoding
from turboserve.worker.engine.context_forwards import RecacheWork, ReplayPart, ReplayWork
from turboserve.worker.engine.control_encoder import ControlEncoder, given_chunk
from turboserve.worker.engine.decode_jobs import CacheApart
from turboserve.worker.engine.decoding_apart import DecodingApart
from turboserve.worker.engine.decoding_here import DecodingHere
from turboserve.worker.engine.errors import AttentionUnavailableError
from turboserve.worker.engine.fp8_attention import fp8_attention, require_fp8
from turboserve.worker.engine.interface import Decoder, EngineOptions, Rebuild, SessionSpec, TextEncoder
from turboserve.worker.engine.kv_ring import KVRing
from turboserve.worker.engine.layer_arrival import LayerArrival
from turboserve.worker.engine.memory import Extent, HostPool, Slab, SlabLayout, SlabPool, size_of
from turboserve.worker.engine.parallel_forward import ParallelForward
from turboserve.worker.engine.rebuild import check_rebuild, plan_rebuild
from turboserve.worker.engine.receive_buffer import PagedReceiveBuffer, allocate_host, host_bytes, own_limit
from turboserve.worker.engine.session import DecoderContext, Session
from turboserve.worker.engine.snapshot import Snapshot, parts, prepare
from turboserve.worker.engine.state import SessionState
from turboserve.worker.engine.state_pages import Page, pages_in_use, pages_of, pages_quiesced
from turboserve.worker.engine.state_transfer import Transfer, TransferDirection, TransferPurpose
from turboserve.worker.engine.streams import StreamExecutor, Wakeup, settle
from turboserve.worker.engine.varlen import VarlenMemory, require_varlen
from turboserve.worker.engine.work import ChunkWork, Row, RowsForward, RowsMemory, Work
from turboserve.worker.model.block import AttentionMemory
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.schedule import Schedule
from turboserve.worker.model.transformer import CausalWanTransformer


@dataclass(frozen=True)
class AttentionKind:
    """How the rows of a forward attend."""

    memory: Callable[[Sequence[Row]], AttentionMemory]
    kernel: SDPBackend | None = None
    """The only kernel allowed. None: PyTorch chooses."""

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Compute attention by this kernel while the body runs."""
        if self.kernel is None:
            yield
            return
        with sdpa_kernel(self.kernel):
            yield


KINDS = {
    "rows": AttentionKind(RowsMemory),
    "flash": AttentionKind(RowsMemory, SDPBackend.FLASH_ATTENTION),
    "cudnn": AttentionKind(RowsMemory, SDPBackend.CUDNN_ATTENTION),
    "varlen": AttentionKind(VarlenMemory),
    "fp8": AttentionKind(partial(RowsMemory, by=fp8_attention)),
}
"""Kinds by name. `varlen` computes all rows in one call; the others compute each row in its own call, by the
kernel that PyTorch chooses or by the named one. `fp8` alone gives another result than the rest: see
`fp8_attention`."""


@torch.inference_mode()
def attention_kind(name: str, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> AttentionKind:
    """The kind of this name. Raises `AttentionUnavailableError` if the device lacks it for such heads."""
    if name not in KINDS:
        raise AttentionUnavailableError(name, f"is not one of {', '.join(KINDS)}")
    kind = KINDS[name]
    if name == "varlen":
        require_varlen(device, dtype)
    elif name == "fp8":
        require_fp8(config.num_heads, config.head_dim, device)
    elif kind.kernel is not None:
        tokens = torch.zeros(1, config.num_heads, 8, config.head_dim, device=device, dtype=dtype)
        try:
            with kind.chosen():
                F.scaled_dot_product_attention(tokens, tokens, tokens)
        except RuntimeError as error:
            raise AttentionUnavailableError(
                name, f"{dtype} on {device}: {str(error).splitlines()[0]}"
            ) from error
    return kind


class TensorBackend:
    """See `backend.Backend`."""

    def __init__(
        self,
        model: CausalWanTransformer,
        text: TextEncoder,
        decoder: Decoder,
        fingerprint: str,
        options: EngineOptions,
        compiler: str | None,
        controls: ControlEncoder | None = None,
        fast_decoder: Decoder | None = None,
    ) -> None:
        """Allocate the slabs.

        `fingerprint`: see `state_fingerprint`. `compiler`: see `RowsForward`.

        Raises `BudgetTooSmallError`, `HostMemoryUnavailableError` and `AttentionUnavailableError`.
        """
        weight = model.patch_embedding.weight
        self.config, self.fingerprint = model.config, fingerprint
        self.device, self.text, self.decoder, self.controls = weight.device, text, decoder, controls
        self.apart = DecodingApart(decoder, weight.device, weight.dtype) if options.decode_apart else None
        """Decodes the chunks if the sessions' states have no decoder's caches."""
        self.here = DecodingHere(decoder, fast_decoder, weight.device)
        cache_bytes = 0 if options.decode_apart else self.here.cache_bytes
        self._own_bytes = own_limit(model.config, cache_bytes)
        layout = SlabLayout.of(model.config, weight.dtype)
        self.state_host_bytes = host_bytes(layout, self._own_bytes)
        self.pool = SlabPool(layout, options.slab_bytes, self.device)
        # One cell more than sessions outside: a state leaves before the next one has returned.
        cells = options.host_sessions + 1 if options.host_sessions else 0
        pinned = self.device.type == "cuda"
        self.host = HostPool(options.host_bytes, pinned, cells, self.state_host_bytes)
        self._overlap = options.overlap
        self._model = model
        self._schedule = Schedule(model.config)
        self._kind = attention_kind(options.attention, model.config, weight.device, weight.dtype)
        self._alone = RowsForward(model, self._kind.memory, compiler)
        self.parallel = ParallelForward(model, self._alone)

    @property
    def split(self) -> bool:
        """See `Backend.split`."""
        return self.parallel.borrowed is not None and self.parallel.split

    def executor(self, name: str, wakeup: Wakeup) -> StreamExecutor[Any]:
        """See `Backend.executor`."""
        return StreamExecutor(name, self.device, wakeup, self._overlap)

    # States

    def fresh(self, spec: SessionSpec, slab: Slab) -> SessionState:
        """See `Backend.fresh`."""
        ring = KVRing(slab, self.config, self._model.rotation)
        return SessionState.begin(spec, slab, ring, torch.Generator(self.device))

    def end_frame(self, state: SessionState) -> int | None:
        """See `Backend.end_frame`. It is the model's, the same for all sessions."""
        return self.config.session_frames

    def check(self, rebuild: Rebuild) -> None:
        """See `Backend.check`."""
        check_rebuild(rebuild, self.config)

    def rebuild(self, session: Session, rebuild: Rebuild) -> None:
        """See `Backend.rebuild`."""
        latents = rebuild.latents.to(self.device)
        sink = None if rebuild.sink is None else rebuild.sink.to(self.device)
        parts = torch.split(latents, self.config.frames_per_chunk)
        plan_rebuild(session, rebuild, parts, sink, self.config)
        session.undecoded.append(DecoderContext(latents))

    def borrows(self, session: Session) -> bool:
        """See `Backend.borrows`."""
        return self.parallel.borrows(session.state)

    @torch.inference_mode()
    def leave(self, session: Session, purpose: TransferPurpose = TransferPurpose.SUSPENSION) -> Transfer:
        """See `Backend.leave`."""
        header, tensors = parts(session.state, self.fingerprint)
        return self._to_host(session.name, header, tensors, purpose)

    @torch.inference_mode()
    def store(self, snapshot: Snapshot) -> Transfer:
        """See `Backend.store`."""
        return self._to_host(
            snapshot.session, snapshot.header, dict(snapshot.tensors), TransferPurpose.STORAGE
        )

    def _to_host(
        self, session: str, header: Mapping[str, Any], tensors: dict[str, Tensor], purpose: TransferPurpose
    ) -> Transfer:
        cell = purpose is TransferPurpose.RESIDENCY
        extent = self.host.take_cell() if cell else self.host.take(size_of(tensors))
        try:
            targets = self.host.tensors(extent, tensors)
        except BaseException:
            self.host.give_back(extent)
            raise
        snapshot = Snapshot(header, targets)
        return Transfer(session, TransferDirection.LEAVING, snapshot, extent, targets, tensors, purpose)

    def arrive(self, snapshot: Snapshot, slab: Slab, extent: Extent | None) -> tuple[SessionState, Transfer]:
        """See `Backend.arrive`."""
        state, targets = prepare(
            snapshot, slab, self.config, self.fingerprint, self._model.rotation, self.device
        )
        if self.apart is not None and state.decoder_cache is not None:
            state.decoder_cache = CacheApart()
        arrival = LayerArrival(snapshot.session, self.config.num_layers, self.device)
        state.ring.arrives(arrival)
        return state, Transfer(
            snapshot.session,
            TransferDirection.ARRIVING,
            snapshot,
            extent,
            targets,
            snapshot.tensors,
            arrival=arrival,
        )

    # A session's forwards

    def chunk(self, state: SessionState) -> ChunkWork:
        """See `Backend.chunk`."""
        given = None if state.next_chunk else given_chunk(self.controls, state.values, self.config)
        return ChunkWork(state, self.config, self._schedule, given=given)

    def recache(self, state: SessionState) -> Work:
        """See `Backend.recache`."""
        return RecacheWork(state, self.config, self._schedule)

    def replay(self, state: SessionState, parts: Sequence[ReplayPart]) -> Work:
        """See `Backend.replay`."""
        return ReplayWork(state, self.config, self._schedule, parts)

    @torch.inference_mode()
    def set_prompt(self, state: SessionState, prompt: str, text: Tensor) -> None:
        """See `Backend.set_prompt`."""
        state.prompt, state.text = prompt, text
        projected = self._model.project_text(text.unsqueeze(0).to(state.slab.keys.dtype))
        state.ring.set_text(projected, row=0)

    def finish(self, state: SessionState, chunk: ChunkWork) -> None:
        """See `Backend.finish`."""
        assert chunk.clean is not None
        state.remember(chunk.clean.to(state.slab.keys.dtype), self.config)

    # Computing

    def forward(self, works: Sequence[Work]) -> list[Tensor]:
        """See `Backend.forward`. Flows [F, C, H, W]."""
        with self._kind.chosen():
            rows = [work.row() for work in works]
            if self.parallel.borrowed is not None:
                return self.parallel(rows)
            return list(self._alone(rows).unbind(0))

    @torch.inference_mode()
    def decode(self, batch: Sequence[Decoding]) -> list[Decoded]:
        """See `Backend.decode`."""
        return self.here(batch) if self.apart is None else self.apart(batch)

    # Migration

    def pages_in_use(self, session: Session) -> list[Page]:
        """See `Backend.pages_in_use`. Waits for launched work to write its pages: another thread reads
        them."""
        settle(self.device)
        return pages_in_use(session, self.config)

    def pages_quiesced(self, session: Session) -> tuple[dict[str, Any], list[Page]]:
        """See `Backend.pages_quiesced`."""
        settle(self.device)
        return pages_quiesced(session, self.config, self.fingerprint)

    def pages_of(self, snapshot: Snapshot) -> tuple[dict[str, Any], list[Page]]:
        """See `Backend.pages_of`."""
        return pages_of(snapshot, self.config)

    def receive_buffer(self, *, on_host: bool, cell: bool = False) -> PagedReceiveBuffer:
        """See `Backend.receive_buffer`."""
        room = None
        if on_host or cell:
            room = allocate_host(self.host, self.pool.layout, self._own_bytes, cell=cell)
        slab = self.pool.acquire() if room is None else room.slab
        config, rotation = self.config, self._model.rotation
        apart = self.apart is not None
        return PagedReceiveBuffer(
            slab, config, self.fingerprint, rotation, self.device, self._own_bytes, room, apart=apart
        )
