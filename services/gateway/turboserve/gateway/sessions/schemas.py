"""Schemas of sessions in REST requests and answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field

from turboserve.allocation.classes import SessionClass
from turboserve.contracts.base import ID_PATTERN, Text
from turboserve.contracts.fidelity import LARGEST_LEAD_S, Tier
from turboserve.contracts.sessions import (
    METADATA_KEYS_LIMIT,
    METADATA_VALUE_LIMIT,
    PROMPT_LIMIT,
    SEED_LIMIT,
    Phase,
    SessionRecord,
)
from turboserve.contracts.worker_offers import FRAME_LIMIT
from turboserve.gateway.public import (
    ModelName,
    NewestEvent,
    PublicActivity,
    PublicInput,
    PublicOutput,
    Timestamp,
    activity_of,
)
from turboserve.gateway.sessions.parameters import InitialControls

METADATA_KEY_LIMIT = 64


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be blank")
    return text


PromptText = Annotated[
    Text,
    Field(
        min_length=1,
        max_length=PROMPT_LIMIT,
        description="What the video shows. Not blank.",
        examples=["a red circle moving left"],
    ),
    AfterValidator(_not_blank),
]
_Key = Annotated[Text, Field(min_length=1, max_length=METADATA_KEY_LIMIT)]
_Value = Annotated[Text, Field(max_length=METADATA_VALUE_LIMIT)]
SessionId = Annotated[str, Field(description="Id of the session.", examples=["ses_5f3a9c"])]
ControlValues = Annotated[
    dict[str, Any],
    Field(
        description="The newest accepted values of the model's controls, by name. Controls that are not here "
        "have the model's own.",
        examples=[{"steer": "left"}],
    ),
]


class QualityInput(PublicInput):
    """What a worker may do to the quality of the session's chunks while it has too little time."""

    floor: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Least quality of a chunk, where 1 is the best configuration's. `null`: the worker's own "
        "floor.",
        examples=[0.9],
    )
    pin: bool = Field(
        False, description="Whether every chunk is generated at the best quality.", examples=[False]
    )


_QualityInput = Annotated[
    QualityInput | None,
    Field(
        description="Limits of the quality. `null`: the worker may lower it to its own floor.",
        examples=[{"floor": 0.9, "pin": False}],
    ),
]
_LeadInput = Annotated[
    float | None,
    Field(
        gt=0,
        le=LARGEST_LEAD_S,
        description="Maximum seconds of video that are generated ahead of the playhead; a worker raises it "
        "to one chunk. With a short lead, a prompt is on screen sooner. `null`: the worker's own.",
        examples=[0.75],
    ),
]


_Side = Annotated[int, Field(ge=1, le=FRAME_LIMIT)] | None


class NewSession(PublicInput):
    """A session to create. Only `prompt` is required."""

    prompt: PromptText
    model: Annotated[str, Field(pattern=ID_PATTERN)] | None = Field(
        None,
        description="One of `/v1/models`. `null`: the gateway's default model.",
        examples=["toyworld"],
    )
    width: _Side = Field(
        None,
        description="Width of a frame, pixels: with `height`, one of the `sizes` of the model in "
        "`/v1/models`. `null`: the size that `/v1/models` marks `default`.",
        examples=[128],
    )
    height: _Side = Field(None, description="Height of a frame, pixels: see `width`.", examples=[128])
    seed: int | None = Field(
        None,
        ge=0,
        le=SEED_LIMIT,
        description="Seed of the noise: the same model, prompt and seed give the same video where no chunk "
        "is lowered (see `quality`). `null`: random.",
        examples=[7],
    )
    metadata: dict[_Key, _Value] = Field(
        {},
        max_length=METADATA_KEYS_LIMIT,
        description="The client's own data. It is stored and not interpreted.",
        examples=[{"project": "demo"}],
    )
    controls: InitialControls = {}
    quality: _QualityInput = None
    max_lead_s: _LeadInput = None
    record: Annotated[
        bool,
        Field(description="Whether the session's video is recorded from its beginning.", examples=[False]),
    ] = False


class SessionChange(PublicInput):
    """What to change of a session. Members that are left out stay."""

    quality: _QualityInput = None
    max_lead_s: _LeadInput = None

    @property
    def changes(self) -> tuple[Literal["quality", "max_lead_s"], ...]:
        """The members that the request has."""
        names: tuple[Literal["quality", "max_lead_s"], ...] = ("quality", "max_lead_s")
        return tuple(name for name in names if name in self.model_fields_set)


