"""REST: /v1/recordings, and /v1/sessions/{id}/recording."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from turboserve.contracts.base import Id
from turboserve.contracts.errors import NotFoundError, SessionNotFoundError
from turboserve.contracts.keys import Scope
from turboserve.contracts.links import Role
from turboserve.contracts.recordings import RecordingRecord
from turboserve.gateway.audit.recorder import AuditedRoute
from turboserve.gateway.auth.middleware import Caller, Tenant, needs
from turboserve.gateway.context import Gateway, gateway_of
from turboserve.gateway.paging import AfterNumber
from turboserve.gateway.problems.schemas import problems
from turboserve.gateway.recordings.response import item_response
from turboserve.gateway.recordings.schemas import Recording, RecordingList
from turboserve.gateway.recordings.service import Recordings
from turboserve.gateway.sessions.parameters import SessionId

router = APIRouter(prefix="/v1", tags=["recordings"], route_class=AuditedRoute)


def _service_of(connection: HTTPConnection) -> Recordings:
    return Recordings(gateway_of(connection).bus)


Service = Annotated[Recordings, Depends(_service_of)]
RecordingId = Annotated[Id, Path(description="Id of the recording.", examples=["rec_5f3a9c"])]
Part = Annotated[
    int,
    Query(ge=1, le=10_000, description="Which of the recording's `parts`, from 1.", examples=[1]),
]


async def _shared_record(recording: RecordingId, caller: Caller, recordings: Service) -> RecordingRecord:
    """Return the recording, which the holder of a link may see if it is one of the link's session.

    Raises NotFoundError, also for what the sender may not see.
    """
    record = await recordings.get(caller.tenant, recording)
    if caller.grant is not None and caller.grant.session != record.session:
        raise NotFoundError(f"there is no recording {recording}", field="recording")
    return record


Record = Annotated[RecordingRecord, Depends(_shared_record)]


class Items:
    """The content of the recording that the request is about."""

    def __init__(
        self, request: Request, record: Record, gateway: Annotated[Gateway, Depends(gateway_of)]
    ) -> None:
        self._request, self._record = request, record
        self._recordings, self._streams = Recordings(gateway.bus), gateway.streams

    async def answer(self, item: str, part: int = 1) -> Response:
        """Answer with the item, or with the range of it that the request asks for. Raises NotFoundError."""
        return await item_response(self._request, self._recordings, self._record, self._streams, item, part)


Content = Annotated[Items, Depends()]
READ = [needs(Scope.SESSIONS_READ, Role.VIEWER, in_path=False)]
"""The routes compare the session of a link with that of the recording."""
CONTROL = [needs(Scope.SESSIONS_WRITE, Role.CONTROLLER)]


def _binary(media_type: str, description: str, *, ranges: bool = False) -> dict[int | str, dict[str, Any]]:
    body = {media_type: {"schema": {"type": "string", "format": "binary"}}}
    found: dict[int | str, dict[str, Any]] = {200: {"description": description, "content": body}}
    if ranges:
        found[206] = {"description": "The bytes of the header `Range`.", "content": body}
        return {**found, **problems(401, 404, 416, 422, 429)}
    return {**found, **problems(401, 404, 422, 429)}


@router.post(
    "/sessions/{session}/recording",
    dependencies=CONTROL,
    operation_id="start_recording",
    status_code=202,
    summary="Record a session",
    description="Stores the session's video from the next chunk on, until the recording is stopped or the "
    "session ends. A session that is recorded already is answered with its recording.",
    responses=problems(401, 404, 409, 429),
)
async def start(session: SessionId, tenant: Tenant, recordings: Service) -> Recording:
    return Recording.of(await recordings.start(tenant, session))


@router.delete(
    "/sessions/{session}/recording",
    dependencies=CONTROL,
    operation_id="stop_recording",
    summary="Stop recording a session",
    description="The session goes on, and what was recorded stays. A repeat gets the same recording.",
    responses=problems(401, 404),
)
async def stop(session: SessionId, tenant: Tenant, recordings: Service) -> Recording:
    return Recording.of(await recordings.stop(tenant, session))


@router.get(
    "/recordings",
    dependencies=READ,
    operation_id="list_recordings",
    summary="List recordings, newest first",
    description="The tenant's own recordings, by page. The holder of a link gets those of its session.",
    responses=problems(401, 404, 422),
)
async def list_recordings(
    caller: Caller,
    recordings: Service,
    session: Annotated[
        Id | None, Query(description="Only recordings of this session.", examples=["ses_5f3a9c"])
    ] = None,
    limit: Annotated[
        int, Query(ge=1, le=200, description="Maximum number of recordings on the page.", examples=[100])
    ] = 100,
    after: AfterNumber = None,
) -> RecordingList:
    if caller.grant is not None:
        if session not in (None, caller.grant.session):
            raise SessionNotFoundError(f"there is no session {session}", field="session")
        session = caller.grant.session
    page = await recordings.page(caller.tenant, session, limit, after)
    return RecordingList(recordings=[Recording.of(record) for record in page.recordings], next=page.next)


@router.get(
    "/recordings/{recording}",
    dependencies=READ,
    operation_id="get_recording",
    summary="Read a recording",
    description="What is stored so far.",
    responses=problems(401, 404, 422),
)
async def read(record: Record) -> Recording:
    return Recording.of(record)


@router.delete(
    "/recordings/{recording}",
    dependencies=[needs(Scope.SESSIONS_WRITE)],
    operation_id="delete_recording",
    status_code=204,
    summary="Delete a recording",
    description="The recording disappears at once, and its video is deleted soon after. A recording that "
    "still runs is stopped.",
    responses=problems(401, 404, 422),
)
async def delete(recording: RecordingId, tenant: Tenant, recordings: Service) -> None:
    await recordings.delete(tenant, recording)


@router.get(
    "/recordings/{recording}/video.mp4",
    dependencies=READ,
    operation_id="get_recording_video",
    summary="Download or play a recording",
    description="One MP4 file, of which `Range` requests any part. While the recording runs, the file has "
    "what is stored so far, and grows at its end.",
    response_class=Response,
    responses=_binary("video/mp4", "The video.", ranges=True),
)
async def video(content: Content, part: Part = 1) -> Response:
    return await content.answer("video.mp4", part)


@router.get(
    "/recordings/{recording}/playlist.m3u8",
    dependencies=READ,
    operation_id="get_recording_playlist",
    summary="Play a recording with HLS",
    description="A media playlist with fragmented MP4. While the recording runs, players load it again.",
    response_class=Response,
    responses=_binary("application/vnd.apple.mpegurl", "The playlist."),
)
async def playlist(content: Content) -> Response:
    return await content.answer("playlist.m3u8")


@router.get(
    "/recordings/{recording}/inits/{part}.mp4",
    dependencies=READ,
    operation_id="get_recording_init",
    summary="Read an init segment of a playlist",
    description="The head of one of the recording's `parts`.",
    response_class=Response,
    responses=_binary("video/mp4", "The init segment.", ranges=True),
)
async def init(
    content: Content,
    part: Annotated[int, Path(ge=1, le=10_000, description="Number of the part, from 1.", examples=[1])],
) -> Response:
    return await content.answer(f"inits/{part}.mp4")


@router.get(
    "/recordings/{recording}/segments/{chunk}.m4s",
    dependencies=READ,
    operation_id="get_recording_segment",
    summary="Read a media segment of a playlist",
    description="Successive chunks of the recording, at their place in the video.",
    response_class=Response,
    responses=_binary("video/mp4", "The media segment.", ranges=True),
)
async def segment(
    content: Content,
    chunk: Annotated[
        int, Path(ge=0, lt=2**31, description="Index of the segment's first chunk.", examples=[8])
    ],
) -> Response:
    return await content.answer(f"segments/{chunk}.m4s")


@router.get(
    "/recordings/{recording}/poster.jpg",
    dependencies=READ,
    operation_id="get_recording_poster",
    summary="See the first frame of a recording",
    description="A JPEG. 404 if nothing is stored yet, or the recorder has no decoder.",
    response_class=Response,
    responses=_binary("image/jpeg", "The picture."),
)
async def poster(content: Content) -> Response:
    return await content.answer("poster.jpg")


@router.get(
    "/recordings/{recording}/contact-sheet.jpg",
    dependencies=READ,
    operation_id="get_recording_contact_sheet",
    summary="See frames of a whole recording",
    description="A JPEG with up to 16 frames. 404 if nothing is stored yet, or the recorder has no decoder.",
    response_class=Response,
    responses=_binary("image/jpeg", "The picture."),
)
async def contact_sheet(content: Content, part: Part = 1) -> Response:
    return await content.answer("contact-sheet.jpg", part)
