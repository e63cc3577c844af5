"""A session as the engine schedules it: what it does, its current work, and its viewer's position."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from turboserve.static_frozen import statically_frozen
from turboserve.worker.engine.activity import (
    STARTING,
    Activity,
    Offloaded,
    QuiesceRequest,
    Running,
    Starting,
    Transferring,
)
from turboserve.worker.engine.fidelity import Fidelity
from turboserve.worker.engine.interface import ChunkTimings, Control, Step
from turboserve.worker.engine.pending_control import PendingControl
from turboserve.worker.engine.state import SessionState
from turboserve.worker.engine.state_transfer import Transfer, TransferPurpose
from turboserve.worker.engine.work import ChunkWork, Work

if TYPE_CHECKING:
    from pydantic import JsonValue

MAX_UNDECODED = 2
"""Undecoded chunks at which a session begins no other: one is decoded while the next is denoised."""


@dataclass(slots=True)
class Playhead:
    """A viewer's position in the video: as last reported, and extrapolated since."""

    position_s: float = 0.0
    reported_at_s: float = 0.0
    playing: bool = False
    shown_from_s: float = 0.0
    """Media time before which the viewer discards the video, seconds."""

    @property
    def known_s(self) -> float:
        """Least position of the viewer: as reported, or where it skips to."""
        return self.shown_from_s if self.shown_from_s > self.position_s else self.position_s

    @property
    def advancing(self) -> bool:
        """Whether the position grows with time. A viewer that has yet to skip waits for the chunk there."""
        return self.playing and self.position_s >= self.shown_from_s

    def at(self, now: float, generated_s: float, trust_s: float) -> float:
        """Seconds of video played by `now`: at most what is generated, and `trust_s` past the observation."""
        # Each gather asks this of each session: min, max and properties would take most of the time.
        position_s, moved_s = self.position_s, now - self.reported_at_s
        if not self.playing or position_s < self.shown_from_s:
            return self.known_s
        moved_s = trust_s if moved_s > trust_s else moved_s
        reached_s = min(position_s + moved_s, generated_s)
        return reached_s if reached_s > position_s else position_s


@dataclass(frozen=True, slots=True)
class FirstChunk:
    """The first chunk that a viewer sees of what it has requested: a session, a resumption, a new scene."""

    index: int
    since_s: float
    """When the request was made, monotonic seconds on the engine's clock."""
    discards: bool = False
    """Whether the viewer discards the video before the chunk, so that it has nothing left to play."""


@statically_frozen(eq=False)
class UndecodedChunk:
    """Clean latents of a chunk that wait for the session's decoder, or are in it."""

    latents: Tensor
    """[F, C, H, W]"""
    index: int
    control_seq: int
    fidelity: Fidelity | None
    """Configuration of the chunk. None: the best."""
    lowered: bool
    """See `ChunkReady.lowered`."""
    timings: ChunkTimings
    """Timings of the chunk, except the end of its decoding."""


@dataclass(frozen=True, slots=True, eq=False)
class DecoderContext:
    """Clean latents of an earlier run of the session, which only warm its decoder. They come first."""

    latents: Tensor
    """[F, C, H, W]"""


Undecoded = UndecodedChunk | DecoderContext


@dataclass(slots=True, eq=False)
class ChunkTask:
    """The forwards of the session's current chunk."""

    work: ChunkWork
    due_at_s: float
    """When the task became due, monotonic seconds on the engine's clock."""
    started_at_s: float | None = None
    """When the first forward was gathered."""

    @property
    def stage(self) -> str | None:
        """Stage of the forward. None: the pass over the clean latents, which is not recorded as a `Step`."""
        return "denoise" if self.work.clean is None else None


@dataclass(slots=True, eq=False)
class ContextTask:
    """Forwards that compute the session's context again, before its next chunk."""

    work: Work
    due_at_s: float
    """See `ChunkTask`."""
    stage: Literal["recache", "replay"]
    applies: Sequence[Control]
    """Controls that take effect with the end of the task."""
    started_at_s: float | None = None
    """See `ChunkTask`."""


Task = ChunkTask | ContextTask

# A union in a call is built again by each call.
_COMPUTING, ELSEWHERE = (Running, Starting), (Transferring, Offloaded)
"""Activities of a session that computes, and of one whose state is elsewhere or on its way."""


