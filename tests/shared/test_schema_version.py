"""The schema version of messages: sent with every message, and checked by every reader."""

from __future__ import annotations

import json
from typing import Any

import pytest
from nats.js import api
from pydantic import ValidationError

from tests.helpers.other_versions import of_version
from turboserve import subjects
from turboserve.bus import Bus, append
from turboserve.bus.requests import ERROR_HEADER
from turboserve.contracts.base import Contract
from turboserve.contracts.chunks import HEADER, ChunkHeader, LatentsHeader
from turboserve.contracts.errors import (
    ErrorBody,
    IncompatibleVersionError,
    InvalidInputError,
    UnavailableError,
)
from turboserve.contracts.events import (
    SessionCreated,
    SessionEnded,
    event_from_bytes,
    session_event_from_bytes,
)
from turboserve.contracts.requests import Done, DrainWorker, GetLatents
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.contracts.versions import MEMBER, SCHEMA_VERSION, SchemaVersion, SchemaVersionError, stamped
from turboserve.contracts.workers import Playhead
from turboserve.gateway.events.session_events import follow_events
from turboserve.subject_types import Caller

MAJOR, MINOR = SCHEMA_VERSION
OTHER_MAJORS = (f"{MAJOR + 1}.0", f"{MAJOR - 1}.{MINOR}", f"{MAJOR}{MAJOR}.0", "0.9")
SAME_MAJOR = (f"{MAJOR}.0", f"{MAJOR}.{MINOR + 1}", f"{MAJOR}.{MINOR + 40}")
NO_VERSIONS: tuple[Any, ...] = (None, "", "1", "x", "01.0", "1.0.0", "-1.0", 1, 1.0, ["1.0"], {"major": 1})


def chunk(**changes: Any) -> ChunkHeader:
    values = {"index": 0, "epoch": 1, "worker": "wk1_a", "control_seq": 0, "first_frame": 0, "frames": 9}
    picture = {"fps": 16.0, "width": 64, "height": 64, "codec": "avc1.42c01e", "init_bytes": 1}
    return ChunkHeader(session="s", **{**values, **picture, **changes})


@pytest.mark.parametrize("message", [Done(), DrainWorker(worker="w")], ids=lambda one: type(one).__name__)
def test_the_version_is_the_first_member(message: Contract) -> None:
    document = json.loads(message.to_bytes())
    assert next(iter(document.items())) == (MEMBER, str(SCHEMA_VERSION))
    assert message.to_bytes() == message.to_text().encode()


def test_no_contract_has_a_field_of_that_name() -> None:
    kinds = [Contract]
    for kind in kinds:
        kinds += kind.__subclasses__()
        assert MEMBER not in kind.model_fields


@pytest.mark.parametrize("version", SAME_MAJOR)
def test_every_minor_of_the_same_major_is_read(version: str) -> None:
    message = DrainWorker(worker="w")
    assert DrainWorker.from_bytes(of_version(message, version)) == message
    assert DrainWorker.from_text(of_version(message, version).decode()) == message


@pytest.mark.parametrize("version", OTHER_MAJORS)
def test_another_major_is_refused_with_both_versions_and_what_to_update(version: str) -> None:
    newer = int(version.partition(".")[0]) > MAJOR
    for data in (of_version(DrainWorker(worker="w"), version), of_version(Done(), version)):
        with pytest.raises(SchemaVersionError) as refused:
            DrainWorker.from_bytes(data)
        assert (refused.value.found, refused.value.newer) == (version, newer)
        assert f"schema version {version}" in str(refused.value)
        assert f"reads {MAJOR}.x (it has {SCHEMA_VERSION})" in str(refused.value)
        assert str(refused.value).endswith("update this process" if newer else "update the sender")


@pytest.mark.parametrize("version", NO_VERSIONS, ids=repr)
def test_a_message_without_a_version_is_refused(version: Any) -> None:
    with pytest.raises(SchemaVersionError) as refused:
        DrainWorker.from_bytes(of_version(DrainWorker(worker="w"), version))
    assert (refused.value.found, refused.value.newer) == (None, False)


def test_the_version_may_stand_anywhere() -> None:
    assert DrainWorker.from_bytes(f'{{"worker": "w", "{MEMBER}": "{SCHEMA_VERSION}"}}'.encode()).worker == "w"
    with pytest.raises(SchemaVersionError):
        DrainWorker.from_bytes(f'{{"worker": "w", "{MEMBER}": "{MAJOR + 1}.0"}}'.encode())


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"[" * 100_000, b'"1.0"', b"\xff"])
def test_what_is_no_object_is_refused_by_its_contents(data: bytes) -> None:
    with pytest.raises(ValidationError):
        DrainWorker.from_bytes(data)


