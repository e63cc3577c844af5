"""Commands of the session table. The shell carries them out in the order in which they are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue

from turboserve.contracts.fidelity import QualityLimits
from turboserve.static_frozen import statically_frozen
from turboserve.worker.service.events import LogPlace, Ownership
from turboserve.worker.service.migration_commands import MigrationCommand


@dataclass(frozen=True)
class ReadLogEnd:
    """Read the last entry of `chunk.<session>`; answer with `LogEndRead`."""

    session: str
    query: int
    known: LogPlace | None = None
    """Place of a chunk that was in the log: the newest one, or the newest before the broker was away. None:
    no chunk is known to have been in it."""


@dataclass(frozen=True)
class FetchLatents:
    """Fetch the kept latents of the newest chunks before `next_chunk`; answer with `LatentsFetched`."""

    session: str
    run: int
    query: int
    next_chunk: int
    epoch: int
    """Epoch of the newest chunk in the log. No viewer saw the chunk of latents with its index and another
    epoch."""


@dataclass(frozen=True)
class Limits:
    """What the owner of a session allows. See `SessionRecord`."""

    quality: QualityLimits | None = None
    max_lead_s: float | None = None


@dataclass(frozen=True)
class Admit:
    """Give the session a slab and start it at `next_chunk`, from the fetched latents unless that is 0."""

    session: str
    run: int
    next_chunk: int
    prompt: str
    seed: int
    control_seq: int
    playhead_s: float
    isolated: bool = False
    """Whether the first chunks are computed alone: the session's input may have made a device fail."""
    traceparent: str | None = None
    """Trace context of the row's assignment. None: not traced."""
    prompt_traceparent: str | None = None
    """Trace context of a prompt or control that no chunk shows yet. None: none, or it was not traced."""
    limits: Limits = Limits()
    waiting_s: float | None = None
    """Age of the request that the next chunk is the first to answer, seconds. None: it answers none."""
    drops_buffer: bool = False
    """Whether viewers discard the video before the next chunk."""
    values: Mapping[str, JsonValue] = field(default_factory=dict)
    """Values of typed controls: `SessionRecord.controls`. Empty if they are not known."""
    model: str = ""
    """Name of the session's class."""


@dataclass(frozen=True)
class GenerateNext:
    """Generate the session's next chunk wherever its playhead is: viewers wait for it, and do not play."""

    session: str
    run: int


@dataclass(frozen=True)
class Evict:
    """Release all memory of this run, on device and host, and its unpublished chunks."""

    session: str
    run: int


@dataclass(frozen=True)
class Suspend:
    """Move the state to host memory at the next chunk boundary."""

    session: str
    run: int


@dataclass(frozen=True)
class Resume:
    """Move the state back into a slab and continue."""

    session: str
    run: int
    playhead_s: float
    traceparent: str | None = None
    """Trace context of the row's assignment. None: not traced."""
    waiting_s: float | None = None
    """See `Admit`."""


@dataclass(frozen=True)
class SetLimits:
    """Change what the owner allows, from the next chunk boundary on."""

    session: str
    run: int
    control_seq: int
    limits: Limits


@dataclass(frozen=True)
class DropBuffer:
    """Note that viewers discard the video before the first chunk under control `control_seq`."""

    session: str
    run: int
    control_seq: int
    waiting_s: float
    """Age of the request, seconds."""


@dataclass(frozen=True)
class PauseGeneration:
    """Keep the state where it is, and generate no further chunk."""

    session: str
    run: int
    control_seq: int


@dataclass(frozen=True)
class ResumeGeneration:
    session: str
    run: int
    control_seq: int


@dataclass(frozen=True)
class Quiesce:
    """Quiesce the session at a chunk boundary at which no viewer waits; answer with `Quiesced`."""

    session: str
    run: int
    number: int
    """Number of this request. The answer to an earlier, withdrawn request is ignored."""


@dataclass(frozen=True)
class Unquiesce:
    """Continue a quiesced session."""

    session: str
    run: int
    traceparent: str | None = None
    """Trace context of the row's assignment. None: not traced."""


@dataclass(frozen=True)
class SetConditions:
    """Change the prompt and the values of controls at the next chunk boundary."""

    session: str
    run: int
    control_seq: int
    prompt: str
    traceparent: str | None = None
    """Trace context of the row's newest prompt or control. None: not traced."""
    values: Mapping[str, JsonValue] | None = field(default_factory=dict)
    """Values of typed controls: `SessionRecord.controls`. None: not known, those of before stay."""


@statically_frozen()
class SetPlayhead:
    session: str
    run: int
    playhead_s: float
    playing: bool
    observed_at: float | None = None
    """When the viewer was at `playhead_s`, monotonic seconds. Playback has continued since. None: now."""


@statically_frozen()
class PublishChunk:
    """Append the packaged chunk through the fence; answer with `Published`, whatever the outcome."""

    session: str
    run: int
    index: int
    ownership: Ownership
    began: int
    contiguous_from: int = 0
    """See `ChunkHeader`, also for `began`."""
    last_control: int = 0
    """Number of the control of the chunk before it in the log; 0: none."""
    drop_buffer_seq: int = 0
    """See `SessionRecord`."""
    before: int | None = None
    """With it, the chunk's clean latents are sent to the hot store first, for the worker that takes the
    session over: see `LatentsHeader`. None: an earlier attempt sent them."""


@statically_frozen()
class ForgetChunk:
    """Drop the packaged chunk."""

    session: str
    run: int
    index: int


@dataclass(frozen=True)
class FailSession:
    """Report to the state store that the session cannot continue."""

    session: str
    epoch: int
    reason: str


@dataclass(frozen=True)
class StopGenerating:
    """Generate nothing until the next `GenerateUntil`: the lease is over."""


@dataclass(frozen=True)
class GenerateUntil:
    """Generate chunks, and begin no work on them once the monotonic clock reaches `until`.

    The engine compares the clock itself. A process that was stopped may resume with an engine step before it
    handles `StopGenerating`.
    """

    until: float


@dataclass(frozen=True)
class Report:
    """Renew and send a load report at once: what is held has changed, or the table needs the current rows."""


Command = (
    ReadLogEnd
    | FetchLatents
    | Admit
    | GenerateNext
    | Evict
    | Suspend
    | Resume
    | PauseGeneration
    | ResumeGeneration
    | Quiesce
    | Unquiesce
    | MigrationCommand
    | SetConditions
    | SetLimits
    | DropBuffer
    | SetPlayhead
    | PublishChunk
    | ForgetChunk
    | FailSession
    | StopGenerating
    | GenerateUntil
    | Report
)
