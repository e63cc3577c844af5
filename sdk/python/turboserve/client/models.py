"""What the API answers. Members that a newer gateway adds are ignored."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Phase = Literal["requested", "active", "migrating", "suspended", "terminated", "failed"] | str
"""Where a session is in its life. A newer gateway may have further phases."""
Activity = Literal["watching", "paused", "idle", "ended"] | str
"""What the user wants of a session. A newer gateway may have further values."""


Role = Literal["viewer", "controller"] | str
"""What the holder of a link or ticket may do. A `viewer` watches, a `controller` also controls."""


class _Answer(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Quality(_Answer):
    """Limits of the quality of a session's chunks, while its worker has too little time."""

    floor: float | None = None
    """Least quality of a chunk, where 1 is the best configuration's. None: the worker's own floor."""
    pin: bool = False
    """Whether every chunk is generated at the best quality."""


class SessionInfo(_Answer):
    """One session, as the gateway last described it."""

    id: str
    phase: Phase
    activity: Activity
    """What the user wants of the session, independent of its phase."""
    model: str
    width: int | None = None
    """Width of a frame, pixels. None: the model's own, see `Model.sizes`."""
    height: int | None = None
    prompt: str
    """The newest accepted prompt."""
    seed: int
    metadata: dict[str, str]
    epoch: int
    """Number of the current ownership. 0: no worker has owned the session yet."""
    worker: str | None
    target: str | None
    """The worker that the session is migrating to."""
    next_chunk: int
    """Index of the first chunk that is not generated yet."""
    controls: dict[str, Any] = {}
    """The newest accepted values of the model's controls. Those that are not here have the model's own."""
    control_seq: int
    """Number of the newest accepted prompt or control."""
    applied_control_seq: int
    """Number of the newest prompt or control that a chunk was generated under."""
    newest_event: int | None = None
    """Number of the newest event that this answer reflects: an answer with a lower number is older. None: the
    gateway is of an earlier version."""
    playhead_s: float
    """Media time that viewers have reached, seconds."""
    quality: Quality | None = None
    """Limits of the quality. None: the worker may lower it to its own floor."""
    max_lead_s: float | None = None
    """Maximum seconds of video that are generated ahead of the playhead. None: the worker's own."""
    recording: str | None = None
    """The recording that runs, or ran when the session ended. None: none."""
    reason: str | None
    """Why the session ended, or why it waits."""
    created_at: datetime
    updated_at: datetime

    @property
    def ended(self) -> bool:
        """Whether the session has ended for good."""
        return self.phase in ("terminated", "failed")


class Receipt(_Answer):
    """An accepted prompt. `AsyncSession.applied` waits for the chunk that shows it."""

    session: str
    prompt_id: str
    control_seq: int
    """Number of the prompt in its session. Chunks carry the number of their prompt."""
    accepted_at: datetime


class ControlReceipt(_Answer):
    """An accepted value of a control. `AsyncSession.applied` waits for the chunk that shows it."""

    session: str
    control_id: str
    control_seq: int
    """Number of the value among the session's prompts and controls."""
    accepted_at: datetime


class Ticket(_Answer):
    """Opens streams of one session for about a minute, with `?ticket=` in the address."""

    ticket: str
    role: Role
    expires_at: datetime


class Link(_Answer):
    """A link to one session."""

    id: str
    session: str
    role: Role
    label: str
    created_at: datetime
    created_by: str | None
    """Id of the API key that created the link. None: the gateway needs no keys."""
    expires_at: datetime
    revoked_at: datetime | None


class NewLink(Link):
    """A created link. Only this answer has its token."""

    token: str
    """The `key` of a client that may use this session only."""
    url: str
    """Path of the page that plays the session."""
    embed_url: str
    """Path of the player for frames of other pages."""


class Decision(_Answer):
    """One decision of the scheduler about a session."""

    epoch: int
    worker: str | None
    kind: str
    reason: str
    numbers: dict[str, float]
    at: datetime


class Hop(_Answer):
    """One step of a chunk from the request to the screen."""

    name: str
    """The step, such as `denoised`. The API's description lists them."""
    at: datetime
    by: str
    """Whose clock `at` is of."""
    since_s: float | None = None
    """Seconds since the hop before. Between two clocks it may be below 0. None: the first hop."""


class ChunkHistory(_Answer):
    """How one chunk came about, step by step."""

    session: str
    index: int
    epoch: int
    worker: str
    control_seq: int
    """Number of the prompt that the chunk shows."""
    bytes: int
    compute_s: float
    """From the first forward to the packaging, seconds."""
    slack_s: float | None = None
    """Video that the viewer had left when it was published, seconds. None: not known."""
    decision: Decision | None = None
    """Why this worker. None: not the first chunk of its ownership, or no longer known."""
    total_s: float
    """From the first hop to the last, seconds."""
    hops: list[Hop]


class Migration(_Answer):
    """A migration that has begun. `session.migrated` or `session.migration_abandoned` ends it."""

    session: str
    epoch: int
    worker: str | None
    """The worker that runs the session until the commit."""
    target: str | None
    """The worker that the session migrates to. None: the session is there already."""
    newest_event: int | None = None
    """As in `SessionInfo`."""


