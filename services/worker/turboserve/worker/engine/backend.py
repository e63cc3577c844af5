"""The engine's interface to the backend, which holds and computes sessions' states.

The engine decides when something happens to a session; a backend knows what a state is. `tensor_backend` has
tensors on a device. Another implementation may simulate states and latencies. All methods run on the engine's
thread, except `decode` and transfers, which stream executors run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from turboserve.static_frozen import statically_frozen
from turboserve.worker.engine.context_forwards import ReplayPart
from turboserve.worker.engine.control_encoder import ControlEncoder
from turboserve.worker.engine.decode_jobs import CacheApart, is_fast
from turboserve.worker.engine.interface import EngineOptions, Rebuild, SessionSpec, TextEncoder
from turboserve.worker.engine.memory import Extent, HostPool, Slab, SlabPool
from turboserve.worker.engine.parallel_forward import ForwardLoans
from turboserve.worker.engine.session import Session, Undecoded, UndecodedChunk
from turboserve.worker.engine.snapshot import Snapshot
from turboserve.worker.engine.state import SessionState
from turboserve.worker.engine.state_pages import Page
from turboserve.worker.engine.state_transfer import Transfer, TransferPurpose
from turboserve.worker.engine.streams import Job, Wakeup
from turboserve.worker.engine.work import ChunkWork, Work
from turboserve.worker.model.config import ModelConfig

J = TypeVar("J", bound=Job)


class JobExecutor(Protocol[J]):
    """Runs jobs in the order of submission, beside the engine (`streams.StreamExecutor`)."""

    @property
    def threaded(self) -> bool:
        """Whether a job may finish after `submit` has returned."""
        ...

    @property
    def load(self) -> int:
        """Number of jobs submitted and not collected."""
        ...

    @property
    def finished(self) -> bool:
        """Whether `collect` has something to return or raise."""
        ...

    def submit(self, job: J) -> None:
        """Submit a job. Its inputs must not change until the job is collected."""
        ...

    def collect(self) -> list[J]:
        """Return the finished jobs, in order, each once. Raises `RuntimeError` if the executor has failed."""
        ...


class ReceiveBuffer(Protocol):
    """Memory that is reserved for an arriving session (`receive_buffer.PagedReceiveBuffer`)."""

    @property
    def slab(self) -> Slab: ...

    @property
    def extent(self) -> Extent | None:
        """The piece of the host pool, if the session arrives suspended."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes used of the extent, from its beginning."""
        ...

    @property
    def most_bytes(self) -> int:
        """Largest size of a state of this model, bytes."""
        ...

    def begin(self) -> None:
        """Begin another attempt: drop what earlier attempts stored beside the slab."""
        ...

    def place(self, name: str, size: int, dtype: str = "", shape: Sequence[int] = ()) -> tuple[Tensor, ...]:
        """Memory for a page of `size` bytes, uint8 [n] each. Raises `SnapshotRejectedError`."""
        ...

    def check(self, header: Mapping[str, Any], names: Iterable[str]) -> object:
        """Check that the pages are those of one state of this model. Raises `SnapshotRejectedError`."""
        ...

    def state(self, header: Mapping[str, Any], names: Iterable[str]) -> SessionState:
        """The session's state from its pages. Raises `SnapshotRejectedError` unless they are one state's."""
        ...

    def snapshot(self, header: Mapping[str, Any], names: Iterable[str]) -> Snapshot:
        """The snapshot of a session that arrived suspended, in place. Raises `SnapshotRejectedError`."""
        ...


@statically_frozen(eq=False)
class Decoded:
    """The result of one decode, on the host except for the cache."""

    frames: Tensor
    """uint8 [N, H, W, 3]"""
    latents: Tensor
    """The decoded latents, [F, C, H, W]."""
    cache: dict[str, Tensor]
    """The session's decoder cache for its next latents."""


@dataclass(eq=False)
class Decoding:
    """One session's latents in the decode stage."""

    session: Session
    item: Undecoded
    """The first of the session's undecoded latents."""
    cache: dict[str, Tensor] | None
    """The session's cache before these latents; it is not changed."""
    context: tuple[Tensor, ...] = ()
    """Clean latents of the chunks before, the oldest first, where `cache` is a `CacheApart` or was made by
    the other one of two decoders."""
    ready_s: float = 0.0
    seconds: float = 0.0
    """Duration of the decode. 0: it raised an error, and the item was decoded alone."""

    @property
    def is_fast(self) -> bool:
        """Whether the chunk's configuration names the fast decoder."""
        chosen = self.item.fidelity if isinstance(self.item, UndecodedChunk) else None
        return chosen is not None and chosen.fast_decoder

    @property
    def is_usual(self) -> bool:
        """Whether it takes as long as any chunk's decoding. A first chunk has fewer frames, and the warming
        of a decoder has more latents than a chunk. Fast decodings are not those that the profile is of."""
        if self.cache is None or self.is_fast or not isinstance(self.item, UndecodedChunk):
            return False
        return isinstance(self.cache, CacheApart) or not is_fast(self.cache)


