"""A session as the engine schedules it: its state, what it works on, and where its viewer is."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from turboserve.worker.engine.events import ChunkTimings
from turboserve.worker.engine.spec import Control
from turboserve.worker.engine.state import SessionState
from turboserve.worker.engine.transfer import Transfer
from turboserve.worker.engine.work import ChunkWork, Work

MAX_UNDECODED = 2
"""A session begins no chunk while so many of its chunks wait for their decoding: one in the lane while the
next is denoised, and no more."""


@dataclass
class Playhead:
    """Where a viewer is in the video, as last reported, and as it has probably moved on since."""

    position_s: float = 0.0
    reported_at_s: float = 0.0
    playing: bool = False

    def at(self, now: float, generated_s: float, trust_s: float) -> float:
        """Seconds of video played by `now`: never past what is generated, nor long past the last report."""
        if not self.playing:
            return self.position_s
        moved = min(max(0.0, now - self.reported_at_s), trust_s)
        return max(self.position_s, min(self.position_s + moved, generated_s))


@dataclass
class PendingControl:
    """A control that waits for a chunk boundary, and its prompt's embedding once the text stage gave it."""

    control: Control
    text: Tensor | None = None

    @property
    def ready(self) -> bool:
        """Whether nothing but the boundary is missing."""
        return self.control.prompt is None or self.text is not None


@dataclass(frozen=True, eq=False)
class Undecoded:
    """Clean latents that wait for the session's decoder, or are in it."""

    latents: Tensor
    """[F, C, H, W]"""
    index: int | None
    """The chunk; None: of an earlier life of the session, only to warm its decoder."""
    control_seq: int = 0
    timings: ChunkTimings | None = None
    """Of the chunk; when it is decoded, is not known yet."""


@dataclass(frozen=True)
class QuiesceRequest:
    """A wish that a session stand still at a chunk boundary, at a moment when no viewer waits for it."""

    quiet_s: float
    """The next chunk should not become due for so long."""
    asked_s: float
    """When it was wished, monotonic, engine's clock."""
    patience_s: float
    """After so long any boundary will do."""
    number: int = 0
    """Goes with the `SessionQuiesced` that answers it."""

    def quiet_at(self, now: float) -> float:
        """For how long the next chunk must not become due; zero: any boundary will do.

        Ever less until patience ends: how much time there is between two of a session's chunks depends on who
        else is served, and what comes soon may be the best that there is.
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
    """In the order of the video; the first of them is in the decode lane if `in_lane`."""
    in_lane: bool = False
    transfer: Transfer | None = None
    """Set while the state is on its way to the host or back: then nothing else happens to the session."""
    controls: deque[PendingControl] = field(default_factory=deque)
    applying: list[Control] = field(default_factory=list)
    """Controls that the recache in `work` applies."""
    announced: bool = False
    """`SessionReady` was sent."""
    paused: bool = False
    ended: bool = False
    """`SessionEnded` was sent."""
    suspending: bool = False
    quiesce_request: QuiesceRequest | None = None
    quiesced: bool = False
    """It stands still: `SessionQuiesced` was sent, or it was adopted so."""
    replay: list[tuple[int, Tensor]] = field(default_factory=list)
    """Of a session that is being rebuilt: first frame and latents of each clean pass still to be started."""
    due_at_s: float | None = None
    """When the chunk in work, or the next, became due; None while it is not."""
    started_at_s: float | None = None
    isolated_until: int = 0
    """Chunks before this one are computed in batches of their own, while nothing else computes."""

    @property
    def isolated(self) -> bool:
        """See `isolated_until`."""
        return self.delivered < self.isolated_until

    @property
    def waits(self) -> bool:
        """Whether it waits for a batch of any stage, or is in one."""
        prompts = self.transfer is None and any(not pending.ready for pending in self.controls)
        return self.forwarding or bool(self.undecoded) or prompts

    @property
    def name(self) -> str:
        """The session's name."""
        return self.state.session

    @property
    def chunk(self) -> ChunkWork | None:
        """The chunk in work."""
        return self.work if isinstance(self.work, ChunkWork) else None

    @property
    def forwarding(self) -> bool:
        """Whether the session waits for a forward."""
        return self.work is not None and self.work.done < self.work.total

    @property
    def decodable(self) -> bool:
        """Whether the session waits for a place in the decode lane."""
        return bool(self.undecoded) and not self.in_lane

    @property
    def warming(self) -> bool:
        """Whether its decoder is not yet where the session's next chunk needs it."""
        return bool(self.undecoded) and any(each.index is None for each in self.undecoded)

    @property
    def busy(self) -> bool:
        """Whether anything of it is being computed or moved, so that it is not one whole at rest."""
        return self.work is not None or bool(self.undecoded) or self.transfer is not None

    @property
    def held_up(self) -> bool:
        """Whether the next chunk has to wait: for a lane, or because the session is to stand still."""
        lanes = self.transfer is not None or self.warming or len(self.undecoded) >= MAX_UNDECODED
        return lanes or self.quiesced