class ModelControl(_Answer):
    """A control that a model takes."""

    name: str
    description: str
    value_schema: dict[str, Any] = Field(alias="schema")
    """JSON schema of a value."""
    fixed: bool = False
    """Whether the value is set when a session is created (`controls`), and never again."""


class ServingKind(_Answer):
    """Ready workers of one kind that serve a model at one size."""

    kind: str
    workers: int
    sessions_per_worker: float
    price_per_worker_hour: float | None
    """None: no price is set."""
    price_per_session_hour: float | None
    """Price of a session on a full worker. None: no price is set."""
    currency: str | None


class ModelSize(_Answer):
    """A frame size at which ready workers serve a model."""

    width: int | None
    """Pixels. None: not known."""
    height: int | None
    default: bool
    """Whether sessions of the model that name no size have this one."""
    workers: int
    capacity: int
    sessions: int
    kinds: tuple[ServingKind, ...]
    """The kinds of these workers, and their prices."""


class Model(_Answer):
    """A model that at least one ready worker serves."""

    id: str
    default: bool
    workers: int
    capacity: int
    sessions: int
    controls: tuple[ModelControl, ...] = ()
    """What the model takes beside a prompt: see `AsyncSession.set_control`."""
    sizes: tuple[ModelSize, ...] = ()
    """The frame sizes that a session may ask for, the default first."""


class WorkerClass(_Answer):
    """What a worker serves of one model at one frame size."""

    model: str
    width: int | None = None
    height: int | None = None
    capacity: int
    """Number of these sessions that the worker holds at once without others."""
    sessions: int


class Worker(_Answer):
    """One worker of the deployment. `model`, its size and `capacity` are those of its first class."""

    id: str
    model: str
    width: int | None = None
    """Width of the frames that it generates, pixels. None: not known."""
    height: int | None = None
    phase: str
    capacity: int
    sessions: int
    device: str
    host: str
    reason: str | None
    classes: tuple[WorkerClass, ...] = ()
    """The models and frame sizes that the worker serves. Empty: a gateway of an earlier release."""


class Event(BaseModel):
    """One event of a session, with the session right after it. `more` has the members of its type."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str
    sequence: int
    """Number of the event in its session: 1, 2, 3, …"""
    id: str
    at: datetime
    phase: Phase
    activity: Activity
    epoch: int
    control_seq: int
    worker: str | None = None
    target: str | None = None

    @property
    def more(self) -> dict[str, Any]:
        """Members of this type of event alone, such as `prompt_id` and `chunk_index`."""
        return dict(self.__pydantic_extra__ or {})


class Hello(_Answer):
    """The first message of a stream: the session's state, and where the stream begins."""

    protocol_version: int
    session: str
    phase: Phase
    activity: Activity
    prompt: str
    model: str
    seed: int
    controls: dict[str, Any] = {}
    """The newest accepted values of the model's controls."""
    control_seq: int
    next: int
    """Index of the first chunk of the stream."""
    start_s: float
    """Media time of the stream's first frame, seconds."""
    events_after: int
    newest_event: int
    max_message_bytes: int
    report_interval_s: float
    role: Role = "controller"
    """What this client may do."""
    gateways: tuple[str, ...] = ()
    """Addresses of all gateways, which serve the same sessions. Empty: the gateway does not know them."""


class End(_Answer):
    """The last message of a stream: the session has ended, and all its video was received."""

    phase: Phase
    reason: str | None = None
    last: int
    """Index of the last chunk; -1: there was none."""

    @property
    def summary(self) -> str:
        """Phase and reason, such as `failed: out of memory`."""
        return self.phase if self.reason is None else f"{self.phase}: {self.reason}"


@dataclass(frozen=True)
class Skip:
    """A prompt with `drop_buffer` is shown by the next chunk, and the stream continues there."""

    index: int
    """Index of the next chunk."""
    start_s: float
    """Media time of its first frame, seconds."""
    control_seq: int
    """Number of the prompt that it shows."""
    discarded: tuple[int, ...] = ()
    """Indices of the received chunks that the caller does not get. `keep_skipped`: none."""


@dataclass(frozen=True)
class VideoFormat:
    """The format of the chunks that follow, until another format comes."""

    mime: str
    """MIME type with codec, as a browser's `SourceBuffer` takes it."""
    width: int
    height: int
    fps: float
    init: bytes = field(repr=False)
    """Init segment of the fragmented MP4."""


@dataclass(frozen=True)
class Chunk:
    """One chunk of video: a closed fragment that starts with a key frame."""

    index: int
    """0, 1, 2, …: each once in a session."""
    start_s: float
    """Media time of its first frame, seconds."""
    duration_s: float
    control_seq: int
    """Number of the prompt that it was generated under."""
    epoch: int
    worker: str
    compute_s: float
    """Time to generate it, seconds."""
    published_at: datetime
    format: VideoFormat
    fragment: bytes = field(repr=False)

    @property
    def end_s(self) -> float:
        """Media time after its last frame, seconds."""
        return self.start_s + self.duration_s

    @property
    def mp4(self) -> bytes:
        """The chunk as an MP4 file of its own."""
        return self.format.init + self.fragment