def next_decoding(session: Session) -> Decoding:
    """The decoding of the first of the session's undecoded latents."""
    item, cache = session.undecoded[0], session.state.decoder_cache
    decoding = Decoding(session, item, cache)
    if cache is None or not isinstance(item, UndecodedChunk):
        return decoding
    if isinstance(cache, CacheApart) or is_fast(cache) != decoding.is_fast:
        # The state may have the latents of this chunk already, and of the next one.
        recent = session.state.recent
        decoding.context = tuple(recent[: max(0, item.index - session.state.next_chunk + len(recent))])
    return decoding


class Backend(Protocol):
    """One replica of a model, with the memory of its sessions."""

    config: ModelConfig
    fingerprint: str
    """Digest of configuration and weights: a session's state continues only where it is equal."""
    device: torch.device
    pool: SlabPool
    host: HostPool
    state_host_bytes: int
    """Largest host memory of one suspended session, including one that arrives by migration, bytes."""

    @property
    def text(self) -> TextEncoder: ...

    @property
    def controls(self) -> ControlEncoder | None:
        """Encodes the model's typed controls. None: it takes none."""
        ...

    @property
    def parallel(self) -> ForwardLoans: ...

    @property
    def split(self) -> bool:
        """Whether another worker computed half of a row of the last forward (`parallel_forward`)."""
        ...

    def executor(self, name: str, wakeup: Wakeup) -> JobExecutor[Any]:
        """Create an executor. `wakeup` is signaled for each finished job."""
        ...

    # States

    def fresh(self, spec: SessionSpec, slab: Slab) -> SessionState:
        """The state of a session that has generated nothing."""
        ...

    def end_frame(self, state: SessionState) -> int | None:
        """Number of latent frames after which the session's video ends. None: it has no end."""
        ...

    def check(self, rebuild: Rebuild) -> None:
        """Check the latents of a rebuild. Raises `InvalidRebuildError`."""
        ...

    def rebuild(self, session: Session, rebuild: Rebuild) -> None:
        """Plan the passes that rebuild a lost session, and the warming of its decoder."""
        ...

    def borrows(self, session: Session) -> bool:
        """Whether another worker computes a part of the session's forwards."""
        ...

    def leave(self, session: Session, purpose: TransferPurpose = TransferPurpose.SUSPENSION) -> Transfer:
        """Create the transfer that moves a session at a chunk boundary to the host. For `RESIDENCY`, its
        state goes to a cell.

        Raises `HostPoolFullError` or `HostMemoryUnavailableError`; then the session is as before.
        """
        ...

    def arrive(self, snapshot: Snapshot, slab: Slab, extent: Extent | None) -> tuple[SessionState, Transfer]:
        """A state on its slab, and the transfer that fills it. `extent`: the snapshot's, if in the pool.

        Raises `SnapshotRejectedError`.
        """
        ...

    def store(self, snapshot: Snapshot) -> Transfer:
        """Create the transfer of a state in a cell to the memory of suspended sessions.

        Raises `HostPoolFullError` or `HostMemoryUnavailableError`; then nothing has changed.
        """
        ...

    # A session's forwards

    def chunk(self, state: SessionState) -> ChunkWork:
        """The work of the next chunk."""
        ...

    def recache(self, state: SessionState) -> Work:
        """The work that computes the newest latents again under a new prompt."""
        ...

    def replay(self, state: SessionState, parts: Sequence[ReplayPart]) -> Work:
        """The work of clean passes over kept latents."""
        ...

    def set_prompt(self, state: SessionState, prompt: str, text: Tensor) -> None:
        """Set the prompt of the session's next forwards. `text`: its embedding."""
        ...

    def finish(self, state: SessionState, chunk: ChunkWork) -> None:
        """Add a finished chunk's latents to the session's state."""
        ...

    # Computing

    def forward(self, works: Sequence[Work]) -> list[Tensor]:
        """Run one forward of each work, all of equally many frames. A repeated call gives the same result."""
        ...

    def decode(self, batch: Sequence[Decoding]) -> list[Decoded]:
        """Decode clean latents to frames. Repeating a call gives the same result."""
        ...

    # Migration

    def pages_in_use(self, session: Session) -> list[Page]:
        """The pages that no current work writes to."""
        ...

    def pages_quiesced(self, session: Session) -> tuple[dict[str, Any], list[Page]]:
        """Header and all pages of a session for which nothing is being computed."""
        ...

    def pages_of(self, snapshot: Snapshot) -> tuple[dict[str, Any], list[Page]]:
        """Header and all pages of a session in host memory."""
        ...

    def receive_buffer(self, *, on_host: bool, cell: bool = False) -> ReceiveBuffer:
        """Reserve memory for an arriving session, large enough for any state. `cell`: in a cell of the host.

        Raises `SlabsExhaustedError`, `HostPoolFullError` or `HostMemoryUnavailableError`; then nothing has
        changed.
        """
        ...


class Replica(Protocol):
    """Models that an engine can run (`models.Models`)."""

    def backend(self, options: EngineOptions) -> Backend:
        """Create the backend. Raises `BudgetTooSmallError` if no slab fits, `HostMemoryUnavailableError`,
        `AttentionUnavailableError`."""
        ...