@pytest.mark.parametrize("read", [event_from_bytes, session_event_from_bytes])
def test_an_event_of_another_major_is_refused_before_its_type_is_read(read: Any) -> None:
    with pytest.raises(SchemaVersionError):
        read(f'{{"{MEMBER}": "{MAJOR + 1}.0", "type": "session.created"}}'.encode())
    with pytest.raises(ValidationError):
        read(stamped('{"type":"session.created"}').encode())


def test_a_chunk_header_carries_the_version() -> None:
    headers = chunk().to_headers()
    assert json.loads(headers[HEADER])[MEMBER] == str(SCHEMA_VERSION)
    other = {HEADER: of_version(chunk(), f"{MAJOR + 1}.0").decode()}
    with pytest.raises(InvalidInputError) as refused:
        ChunkHeader.of_entry("s", other)
    assert (refused.value.field, f"{MAJOR + 1}.0" in refused.value.detail) == (MEMBER, True)


@pytest.mark.parametrize("version", [*OTHER_MAJORS, *SAME_MAJOR, None])
def test_an_error_of_every_version_is_read(version: str | None) -> None:
    body = IncompatibleVersionError("update the worker", field=MEMBER).body()
    read = ErrorBody.from_text(of_version(body, version).decode())
    assert read == body


def test_versions_are_parsed_exactly() -> None:
    assert SchemaVersion.parse("12.345") == (12, 345)
    assert str(SchemaVersion(12, 345)) == "12.345"
    assert [SchemaVersion.parse(one) for one in NO_VERSIONS] == [None] * len(NO_VERSIONS)


# On the bus


async def serve_drain(store: Bus) -> list[DrainWorker]:
    served: list[DrainWorker] = []

    async def answer(request: DrainWorker, _: Caller) -> Done:
        served.append(request)
        return Done()

    await store.serve(subjects.DRAIN_WORKER, answer)
    await store.flush()
    return served


async def test_a_request_of_another_major_is_answered_with_a_typed_refusal(connect: Any) -> None:
    store, caller = await connect("state-store"), await connect("autoscaler")
    served = await serve_drain(store)
    subject = subjects.DRAIN_WORKER.request_subject("autoscaler")
    for version in (*OTHER_MAJORS, None):
        data = of_version(DrainWorker(worker="w"), version)
        reply = await caller.client.request(subject, data, timeout=60)
        refusal = ErrorBody.from_text(reply.headers[ERROR_HEADER])
        assert (refusal.code, refusal.field, refusal.limit) == ("incompatible_version", MEMBER, f"{MAJOR}.x")
        assert f"schema version {version or 'none'}" in refusal.detail
        assert "state-store refuses state.worker.drain" in refusal.detail
    assert not served
    for version in SAME_MAJOR:
        reply = await caller.client.request(subject, of_version(DrainWorker(worker="w"), version), timeout=60)
        assert ERROR_HEADER not in (reply.headers or {})
    assert len(served) == len(SAME_MAJOR)


