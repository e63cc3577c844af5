"""A session as the engine schedules it: its state, its current work, and its viewer's position."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from turboserve.worker.engine.events import ChunkTimings, Step
from turboserve.worker.engine.spec import Control
from turboserve.worker.engine.state import SessionState
from turboserve.worker.engine.transfer import Transfer
from turboserve.worker.engine.work import ChunkWork, Work

MAX_UNDECODED = 2
"""Undecoded chunks at which a session begins no other: one is decoded while the next is denoised."""


@dataclass
class Playhead:
    """A viewer's position in the video: as last reported, and extrapolated since."""

    position_s: float = 0.0
    reported_at_s: float = 0.0
    playing: bool = False

    def at(self, now: float, generated_s: float, trust_s: float) -> float:
        """Seconds of video played by `now`: at most what is generated, and `trust_s` past the last report."""
        if not self.playing:
            return self.position_s
        moved = min(max(0.0, now - self.reported_at_s), trust_s)
        return max(self.position_s, min(self.position_s + moved, generated_s))


@dataclass
class PendingControl:
    """A control that waits for a chunk boundary, and its prompt's embedding once it is computed."""

    control: Control
    text: Tensor | None = None
    encoded: Step | None = None
    """The batch that encoded the prompt, if the engine records it."""

    @property
    def ready(self) -> bool:
        """Whether the control waits for nothing but the boundary."""
        return self.control.prompt is None or self.text is not None


@dataclass(frozen=True, eq=False)
class Undecoded:
    """Clean latents that wait for the session's decoder, or are in it."""

    latents: Tensor
    """[F, C, H, W]"""
    index: int | None
    """Index of the chunk. None: latents of an earlier run of the session, which only warm its decoder."""
    control_seq: int = 0
    timings: ChunkTimings | None = None
    """Timings of the chunk, except the end of its decoding."""


@dataclass(frozen=True)
class QuiesceRequest:
    """A request to quiesce a session at a chunk boundary at which no viewer waits for it."""

    quiet_s: float
    """Idle window: seconds for which the next chunk should not become due."""
    asked_s: float
    """When the request was made, monotonic seconds on the engine's clock."""
    patience_s: float
    """Time after which any boundary is accepted, seconds."""
    number: int = 0
    """Number of the request, repeated in the `SessionQuiesced` that answers it."""

    def quiet_at(self, now: float) -> float:
        """Seconds for which the next chunk must not become due; zero: any boundary is accepted.

        The value shrinks until the patience ends. The time between two chunks of a session depends on the
        other sessions, and a boundary that comes soon may be the best one.
        """
        left_s = self.asked_s + self.patience_s - now
        return self.quiet_s * left_s / self.patience_s if left_s > 0 else 0.0


@dataclass(eq=False)
class Session:
    """One admitted session. `work` is None exactly at a chunk boundary."""

    state: SessionState
    max_lead_s: float
    playhead: Playhead
    delivered: int = 0
    """Index after the last chunk that was decoded and delivered."""
    work: Work | None = None
    undecoded: deque[Undecoded] = field(default_factory=deque)
    """Latents in the order of the video; the first is in the decode executor if `in_decode_executor`."""
    in_decode_executor: bool = False
    transfer: Transfer | None = None
    """Set while the state is transferred to the host or back: nothing else happens to the session."""
    controls: deque[PendingControl] = field(default_factory=deque)
    applying: list[Control] = field(default_factory=list)
    """Controls that the recache in `work` applies."""
    announced: bool = False
    """Whether `SessionReady` was sent."""
    paused: bool = False
    ended: bool = False
    """Whether `SessionEnded` was sent."""
    suspending: bool = False
    quiesce_request: QuiesceRequest | None = None
    quiesced: bool = False
    """Whether the session is quiesced: `SessionQuiesced` was sent, or the session was imported quiesced."""
    replay: list[tuple[int, Tensor]] = field(default_factory=list)
    """First frame and latents of each clean pass that a rebuild has not started yet."""
    due_at_s: float | None = None
    """When the current or next chunk became due; None while it is not due."""
    started_at_s: float | None = None
    steps: list[Step] = field(default_factory=list)
    """Batches that computed for the session since the latents of its last chunk were clean."""
    unpaced_until: int = 0
    """Chunks before this one are due wherever the viewer is."""
    isolated_until: int = 0
    """Chunks before this one are computed in separate batches, while nothing else computes."""

    @property
    def isolated(self) -> bool:
        """See `isolated_until`."""
        return self.delivered < self.isolated_until

    @property
    def waits(self) -> bool:
        """Whether the session waits for a batch of any stage, or is in one."""
        prompts = self.transfer is None and any(not pending.ready for pending in self.controls)
        return self.forwarding or bool(self.undecoded) or prompts

    @property
    def stage(self) -> str:
        """What the next forward computes, as in `Step.stage`; empty for the pass over clean latents."""
        if self.chunk is not None:
            return "denoise" if self.chunk.clean is None else ""
        return "recache" if self.applying else "replay"

    @property
    def name(self) -> str:
        """The session's name."""
        return self.state.session

    @property
    def chunk(self) -> ChunkWork | None:
        """The current chunk."""
        return self.work if isinstance(self.work, ChunkWork) else None

    @property
    def forwarding(self) -> bool:
        """Whether the session waits for a forward."""
        return self.work is not None and self.work.done < self.work.total

    @property
    def decodable(self) -> bool:
        """Whether the session waits for a place in the decode executor."""
        return bool(self.undecoded) and not self.in_decode_executor

    @property
    def warming(self) -> bool:
        """Whether the session's decoder is not yet ready for the next chunk."""
        return bool(self.undecoded) and any(each.index is None for each in self.undecoded)

    @property
    def busy(self) -> bool:
        """Whether anything of the session is being computed, decoded or transferred."""
        return self.work is not None or bool(self.undecoded) or self.transfer is not None

    @property
    def held_up(self) -> bool:
        """Whether the next chunk must wait: for a stream executor, or because the session is quiesced."""
        lanes = self.transfer is not None or self.warming or len(self.undecoded) >= MAX_UNDECODED
        return lanes or self.quiesced
