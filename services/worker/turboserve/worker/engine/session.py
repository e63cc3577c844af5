"""A session as the engine schedules it: its state, what it works on, and where its viewer is."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from turboserve.worker.engine.spec import Control
from turboserve.worker.engine.state import SessionState
from turboserve.worker.engine.work import ChunkWork, Work


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


@dataclass(eq=False)
class Session:
    """One admitted session. `work` is None exactly at a chunk boundary."""

    state: SessionState
    max_lead_s: float
    playhead: Playhead
    work: Work | None = None
    controls: deque[PendingControl] = field(default_factory=deque)
    applying: list[Control] = field(default_factory=list)
    """Controls that the recache in `work` applies."""
    announced: bool = False
    """`SessionReady` was sent."""
    paused: bool = False
    ended: bool = False
    """`SessionEnded` was sent."""
    suspending: bool = False
    replay: list[tuple[int, Tensor]] = field(default_factory=list)
    """Of a session that is being rebuilt: first frame and latents of each clean pass still to be started."""
    warming: Tensor | None = None
    """Of a session that is being rebuilt: latents that still have to go through the decoder."""
    due_at_s: float | None = None
    """When the chunk in work, or the next, became due; None while it is not."""
    started_at_s: float | None = None
    denoised_at_s: float = 0.0
    decoded: bool = False
    """The chunk in work was decoded and delivered."""

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
    def decoding(self) -> bool:
        """Whether the session waits for its decoder."""
        if self.warming is not None:
            return True
        return self.chunk is not None and self.chunk.clean is not None and not self.decoded