class Links(PublicOutput):
    """Paths of the session's resources."""

    self: str = Field(description="The session.", examples=["/v1/sessions/ses_5f3a9c"])
    stream: str = Field(
        description="Video and events over a WebSocket.", examples=["/v1/sessions/ses_5f3a9c/stream"]
    )
    video: str = Field(
        description="The video as one MP4 file.", examples=["/v1/sessions/ses_5f3a9c/stream.mp4"]
    )
    events: str = Field(
        description="Events as server-sent events.", examples=["/v1/sessions/ses_5f3a9c/events"]
    )
    prompts: str = Field(description="Where to post a prompt.", examples=["/v1/sessions/ses_5f3a9c/prompts"])
    controls: str = Field(
        description="Where to post a control's value.", examples=["/v1/sessions/ses_5f3a9c/controls"]
    )
    pause: str = Field(description="Where to post a pause.", examples=["/v1/sessions/ses_5f3a9c/pause"])
    resume: str = Field(
        description="Where to post a resumption.", examples=["/v1/sessions/ses_5f3a9c/resume"]
    )
    migrate: str = Field(
        description="Where to post a migration.", examples=["/v1/sessions/ses_5f3a9c/migrate"]
    )
    decisions: str = Field(
        description="The scheduler's decisions.", examples=["/v1/sessions/ses_5f3a9c/decisions"]
    )

    @classmethod
    def of(cls, session: str) -> Self:
        base = f"/v1/sessions/{session}"
        return cls(
            self=base,
            stream=f"{base}/stream",
            video=f"{base}/stream.mp4",
            events=f"{base}/events",
            prompts=f"{base}/prompts",
            controls=f"{base}/controls",
            pause=f"{base}/pause",
            resume=f"{base}/resume",
            migrate=f"{base}/migrate",
            decisions=f"{base}/decisions",
        )


class Quality(PublicOutput):
    """Limits of the quality of a session's chunks."""

    floor: float | None = Field(
        description="Least quality of a chunk, where 1 is the best configuration's. `null`: the worker's own "
        "floor.",
        examples=[0.9],
    )
    pin: bool = Field(description="Whether every chunk is generated at the best quality.", examples=[False])


class Playout(PublicOutput):
    """How urgent a session is: what its newest chunk says that was sent to a viewer."""

    slack_s: float = Field(
        description="Playout slack now: seconds of video that the viewer with the least has left.",
        examples=[1.9],
    )
    credit_s: float | None = Field(
        description="Service credit when the chunk was published, seconds. `null`: not known.", examples=[1.5]
    )
    tier: Tier | None = Field(
        description="Tier when the chunk was published. `null`: not known.", examples=["relaxed"]
    )


class Session(PublicOutput):
    """One session as its tenant sees it."""

    id: SessionId
    phase: Phase = Field(description="Where the session is in its life.", examples=["active"])
    activity: PublicActivity = Field(
        description="What the user wants: `watching`, `paused`, `idle` (no viewer for a while), or `ended`.",
        examples=["watching"],
    )
    model: ModelName = Field(description="Model of the session.", examples=["toyworld"])
    width: int | None = Field(
        description="Width of a frame, pixels. `null`: the model's own, see its `sizes` in `/v1/models`.",
        examples=[None],
    )
    height: int | None = Field(description="Height of a frame, pixels: see `width`.", examples=[None])
    prompt: str = Field(description="The newest accepted prompt.", examples=["a red circle moving left"])
    seed: int = Field(description="Seed of the session.", examples=[7])
    metadata: dict[str, str] = Field(description="The client's own data.", examples=[{"project": "demo"}])
    epoch: int = Field(
        description="Number of the current ownership. 0: no worker has owned the session yet.", examples=[1]
    )
    worker: str | None = Field(
        description="The worker that owns the session. `null`: no worker.", examples=["wk_5f3a9c"]
    )
    target: str | None = Field(
        description="The worker that the session is migrating to. `null`: no migration.", examples=[None]
    )
    next_chunk: int = Field(
        description="Index of the first chunk that is not generated yet, as far as is known.", examples=[43]
    )
    controls: ControlValues
    control_seq: int = Field(description="Number of the newest accepted prompt or control.", examples=[1])
    applied_control_seq: int = Field(
        description="Number of the newest prompt or control that a chunk was generated under.", examples=[1]
    )
    newest_event: NewestEvent
    playhead_s: float = Field(description="Media time that viewers have reached, seconds.", examples=[31.5])
    quality: Quality | None = Field(
        description="Limits of the quality. `null`: the worker may lower it to its own floor.",
        examples=[{"floor": 0.9, "pin": False}],
    )
    max_lead_s: float | None = Field(
        description="Maximum seconds of video that are generated ahead of the playhead. `null`: the worker's "
        "own.",
        examples=[0.75],
    )
    recording: str | None = Field(
        description="The recording that runs, or ran when the session ended. `null`: none.",
        examples=["rec_5f3a9c"],
    )
    playout: Playout | None = Field(
        description="How urgent the session is. `null`: no viewer watches it through this gateway, or this "
        "is not the answer to `GET` of one session.",
        examples=[{"slack_s": 1.9, "credit_s": 1.5, "tier": "relaxed"}],
    )
    reason: str | None = Field(description="Why it ended, or why it waits. `null`: neither.", examples=[None])
    created_at: Timestamp = Field(description="When the session was created.")
    updated_at: Timestamp = Field(description="When the session last changed, except for its progress.")
    links: Links = Field(description="Where the session's resources are.")

    @classmethod
    def of(cls, record: SessionRecord, playout: Playout | None = None) -> Self:
        row = record.model_dump(include=set(cls.model_fields)) | {"activity": activity_of(record)}
        served = SessionClass.of_name(record.model)
        row |= {"width": served.width or None, "height": served.height or None}
        row |= {"newest_event": record.event_sequence}
        return cls(**row, playout=playout, links=Links.of(record.id))


class SessionList(PublicOutput):
    """A page of a tenant's sessions, newest first."""

    sessions: list[Session] = Field(description="The sessions.")
    next: str | None = Field(
        description="Cursor of the next page, for `after`. `null`: this is the last page.", examples=[None]
    )
