"""Recordings of sessions: their rows, the requests about them, and reads of their content."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from turboserve.contracts.base import Contract, Count, Id, Note, Text, UnixSeconds
from turboserve.contracts.requests import SessionRef

READ_LIMIT = 256 * 1024
"""Maximum number of bytes in one answer to `ReadRecording`. It fits into a message of any broker."""
ORDERS_LIMIT = 1_000
"""Maximum number of orders in one answer to `ListRecordingOrders`."""

Item = Annotated[Text, Field(max_length=64)]
"""Name of a part of a recording's content, such as `video.mp4` or `segments/0.m4s`."""


class RecordingState(StrEnum):
    """Where a recording is in its life."""

    RECORDING = "recording"
    """The recorder stores the session's chunks as the log has them."""
    STOPPING = "stopping"
    """The user or a limit has stopped the recording. The recorder stores the chunks before `until_chunk`."""
    COMPLETE = "complete"
    """The content does not change any more."""
    DELETING = "deleting"
    """Clients do not see the recording. The recorder deletes its content, then the row."""

    @property
    def open(self) -> bool:
        """Whether the content may still grow."""
        return self in (RecordingState.RECORDING, RecordingState.STOPPING)


class RecordingRecord(Contract):
    """One recording's row. The content in object storage is the truth about chunks, bytes and duration."""

    id: Id
    session: Id
    tenant: Id
    model: Id
    prompt: Text
    """The session's prompt when the recording started."""
    state: RecordingState
    from_chunk: Count
    """Index of the first chunk that belongs to the recording."""
    until_chunk: Count | None = None
    """Index of the chunk at which the recording stops. None: the recording goes on. The recorder may have
    stored later chunks before it learned of the stop."""
    next_chunk: Count
    """Index of the first chunk that is not stored, as of the recorder's last report."""
    chunks: Count = 0
    """Number of stored chunks."""
    missing_chunks: Count = 0
    """Number of chunks that the log dropped before the recorder had stored them."""
    bytes: Count = 0
    duration_s: float = Field(default=0.0, ge=0)
    """Length of the stored video, without missing chunks, seconds."""
    parts: Count = 0
    """Number of videos of one encoding each. More than one: the encoder's settings changed."""
    reason: Note | None = None
    """Why the recording stopped, if the user did not stop it."""
    session_failed: bool = False
    """Whether the recording ended because its session failed. `reason` is then the session's."""
    created_at: UnixSeconds
    updated_at: UnixSeconds
    completed_at: UnixSeconds | None = None
    expires_at: UnixSeconds | None = None
    """When the recording is deleted. None: it is not complete, or recordings are kept until deleted."""


class StartRecording(SessionRef):
    """gateway → state store: record the session from the next chunk on. Answered with `RecordingRecord`.

    A session that is recorded already is answered with its recording.
    """

    recording: Id
    """Id of the new recording, chosen by the gateway."""


class StopRecording(SessionRef):
    """gateway → state store: stop the session's recording. Answered with `RecordingRecord`.

    A session whose recording has stopped is answered with its newest recording. Refused with `not_found` if
    the session was never recorded.
    """


class RecordingRef(Contract):
    """A recording, restricted to a tenant. `tenant` None is for services, which see all recordings."""

    recording: Id
    tenant: Id | None = None


class ListRecordings(Contract):
    """gateway → state store: list recordings, newest first. Answered with `RecordingPage`."""

    tenant: Id | None = None
    session: Id | None = None
    """Only recordings of this session."""
    limit: int = Field(default=100, ge=1, le=200)
    after: Count | None = None
    """The `next` of the previous page."""


class RecordingPage(Contract):
    """One page of recordings. `next` None: the last page."""

    recordings: tuple[RecordingRecord, ...]
    next: Count | None = None


class RecordingOrder(Contract):
    """What the recorder has to do for one recording."""

    recording: Id
    session: Id
    tenant: Id
    state: RecordingState
    from_chunk: Count
    until_chunk: Count | None = None
    next_chunk: Count
    """As of the last report. A different index in the content is reported again."""
    session_ended: bool
    """Whether the session generates no more chunks."""
    made: Count
    """Index of the first chunk that the log has not accepted, by the session's row."""


class ListRecordingOrders(Contract):
    """recorder → state store, repeatedly: list the recordings that are not complete."""

    limit: int = Field(default=ORDERS_LIMIT, ge=1, le=ORDERS_LIMIT)
    after: Count | None = None
    """The `next` of the previous page."""


class RecordingOrders(Contract):
    """One page of orders, oldest recording first. `next` None: the last page."""

    orders: tuple[RecordingOrder, ...]
    next: Count | None = None


class ReportRecording(Contract):
    """recorder → state store: what object storage has of a recording. Answered with `RecordingRecord`.

    A report with fewer chunks than an earlier one changes nothing.
    """

    recording: Id
    next_chunk: Count
    chunks: Count
    missing_chunks: Count
    bytes: Count
    duration_s: float = Field(ge=0)
    parts: Count
    complete: bool = False
    """Whether nothing is left to store."""


class ReadRecording(Contract):
    """gateway → recorder: read bytes of a recording's content. Answered with `RecordingBytes` and the bytes.

    Refused with `not_found` if the recording has no such item, and with `conflict` if the item is not the one
    of `etag` any more.
    """

    recording: Id
    tenant: Id
    item: Item
    part: int = Field(default=1, ge=1, le=10_000)
    """Which of the recording's videos `item` is about."""
    complete: bool
    """Whether the recording is complete, by its row."""
    start: Count = 0
    length: int = Field(ge=0, le=READ_LIMIT)
    """0: only describe the item."""
    etag: Text | None = Field(default=None, max_length=64)
    """The answer of an earlier read, which this one continues. None: any."""


class RecordingBytes(Contract):
    """The answer to `ReadRecording`. Its body has the bytes from `start` on, fewer at the end of the item."""

    size: Count
    """Size of the whole item, bytes."""
    etag: Text = Field(max_length=64)
    """Differs if the item's content differs."""
    media_type: Text = Field(max_length=64)
