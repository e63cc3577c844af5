"""The properties of JetStream on which the product relies, on nats-server and in memory."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import nats.errors
import pytest
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api
from nats.js.errors import APIError, BadRequestError, NoStreamResponseError, NotFoundError

from tests.shared.conftest import Connect
from turboserve.bus import Bus

LIMIT_S = 60
S = ""
"""Name of the stream, different in each test.

nats-server answers before it has deleted the files of a stream, and a stream of the same name may find them.
"""
_numbers = itertools.count()
SUBJECT_SEQUENCE = "Nats-Expected-Last-Subject-Sequence"


@pytest.fixture
async def bus(connect: Connect) -> AsyncIterator[Bus]:
    global S
    S = f"S{next(_numbers)}"
    bus = await connect("admin")
    yield bus
    jetstream = bus.jetstream()
    for info in await jetstream.streams_info():
        await jetstream.delete_stream(info.config.name or "")


@pytest.fixture
def jetstream(bus: Bus) -> JetStreamContext:
    return bus.jetstream()


def config(**fields: Any) -> api.StreamConfig:
    values: dict[str, Any] = {"name": S, "subjects": ["own.*", "chunk.*"], "allow_direct": True}
    return api.StreamConfig(**(values | fields))


async def refusal(
    jetstream: JetStreamContext, subject: str, data: bytes = b"", headers: dict[str, str] | None = None
) -> int | None:
    """Append a message. Returns the code of the error, if any."""
    try:
        await jetstream.publish(subject, data, headers=headers)
    except APIError as error:
        return error.err_code
    return None


async def stored(jetstream: JetStreamContext, pattern: str = ">") -> dict[str, int]:
    return dict((await jetstream.stream_info(S, subjects_filter=pattern)).state.subjects or {})


async def test_the_fence_holds_for_its_own_and_for_another_subject(
    bus: Bus, jetstream: JetStreamContext
) -> None:
    await jetstream.add_stream(config())
    own = (await jetstream.publish("own.a", headers={SUBJECT_SEQUENCE: "0"})).seq
    other = {f"{SUBJECT_SEQUENCE}-Subject": "own.a"}
    assert (await jetstream.publish("chunk.a", headers={SUBJECT_SEQUENCE: str(own), **other})).seq == own + 1
    with pytest.raises(BadRequestError) as error:
        await jetstream.publish("chunk.a", headers={SUBJECT_SEQUENCE: str(own + 1), **other})
    assert (error.value.code, error.value.err_code, error.value.description) == (
        400,
        10071,
        f"wrong last sequence: {own}",
    )
    newer = (await jetstream.publish("own.a", headers={SUBJECT_SEQUENCE: str(own)})).seq
    assert await refusal(jetstream, "chunk.a", headers={SUBJECT_SEQUENCE: str(own), **other}) == 10071
    await jetstream.publish("chunk.a", headers={SUBJECT_SEQUENCE: str(newer), **other})
    # An empty subject has sequence 0, whatever else the stream holds.
    assert await refusal(jetstream, "own.b", headers={SUBJECT_SEQUENCE: str(newer)}) == 10071
    await jetstream.publish("own.b", headers={SUBJECT_SEQUENCE: "0"})
    last = (await jetstream.stream_info(S)).state.last_seq
    assert await refusal(jetstream, "own.c", headers={"Nats-Expected-Last-Sequence": str(last - 1)}) == 10071
    await jetstream.publish("own.c", headers={"Nats-Expected-Last-Sequence": str(last)})
    assert await refusal(jetstream, "own.c", headers={"Nats-Expected-Stream": "T"}) == 10060


async def test_a_removed_fence_refuses_who_names_it(jetstream: JetStreamContext) -> None:
    await jetstream.add_stream(config())
    own = (await jetstream.publish("own.a")).seq
    await jetstream.purge_stream(S, subject="own.a")
    headers = {SUBJECT_SEQUENCE: str(own), f"{SUBJECT_SEQUENCE}-Subject": "own.a"}
    assert await refusal(jetstream, "chunk.a", headers=headers) == 10071


async def test_a_message_id_is_taken_once_within_the_window(jetstream: JetStreamContext) -> None:
    await jetstream.add_stream(config())
    first = await jetstream.publish("chunk.a", b"1", headers={"Nats-Msg-Id": "x"})
    # The subject and the body do not matter.
    again = await jetstream.publish("chunk.b", b"2", headers={"Nats-Msg-Id": "x"})
    assert (first.duplicate, again.duplicate, again.seq) == (None, True, first.seq)
    assert await stored(jetstream) == {"chunk.a": 1}
    other = await jetstream.publish("chunk.b", b"2", headers={"Nats-Msg-Id": "y"})
    assert (other.duplicate, other.seq) == (None, first.seq + 1)
    for _ in range(2):
        ack = await jetstream.publish("chunk.c", headers={"Nats-Msg-Id": ""})
        assert not ack.duplicate
    await jetstream.add_stream(config(name="T", subjects=["t.*"], duplicate_window=0.5))
    await jetstream.publish("t.a", headers={"Nats-Msg-Id": "x"})
    async with asyncio.timeout(LIMIT_S):
        while (await jetstream.publish("t.a", headers={"Nats-Msg-Id": "x"})).duplicate:
            await asyncio.sleep(0.1)
    assert (await jetstream.stream_info("T")).state.messages == 2


async def test_the_fence_is_asked_before_the_message_id(jetstream: JetStreamContext) -> None:
    """A repeat under the same id is a duplicate only while its condition still holds."""
    await jetstream.add_stream(config())
    headers = {SUBJECT_SEQUENCE: "0", "Nats-Msg-Id": "x"}
    own = (await jetstream.publish("own.a", headers=headers)).seq
    assert await refusal(jetstream, "own.a", headers=headers) == 10071
    chunk = {SUBJECT_SEQUENCE: str(own), f"{SUBJECT_SEQUENCE}-Subject": "own.a", "Nats-Msg-Id": "y"}
    first = await jetstream.publish("chunk.a", headers=chunk)
    again = await jetstream.publish("chunk.a", headers=chunk)
    assert (again.seq, again.duplicate) == (first.seq, True)


async def test_an_id_of_a_refused_message_is_not_taken(jetstream: JetStreamContext) -> None:
    await jetstream.add_stream(config())
    assert await refusal(jetstream, "own.a", headers={SUBJECT_SEQUENCE: "7", "Nats-Msg-Id": "x"}) == 10071
    assert not (await jetstream.publish("own.a", headers={"Nats-Msg-Id": "x"})).duplicate


async def test_an_id_of_a_removed_message_stays_taken(jetstream: JetStreamContext) -> None:
    await jetstream.add_stream(config())
    first = await jetstream.publish("own.a", headers={"Nats-Msg-Id": "x"})
    await jetstream.purge_stream(S)
    again = await jetstream.publish("own.a", headers={"Nats-Msg-Id": "x"})
    assert (again.duplicate, again.seq) == (True, first.seq)


async def test_a_message_lives_as_long_as_it_says(jetstream: JetStreamContext) -> None:
    await jetstream.add_stream(config(allow_msg_ttl=True))
    await jetstream.publish("own.a")
    await jetstream.publish("chunk.b", headers={"Nats-TTL": "1h"})
    await jetstream.publish("chunk.c", headers={"Nats-TTL": "never"})
    # It is stored, however long the answer takes.
    assert (await jetstream.publish("chunk.a", headers={"Nats-TTL": "1s"})).seq == 4
    async with asyncio.timeout(LIMIT_S):
        while "chunk.a" in await stored(jetstream):
            await asyncio.sleep(0.1)
    assert await stored(jetstream) == {"chunk.b": 1, "chunk.c": 1, "own.a": 1}
    for wrong in ("x", "0s", "0.5s", "-1s"):
        assert await refusal(jetstream, "own.a", headers={"Nats-TTL": wrong}) == 10165
    await jetstream.add_stream(config(name="T", subjects=["t.*"]))
    assert await refusal(jetstream, "t.a", headers={"Nats-TTL": "5s"}) == 10166


async def test_messages_of_a_stream_age(jetstream: JetStreamContext) -> None:
    await jetstream.add_stream(config(max_age=0.5, duplicate_window=0.5))
    await jetstream.publish("own.a")
    async with asyncio.timeout(LIMIT_S):
        while await stored(jetstream):
            await asyncio.sleep(0.1)
    state = (await jetstream.stream_info(S)).state
    assert (state.messages, state.bytes, state.first_seq, state.last_seq) == (0, 0, 2, 1)


async def republished(bus: Bus, **fields: Any) -> tuple[list[Msg], JetStreamContext]:
    heard: list[Msg] = []

    async def receive(message: Msg) -> None:
        heard.append(message)

    jetstream = bus.jetstream()
    await jetstream.add_stream(config(**fields))
    await bus.client.subscribe("live.>", cb=receive)
    await bus.flush()
    return heard, jetstream


async def test_what_is_stored_is_republished_with_its_place(bus: Bus) -> None:
    heard, jetstream = await republished(bus, republish=api.RePublish(src=">", dest="live.>"))
    await jetstream.publish("own.a", b"1", headers={"A": "b", "Nats-Msg-Id": "x"})
    await jetstream.publish("chunk.a", b"2")
    await jetstream.publish("own.a", b"3")
    # Neither a duplicate nor a refused message is republished.
    await jetstream.publish("own.a", b"3", headers={"Nats-Msg-Id": "x"})
    await refusal(jetstream, "own.a", headers={SUBJECT_SEQUENCE: "0"})
    await bus.flush()
    assert [(message.subject, message.data, message.reply) for message in heard] == [
        ("live.own.a", b"1", ""),
        ("live.chunk.a", b"2", ""),
        ("live.own.a", b"3", ""),
    ]
    headers = [dict(message.headers or {}) for message in heard]
    entry = await jetstream.get_msg(S, subject="chunk.a", direct=True)
    assert all(header.pop("Nats-Time-Stamp") for header in headers)
    assert headers[0].pop("A") == "b"
    assert headers[0].pop("Nats-Msg-Id") == "x"
    places = [("own.a", "1", "0"), ("chunk.a", "2", "0"), ("own.a", "3", "1")]
    assert headers == [
        {"Nats-Stream": S, "Nats-Subject": subject, "Nats-Sequence": place, "Nats-Last-Sequence": before}
        for subject, place, before in places
    ]
    assert (entry.headers or {})["Nats-Time-Stamp"] == (heard[1].headers or {})["Nats-Time-Stamp"]


async def test_republished_subjects_are_mapped_and_bodies_may_be_left_out(bus: Bus) -> None:
    mapping = api.RePublish(src="chunk.*", dest="live.x.{{wildcard(1)}}", headers_only=True)
    heard, jetstream = await republished(bus, republish=mapping)
    await jetstream.publish("own.a", b"1")
    await jetstream.publish("chunk.a", b"22")
    await bus.flush()
    [message] = heard
    assert (message.subject, message.data) == ("live.x.a", b"")
    assert (message.headers or {})["Nats-Msg-Size"] == "2"


async def test_a_message_of_the_past_replaced_at_its_subjects_limit(bus: Bus) -> None:
    """The newest replaces the oldest, and names the message before it although that is gone."""
    heard, jetstream = await republished(
        bus, max_msgs_per_subject=1, republish=api.RePublish(src=">", dest="live.>")
    )
    first = await jetstream.publish("own.a", b"1")
    other = await jetstream.publish("own.b", b"1")
    newest = await jetstream.publish("own.a", b"2")
    assert await stored(jetstream) == {"own.a": 1, "own.b": 1}
    assert (heard[-1].headers or {})["Nats-Last-Sequence"] == str(first.seq)
    state = (await jetstream.stream_info(S)).state
    assert (state.first_seq, state.last_seq) == (other.seq, newest.seq)


def sized(total: int) -> int:
    """Return the body size of a message on `own.a` without headers that takes `total` bytes of the stream."""
    return total - 30 - len("own.a")


async def test_a_full_stream_refuses_what_is_new(jetstream: JetStreamContext) -> None:
    await jetstream.add_stream(config(max_bytes=300, discard=api.DiscardPolicy.NEW, max_msgs_per_subject=2))
    body = bytes(sized(130))
    for _ in range(2):
        await jetstream.publish("own.a", body)
    assert (await jetstream.stream_info(S)).state.bytes == 260
    with pytest.raises(APIError) as error:
        await jetstream.publish("own.b", body)
    assert (error.value.code, error.value.err_code, error.value.description) == (
        503,
        10077,
        "maximum bytes exceeded",
    )
    # At its subject's limit a message may replace one that is not smaller.
    await jetstream.publish("own.a", body)
    assert await refusal(jetstream, "own.a", body + b"x") == 10077
    await jetstream.publish("own.a", body[:50])
    # The oldest is as large as before, so a message may still be larger than the newest.
    await jetstream.publish("own.a", body)
    assert (await jetstream.stream_info(S)).state.bytes == 85 + 130
    assert await refusal(jetstream, "chunk.a", bytes(sized(85)), headers={"A": "b"}) == 10077
    await jetstream.publish("own.b", bytes(sized(85)))
    assert (await jetstream.stream_info(S)).state.bytes == 300
    await jetstream.update_stream(
        config(max_bytes=400, discard=api.DiscardPolicy.NEW, max_msgs_per_subject=2)
    )
    await jetstream.publish("own.b", bytes(sized(100)))


async def test_headers_count(jetstream: JetStreamContext) -> None:
    await jetstream.add_stream(config())
    await jetstream.publish("own.a", b"12345", headers={"Key": "väl", "Other": "y"})
    lines = "NATS/1.0\r\nKey: väl\r\nOther: y\r\n\r\n"
    assert (await jetstream.stream_info(S)).state.bytes == 34 + len("own.a") + len(lines.encode()) + 5


async def test_a_full_stream_that_discards_old_drops_its_oldest(jetstream: JetStreamContext) -> None:
    await jetstream.add_stream(config(max_bytes=300))
    for number in range(5):
        await jetstream.publish("own.a", bytes([number]) * sized(130))
    state = (await jetstream.stream_info(S)).state
    assert (state.messages, state.first_seq, state.last_seq) == (2, 4, 5)


async def test_single_direct_gets(jetstream: JetStreamContext) -> None:
    await jetstream.add_stream(config())
    for number, subject in enumerate(("own.a", "chunk.a", "own.b", "chunk.a", "own.a")):
        await jetstream.publish(subject, b"%d" % number, headers={"A": "b"} if number == 1 else None)

    async def get(**arguments: Any) -> tuple[str | None, int | None, bytes | None]:
        raw = await jetstream.get_msg(S, direct=True, **arguments)
        return raw.subject, raw.seq, raw.data

    assert await get(subject="own.a") == ("own.a", 5, b"4")
    assert await get(seq=2) == ("chunk.a", 2, b"1")
    assert await get(seq=1, subject="own.a", next=True) == ("own.a", 1, b"0")
    assert await get(seq=2, subject="own.a", next=True) == ("own.a", 5, b"4")
    assert await get(seq=2, subject="own.*", next=True) == ("own.b", 3, b"2")
    raw = await jetstream.get_msg(S, seq=2, direct=True)
    assert raw.headers is not None
    assert (raw.headers["A"], raw.headers["Nats-Stream"]) == ("b", S)
    for missing in (
        {"subject": "own.c"},
        {"seq": 9},
        {"seq": 3, "subject": "own.b", "next": True},
        {"seq": 6, "subject": "own.a", "next": True},
    ):
        if missing.get("seq") == 3:
            await jetstream.delete_msg(S, 3)
        with pytest.raises(NotFoundError):
            await get(**missing)
    with pytest.raises(NotFoundError):
        await jetstream.delete_msg("T", 3)
    with pytest.raises(nats.errors.NoRespondersError):
        await jetstream.get_msg("T", seq=1, direct=True)


async def answers(bus: Bus, request: bytes) -> list[tuple[str, ...]]:
    """Return the answers to a batch request: sequence, body, pending, before; and the status at the end."""
    found: list[tuple[str, ...]] = []
    ended = asyncio.Event()

    async def receive(message: Msg) -> None:
        headers = message.headers or {}
        counts = headers.get("Nats-Num-Pending", ""), headers.get("Nats-Last-Sequence", "")
        if "Status" in headers:
            found.append((headers["Status"], headers.get("Description", ""), *counts))
            ended.set()
        else:
            found.append((headers["Nats-Sequence"], message.data.decode(), *counts))

    inbox = bus.client.new_inbox()
    subscription = await bus.client.subscribe(inbox, cb=receive)
    await bus.client.publish(f"$JS.API.DIRECT.GET.{S}", request, reply=inbox)
    async with asyncio.timeout(LIMIT_S):
        await ended.wait()
    await subscription.unsubscribe()
    return found


async def test_batched_direct_gets(bus: Bus, jetstream: JetStreamContext) -> None:
    await jetstream.add_stream(config())
    for number in range(6):
        await jetstream.publish(("own.a", "chunk.a")[number % 2], b"%d" % number)
    await jetstream.delete_msg(S, 2)
    assert await answers(bus, b'{"seq": 1, "batch": 3}') == [
        ("1", "0", "4", "0"),
        ("3", "2", "3", "1"),
        ("4", "3", "2", "3"),
        ("204", "EOB", "2", "4"),
    ]
    assert await answers(bus, b'{"seq": 5, "batch": 100}') == [
        ("5", "4", "1", "0"),
        ("6", "5", "0", "5"),
        ("204", "EOB", "0", "6"),
    ]
    assert await answers(bus, b'{"seq": 1, "batch": 100, "max_bytes": 1}') == [
        ("1", "0", "4", "0"),
        ("204", "EOB", "4", "1"),
    ]
    assert await answers(bus, b'{"seq": 2, "batch": 2, "next_by_subj": "own.*"}') == [
        ("3", "2", "1", "0"),
        ("5", "4", "0", "3"),
        ("204", "EOB", "0", "5"),
    ]
    assert await answers(bus, b'{"seq": 7, "batch": 2}') == [("404", "Message Not Found", "", "")]
    assert await answers(bus, b'{"multi_last": ["own.*", "chunk.a"]}') == [
        ("5", "4", "1", "0"),
        ("6", "5", "0", "5"),
        ("204", "EOB", "0", "6"),
    ]
    assert await answers(bus, b'{"multi_last": ["own.z"]}') == [("404", "No Results", "", "")]
    assert await answers(bus, b"{}") == [("408", "Empty Request", "", "")]
    assert await answers(bus, b"not json") == [("408", "Malformed Request", "", "")]


async def test_patterns_of_a_session_reach_the_subjects_of_all_identities(
    bus: Bus, jetstream: JetStreamContext
) -> None:
    await jetstream.add_stream(config(subjects=["chunk.*.*"], max_msgs_per_subject=3))
    for subject in ("chunk.a.w1", "chunk.b.w1", "chunk.a.w2", "chunk.ab.w1", "chunk.a.w1", "chunk.b.w2"):
        await jetstream.publish(subject)

    async def place(**request: Any) -> tuple[str | None, str | None]:
        answer = await bus.client.request(f"$JS.API.DIRECT.GET.{S}", json.dumps(request).encode(), LIMIT_S)
        headers = answer.headers or {}
        return headers.get("Nats-Subject"), headers.get("Nats-Sequence", headers.get("Status"))

    assert await place(last_by_subj="chunk.a.*") == ("chunk.a.w1", "5")
    assert await place(last_by_subj="chunk.b.*") == ("chunk.b.w2", "6")
    assert await place(last_by_subj="chunk.c.*") == (None, "404")
    assert await place(seq=2, next_by_subj="chunk.a.*") == ("chunk.a.w2", "3")
    assert await place(seq=6, next_by_subj="chunk.a.*") == (None, "404")
    assert await stored(jetstream, "chunk.>") == {
        "chunk.a.w1": 2,
        "chunk.a.w2": 1,
        "chunk.ab.w1": 1,
        "chunk.b.w1": 1,
        "chunk.b.w2": 1,
    }
    # The limit is one message per subject.
    for _ in range(4):
        await jetstream.publish("chunk.a.w2")
    assert await stored(jetstream, "chunk.a.*") == {"chunk.a.w1": 2, "chunk.a.w2": 3}
    await jetstream.purge_stream(S, subject="chunk.a.*", seq=8)
    assert await stored(jetstream, "chunk.*.w1") == {"chunk.ab.w1": 1, "chunk.b.w1": 1}
    await jetstream.purge_stream(S, subject="chunk.a.*")
    assert await stored(jetstream, "chunk.a.*") == {}


async def test_what_a_stream_does_not_take_any_more_stays_in_it(jetstream: JetStreamContext) -> None:
    await jetstream.add_stream(config())
    await jetstream.publish("chunk.a", b"1")
    await jetstream.update_stream(config(subjects=["own.*", "chunk.*.*"]))
    with pytest.raises(NoStreamResponseError):
        await jetstream.publish("chunk.a", b"2")
    await jetstream.publish("chunk.a.w1", b"3")
    assert await stored(jetstream, "chunk.>") == {"chunk.a": 1, "chunk.a.w1": 1}
    assert (await jetstream.get_msg(S, subject="chunk.a", direct=True)).data == b"1"


async def test_purging(jetstream: JetStreamContext) -> None:
    await jetstream.add_stream(config())
    for number in range(9):
        await jetstream.publish(("own.a", "chunk.a", "chunk.b")[number % 3])
    await jetstream.purge_stream(S, subject="chunk.a", keep=1)
    assert await stored(jetstream) == {"chunk.a": 1, "chunk.b": 3, "own.a": 3}
    assert (await jetstream.get_msg(S, subject="chunk.a", direct=True)).seq == 8
    await jetstream.purge_stream(S, subject="chunk.b")
    assert await stored(jetstream) == {"chunk.a": 1, "own.a": 3}
    await jetstream.purge_stream(S, seq=7)
    assert await stored(jetstream) == {"chunk.a": 1, "own.a": 1}
    state = (await jetstream.stream_info(S)).state
    assert (state.first_seq, state.last_seq) == (7, 9)
    with pytest.raises(BadRequestError):
        await jetstream.purge_stream(S, seq=1, keep=1)
    await jetstream.purge_stream(S)
    state = (await jetstream.stream_info(S)).state
    assert (state.messages, state.first_seq, state.last_seq) == (0, 10, 9)
    assert (await jetstream.publish("own.a")).seq == 10


async def test_counts_by_subject_follow_the_filter(jetstream: JetStreamContext) -> None:
    await jetstream.add_stream(config())
    for subject in ("own.a", "own.b", "chunk.a", "chunk.a"):
        await jetstream.publish(subject)
    assert await stored(jetstream, "chunk.*") == {"chunk.a": 2}
    assert await stored(jetstream, "own.b") == {"own.b": 1}
    assert await stored(jetstream, "chunk.b") == {}
    assert (await jetstream.stream_info(S)).state.subjects is None


async def test_streams_are_made_once_and_changed_in_place(jetstream: JetStreamContext) -> None:
    made = await jetstream.add_stream(config())
    assert (await jetstream.add_stream(config())).created == made.created
    await jetstream.publish("own.a")
    with pytest.raises(BadRequestError) as error:
        await jetstream.add_stream(config(max_bytes=1_000))
    assert error.value.err_code == 10058
    with pytest.raises(BadRequestError) as error:
        await jetstream.add_stream(config(name="T", subjects=["own.x"]))
    assert error.value.err_code == 10065
    changed = await jetstream.update_stream(config(max_bytes=1_000, subjects=["own.*"]))
    assert (changed.config.max_bytes, changed.config.subjects, changed.created) == (
        1_000,
        ["own.*"],
        made.created,
    )
    assert changed.state.messages == 1
    with pytest.raises(NoStreamResponseError):
        await jetstream.publish("chunk.a")
    with pytest.raises(NotFoundError):
        await jetstream.update_stream(config(name="T", subjects=["t"]))
    with pytest.raises(NotFoundError):
        await jetstream.stream_info("T")
    with pytest.raises(NotFoundError):
        await jetstream.delete_stream("T")
    assert await jetstream.find_stream_name_by_subject("own.z") == S
    assert (await jetstream.account_info()).limits.max_storage == -1


async def test_the_configuration_is_answered_as_it_was_given(jetstream: JetStreamContext) -> None:
    """The state store compares the wanted configuration with the existing one."""
    wanted = config(
        storage=api.StorageType.FILE,
        discard=api.DiscardPolicy.NEW,
        max_msgs_per_subject=400,
        max_age=3_600.0,
        max_bytes=100_000,
        duplicate_window=60.0,
        allow_msg_ttl=True,
        republish=api.RePublish(src=">", dest="live.>"),
    )
    await jetstream.add_stream(wanted)
    found = (await jetstream.stream_info(S)).config
    for name in ("subjects", "storage", "discard", "max_msgs_per_subject", "max_age", "max_bytes"):
        assert getattr(found, name) == getattr(wanted, name)
    for name in ("duplicate_window", "allow_direct", "allow_msg_ttl", "republish"):
        assert getattr(found, name) == getattr(wanted, name)


async def test_a_stream_made_anew_counts_from_one_and_was_born_later(jetstream: JetStreamContext) -> None:
    first = await jetstream.add_stream(config(storage=api.StorageType.MEMORY))
    for _ in range(3):
        await jetstream.publish("own.a", headers={"Nats-Msg-Id": "x"})
        await jetstream.publish("own.a")
    await jetstream.delete_stream(S)
    with pytest.raises(NoStreamResponseError):
        await jetstream.publish("own.a")
    second = await jetstream.add_stream(config(storage=api.StorageType.MEMORY))
    assert (second.state.last_seq, second.state.messages) == (0, 0)
    assert second.created is not None
    assert first.created is not None
    assert second.created > first.created
    ack = await jetstream.publish("own.a", headers={"Nats-Msg-Id": "x"})
    assert (ack.seq, ack.duplicate) == (1, None)
