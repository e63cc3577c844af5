"""What the engine needs of whatever holds and computes sessions' states.

The engine decides when something happens to a session; a backend knows what a state is. `tensor_backend` has
tensors on a device. Another implementation may have states that stand for such, and latencies that are given.
Belongs to the engine's thread, but for `decode` and transfers, which lanes run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from turboserve.worker.engine.hostpool import Extent, HostPool
from turboserve.worker.engine.pool import SlabPool
from turboserve.worker.engine.slab import Slab
from turboserve.worker.engine.snapshot import Snapshot
from turboserve.worker.engine.spec import EngineOptions, Rebuild, SessionSpec, TextEncoder
from turboserve.worker.engine.state import SessionState
from turboserve.worker.engine.stream_executor import Job, Wakeup
from turboserve.worker.engine.transfer import Transfer
from turboserve.worker.engine.work import ChunkWork, Work
from turboserve.worker.model.config import ModelConfig

if TYPE_CHECKING:
    from turboserve.worker.engine.decoding import Decoded, Decoding
    from turboserve.worker.engine.moving import Page
    from turboserve.worker.engine.session import Session

J = TypeVar("J", bound=Job)


class JobExecutor(Protocol[J]):
    """Does jobs in the order in which they are handed in, beside the engine's own work
    (`stream_executor.StreamExecutor`)."""

    @property
    def threaded(self) -> bool:
        """Whether a job may be done after `submit` has returned."""
        ...

    @property
    def load(self) -> int:
        """Jobs handed in and not collected."""
        ...

    @property
    def finished(self) -> bool:
        """Whether `collect` would give something."""
        ...

    def submit(self, job: J) -> None:
        """Hand a job in. What it reads must stay as it is until it is collected."""
        ...

    def collect(self) -> list[J]:
        """The jobs that are done, in order, each once. Raises `RuntimeError` if the lane has broken down."""
        ...


class ReceiveBuffer(Protocol):
    """Memory that is kept for a session on its way here (`receive_buffer.PagedReceiveBuffer`)."""

    @property
    def slab(self) -> Slab: ...

    @property
    def extent(self) -> Extent | None:
        """The piece of the host pool, of a session that arrives suspended."""
        ...

    @property
    def used_bytes(self) -> int:
        """Of the extent, from its beginning."""
        ...

    @property
    def most_bytes(self) -> int:
        """No state of this model is larger."""
        ...

    def begin(self) -> None:
        """Another attempt begins: nothing of the earlier ones is wanted."""
        ...

    def place(self, name: str, size: int, dtype: str = "", shape: Sequence[int] = ()) -> tuple[Tensor, ...]:
        """Memory for a page of `size` bytes, uint8 [n] each. Raises `SnapshotRejectedError`."""
        ...

    def check(self, header: Mapping[str, Any], names: Iterable[str]) -> object:
        """Whether the pages are those of one state of this model. Raises `SnapshotRejectedError`."""
        ...

    def state(self, header: Mapping[str, Any], names: Iterable[str]) -> SessionState:
        """The session whose pages are here. Raises `SnapshotRejectedError` unless they are one state's."""
        ...

    def snapshot(self, header: Mapping[str, Any], names: Iterable[str]) -> Snapshot:
        """The same of a session that arrived suspended, where it lies. Raises `SnapshotRejectedError`."""
        ...


class Backend(Protocol):
    """One replica of a model, with the memory of its sessions."""

    config: ModelConfig
    fingerprint: str
    """Of configuration and weights: states of sessions go on only where it is equal."""
    device: torch.device
    pool: SlabPool
    host: HostPool
    state_host_bytes: int
    """What one suspended session takes in host memory at most, also one that arrives there."""

    @property
    def text(self) -> TextEncoder: ...

    def executor(self, name: str, wakeup: Wakeup) -> JobExecutor[Any]:
        """A new lane. `wakeup` rings for each job that is done."""
        ...

    # States

    def fresh(self, spec: SessionSpec, slab: Slab) -> SessionState:
        """The state of a session that has made nothing."""
        ...

    def check(self, rebuild: Rebuild) -> None:
        """Raises `InvalidRebuildError`."""
        ...

    def rebuild(self, session: Session, rebuild: Rebuild) -> None:
        """Plan the passes that make a lost session whole, and its decoder's warming."""
        ...

    def leave(self, session: Session) -> Transfer:
        """What moves a session at rest to the host. Raises `HostPoolFullError` or
        `HostMemoryUnavailableError`; then the session is as before."""
        ...

    def arrive(self, snapshot: Snapshot, slab: Slab, extent: Extent | None) -> tuple[SessionState, Transfer]:
        """A state on its slab, and what fills it. `extent`: where the snapshot lies, if in the pool.

        Raises `SnapshotRejectedError`.
        """
        ...

    # A session's forwards

    def chunk(self, state: SessionState) -> ChunkWork:
        """The next chunk."""
        ...

    def recache(self, state: SessionState) -> Work:
        """The newest latents again, under a new prompt."""
        ...

    def replay(self, state: SessionState, parts: list[tuple[int, Tensor]]) -> Work:
        """Clean passes over kept latents: first frame and latents of each."""
        ...

    def set_prompt(self, state: SessionState, prompt: str, text: Tensor) -> None:
        """From its next forward on the session has this prompt. `text`: its embedding."""
        ...

    def finish(self, state: SessionState, chunk: ChunkWork) -> None:
        """Add a finished chunk to what the session remembers."""
        ...

    # Computing

    def forward(self, works: Sequence[Work]) -> list[Tensor]:
        """One forward of each; they have equally many frames. Repeating a call gives the same."""
        ...

    def decode(self, batch: Sequence[Decoding]) -> list[Decoded]:
        """Pictures of clean latents. Repeating a call gives the same."""
        ...

    # Moves

    def pages_in_use(self, session: Session) -> list[Page]:
        """Those that nothing in work is writing to."""
        ...

    def pages_quiesced(self, session: Session) -> tuple[dict[str, Any], list[Page]]:
        """Header and all pages of a session of which nothing is being computed."""
        ...

    def pages_of(self, snapshot: Snapshot) -> tuple[dict[str, Any], list[Page]]:
        """The same of a session in host memory."""
        ...

    def receive_buffer(self, *, on_host: bool) -> ReceiveBuffer:
        """Memory for a session that is to come, large enough for any state.

        Raises `SlabsExhaustedError`, `HostPoolFullError` or `HostMemoryUnavailableError`; then nothing has
        changed.
        """
        ...


class Replica(Protocol):
    """Models that an engine can run (`engine.Models`)."""

    def backend(self, options: EngineOptions) -> Backend:
        """Raises `BudgetTooSmallError` when not one slab fits, `HostMemoryUnavailableError`,
        `AttentionUnavailableError`."""
        ...