@dataclass(eq=False, slots=True)
class Session:
    """One active session. `task` is None exactly at a chunk boundary."""

    state: SessionState
    max_lead_s: float
    playhead: Playhead
    activity: Activity = STARTING
    task: Task | None = None
    delivered: int = 0
    """Index after the last chunk that was decoded and delivered."""
    undecoded: deque[Undecoded] = field(default_factory=deque)
    """Latents in the order of the video; the first is in the decode executor if `in_decode_executor`."""
    in_decode_executor: bool = False
    controls: deque[PendingControl] = field(default_factory=deque)
    paused: bool = False
    ended: bool = False
    """Whether `SessionEnded` was sent."""
    suspending: bool = False
    """Whether the state is to move to the host at the next boundary."""
    quiesce_request: QuiesceRequest | None = None
    steps: list[Step] = field(default_factory=list)
    """Batches that computed for the session since the latents of its last chunk were clean."""
    unpaced_until: int = 0
    """Chunks before this one are due wherever the viewer is."""
    isolated_until: int = 0
    """Chunks before this one are computed in separate batches, while nothing else computes."""
    lowered: bool = False
    """See `ChunkReady.lowered`, for the newest chunk."""
    raised_at_s: float = -inf
    """When its configuration was last raised, monotonic seconds on the engine's clock."""
    first: FirstChunk | None = None
    """The chunk whose deadline counts from a request, until it is delivered and after."""
    offloading: bool = False
    """Whether the session leaves its slab for another one at the next boundary."""
    arriving: Transfer | None = None
    """The transfer whose later layers are still being copied, while the session computes."""
    lead_s: float = -inf
    """See `Pacing.lead_at`, when the session's last chunk began."""
    pages_read_at_s: float = -inf
    """When its pages were last read for a migration, monotonic seconds on the engine's clock."""
    name: str = field(init=False)
    """The session's name, which all its states have."""

    def __post_init__(self) -> None:
        self.name = self.state.session

    @property
    def may_compute(self) -> bool:
        """Whether forwards of the session may begin."""
        return isinstance(self.activity, _COMPUTING)

    @property
    def has_slab(self) -> bool:
        """Whether a slab is the session's, or is being filled or emptied for it."""
        match self.activity:
            case Offloaded():
                return False
            case Transferring(transfer=transfer):
                return transfer.purpose is not TransferPurpose.STORAGE
            case _:
                return True

    @property
    def complete(self) -> bool:
        """Whether the session's whole state is in a slab."""
        return self.arriving is None and not isinstance(self.activity, ELSEWHERE)

    def conditions(self, pending: PendingControl) -> tuple[str, Mapping[str, JsonValue]]:
        """Prompt and values of controls from `pending` on, which is one of `controls`."""
        prompt, values = self.state.prompt, self.state.values
        for each in self.controls:
            prompt = prompt if each.control.prompt is None else each.control.prompt
            values = values if each.control.values is None else each.control.values
            if each is pending:
                break
        return prompt, values

    @property
    def dropped_at(self) -> float | None:
        """When viewers requested to discard what they have, if the control for it waits for a boundary."""
        if not self.controls:
            return None
        waiting = [pending.control.drops_buffer_since_s for pending in self.controls]
        return max((since_s for since_s in waiting if since_s is not None), default=None)

    @property
    def work(self) -> Work | None:
        """The forwards of the current task."""
        return None if self.task is None else self.task.work

    @property
    def chunk(self) -> ChunkWork | None:
        """The current chunk."""
        return self.task.work if isinstance(self.task, ChunkTask) else None

    @property
    def forwarding(self) -> bool:
        """Whether the session waits for a forward."""
        return self.task is not None and self.task.work.done < self.task.work.total

    @property
    def encoding(self) -> bool:
        """Whether a control waits for its embedding, and the session's state is not being transferred."""
        waits = any(not pending.ready and not pending.elsewhere for pending in self.controls)
        return waits and not isinstance(self.activity, ELSEWHERE)

    @property
    def isolated(self) -> bool:
        """See `isolated_until`."""
        return self.delivered < self.isolated_until

    @property
    def waits(self) -> bool:
        """Whether the session waits for a batch of any stage, or is in one."""
        return self.forwarding or bool(self.undecoded) or self.encoding

    @property
    def decodable(self) -> bool:
        """Whether the session waits for a place in the decode executor. The decoder's cache arrives last."""
        return bool(self.undecoded) and not self.in_decode_executor and self.arriving is None

    @property
    def warming(self) -> bool:
        """Whether the session's decoder is not yet ready for the next chunk."""
        return bool(self.undecoded) and isinstance(self.undecoded[0], DecoderContext)

    @property
    def busy(self) -> bool:
        """Whether anything of the session is being computed, decoded or transferred."""
        transferring = self.arriving is not None or isinstance(self.activity, Transferring)
        return self.task is not None or bool(self.undecoded) or transferring

    @property
    def held_up(self) -> bool:
        """Whether the next chunk must wait: for a stream executor, or because the session is quiesced."""
        if self.undecoded and (self.warming or len(self.undecoded) >= MAX_UNDECODED):
            return True
        return not isinstance(self.activity, _COMPUTING)