async def test_a_caller_of_another_major_gets_the_typed_error_and_remembers_the_server(
    connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, caller = await connect("state-store"), await connect("autoscaler")
    served = await serve_drain(store)
    with monkeypatch.context() as other:
        data = of_version(DrainWorker(worker="w"), f"{MAJOR + 1}.0").decode()
        other.setattr(DrainWorker, "to_text", lambda _: data)
        with pytest.raises(IncompatibleVersionError) as refused:
            await caller.call(subjects.DRAIN_WORKER, DrainWorker(worker="w"))
    assert refused.value.answered
    assert isinstance(refused.value, UnavailableError)
    assert caller.incompatible == {"state-store": refused.value.detail}
    assert not served
    await caller.call(subjects.DRAIN_WORKER, DrainWorker(worker="w"))
    assert not caller.incompatible

    # A refusal for another reason shows as well that the server reads this version.
    caller.note_incompatible("state-store", refused.value)
    with monkeypatch.context() as other:
        other.setattr(DrainWorker, "to_text", lambda _: f'{{"{MEMBER}": "{MAJOR}.0"}}')
        with pytest.raises(InvalidInputError):
            await caller.call(subjects.DRAIN_WORKER, DrainWorker(worker="w"))
    assert not caller.incompatible
    # Without requests, the note ends by itself: a gateway that is not ready gets none.
    caller.note_incompatible("state-store", refused.value)
    monkeypatch.setattr("turboserve.bus.client.INCOMPATIBLE_S", -1.0)
    assert not caller.incompatible


async def test_a_relayed_refusal_of_a_third_service_is_not_noted_against_the_relaying_one(
    connect: Any,
) -> None:
    store, caller = await connect("state-store"), await connect("autoscaler")

    async def relay(request: DrainWorker, _: Caller) -> Done:
        raise IncompatibleVersionError(f"worker refuses {request.worker}", field=MEMBER, limit="9.x")

    await store.serve(subjects.DRAIN_WORKER, relay)
    await store.flush()
    with pytest.raises(IncompatibleVersionError, match="worker refuses wrk_1") as refused:
        await caller.call(subjects.DRAIN_WORKER, DrainWorker(worker="wrk_1"))
    assert (refused.value.field, refused.value.limit, refused.value.answered) == (MEMBER, "9.x", True)
    assert not caller.incompatible


@pytest.mark.parametrize("version", OTHER_MAJORS)
async def test_an_answer_of_another_major_is_a_typed_error(connect: Any, version: str) -> None:
    store, worker = await connect("state-store"), await connect("worker")
    found = LatentsHeader(session="s", index=3, epoch=1, dtype="float16", shape=(3, 2), first_latent=9)

    async def receive(raw: Any) -> None:
        await store.client.publish(raw.reply, of_version(Done(), version))

    async def receive_raw(raw: Any) -> None:
        await store.client.publish(
            raw.reply, b"latents", headers={"Ts-Meta": of_version(found, version).decode()}
        )

    await store.client.subscribe(subjects.FAIL_SESSION.every, cb=receive)
    await store.client.subscribe(subjects.GET_LATENTS.every, cb=receive_raw)
    await store.flush()
    with pytest.raises(IncompatibleVersionError, match=rf"the answer to state.latents.get.* {version}"):
        await worker.call_raw(subjects.GET_LATENTS, GetLatents(session="s", index=3))
    assert list(worker.incompatible) == ["state-store"]


async def test_a_topic_skips_another_major_and_continues(connect: Any) -> None:
    gateway, worker = await connect("gateway"), await connect("worker")
    heard: list[Playhead] = []

    async def hear(message: Playhead, _: bytes) -> None:
        heard.append(message)

    await worker.subscribe(subjects.PLAYHEAD, "*", hear)
    await worker.flush()
    for number, version in enumerate((*OTHER_MAJORS, None, *SAME_MAJOR)):
        message = Playhead(session="s", playhead_s=float(number), viewers=1)
        await gateway.client.publish(subjects.PLAYHEAD.of("s"), of_version(message, version))
    await gateway.flush()
    await worker.flush()
    first = len(OTHER_MAJORS) + 1
    assert [one.playhead_s for one in heard] == [float(first + n) for n in range(len(SAME_MAJOR))]


@pytest.mark.usefixtures("patient_reads")
async def test_an_event_of_another_major_is_skipped_and_the_next_is_read(connect: Any) -> None:
    bus = await connect("admin")
    await bus.jetstream().add_stream(
        api.StreamConfig(
            name=subjects.EVENTS,
            subjects=[subjects.EVENT.every],
            storage=api.StorageType.MEMORY,
            allow_direct=True,
            republish=api.RePublish(src=">", dest="live.>"),
        )
    )
    try:
        row = SessionRecord(
            id="s",
            tenant="t",
            model="m",
            prompt="a",
            seed=1,
            phase=Phase.REQUESTED,
            version=1,
            epoch=0,
            created_at=0,
            updated_at=0,
        )

        def ended(number: int) -> SessionEnded:
            last = row.model_copy(update={"phase": Phase.TERMINATED, "event_sequence": number})
            return SessionEnded(id=f"e{number}", at=1.0, record=last)

        others = [of_version(ended(number), version) for number, version in enumerate(OTHER_MAJORS, 1)]
        known = row.model_copy(update={"event_sequence": len(others) + 1})
        created = SessionCreated(id="known", at=1.0, record=known)
        bodies = [*others, created.to_bytes(), ended(len(others) + 2).to_bytes()]
        for number, body in enumerate(bodies):
            await append(bus, subjects.EVENT.of("s"), body, message_id=f"m{number}")
        found = [event.id async for event in follow_events(bus, "s", 0)]
        assert found == ["known", f"e{len(others) + 2}"]
        # A session that ended under another MAJOR: its last event is known by its number alone.
        for number, body in enumerate(others):
            await append(bus, subjects.EVENT.of("old"), body, message_id=f"o{number}")
        assert [event async for event in follow_events(bus, "old", 0, len(others))] == []
    finally:
        await bus.jetstream().delete_stream(subjects.EVENTS)
