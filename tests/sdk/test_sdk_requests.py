"""The client's requests: what is repeated, with which key, and which errors come back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from turboserve.client import (
    AsyncClient,
    Client,
    GatewayUnreachableError,
    NoCapacityError,
    NotFoundError,
    ProblemError,
    Quality,
    UnauthorizedError,
)

SESSION: dict[str, Any] = {
    "id": "ses_1",
    "phase": "requested",
    "activity": "watching",
    "model": "toyworld",
    "prompt": "a red circle",
    "seed": 7,
    "metadata": {},
    "epoch": 0,
    "worker": None,
    "target": None,
    "next_chunk": 0,
    "control_seq": 0,
    "applied_control_seq": 0,
    "playhead_s": 0.0,
    "reason": None,
    "created_at": "2026-11-22T21:04:05.250000Z",
    "updated_at": "2026-11-22T21:04:05.250000Z",
}
Answer = Callable[[httpx.Request], httpx.Response]


class Answers(httpx.AsyncBaseTransport):
    """Answers each request by the next function, and the last one from then on."""

    def __init__(self, *answers: Answer) -> None:
        self.requests: list[httpx.Request] = []
        self._answers = answers

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        self.requests.append(request)
        return self._answers[min(len(self.requests), len(self._answers)) - 1](request)


def answer(status: int, body: Any) -> Answer:
    return lambda _: httpx.Response(status, json=body)


def problem(status: int, code: str, **more: Any) -> Answer:
    return answer(status, {"status": status, "code": code, "detail": f"it is {code}", **more})


def lost(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadError("connection reset", request=request)


async def test_an_answer_that_was_overtaken_does_not_replace_a_newer_one() -> None:
    paused = answer(202, SESSION | {"activity": "paused", "newest_event": 4})
    late = answer(200, SESSION | {"newest_event": 3})
    async with AsyncClient(transport=Answers(paused, late, answer(200, SESSION))) as client:
        session = client.session("ses_1")
        await session.pause()
        assert (await session.refresh()).activity == "watching"
        assert session.info is not None
        assert session.info.activity == "paused"
        # An earlier gateway does not number its answers.
        await session.refresh()
        assert session.info.activity == "watching"


async def test_a_lost_answer_is_asked_for_with_the_same_key() -> None:
    answers = Answers(lost, problem(504, "deadline"), answer(201, SESSION))
    async with AsyncClient(transport=answers) as client:
        session = await client.create("a red circle", seed=7, metadata={"who": "me"}, quality={"pin": True})
    assert session.id == "ses_1"
    keys = {request.headers["Idempotency-Key"] for request in answers.requests}
    assert len(answers.requests) == 3
    assert len(keys) == 1
    assert json.loads(answers.requests[-1].content) == {
        "prompt": "a red circle",
        "seed": 7,
        "metadata": {"who": "me"},
        "quality": {"pin": True},
    }


async def test_two_calls_have_two_keys() -> None:
    answers = Answers(answer(201, SESSION))
    async with AsyncClient(transport=answers) as client:
        await client.create("a red circle")
        await client.create("a red circle")
    assert len({request.headers["Idempotency-Key"] for request in answers.requests}) == 2


async def test_a_refusal_that_a_repeat_would_meet_again_comes_at_once() -> None:
    answers = Answers(problem(422, "invalid_input", field="seed", limit=0))
    async with AsyncClient(transport=answers) as client:
        with pytest.raises(ProblemError, match="invalid_input: it is invalid_input") as refused:
            await client.create("a red circle", seed=-1)
    assert (refused.value.field, refused.value.limit) == ("seed", 0)
    assert len(answers.requests) == 1


async def test_a_full_pool_is_tried_again_after_the_time_that_it_names() -> None:
    full = problem(429, "no_capacity", retry_after_s=0.01)
    answers = Answers(full, full, answer(201, SESSION))
    async with AsyncClient(transport=answers) as client:
        await client.create("a red circle")
    assert len(answers.requests) == 3
    answers = Answers(full)
    async with AsyncClient(transport=answers, attempts=2) as client:
        with pytest.raises(NoCapacityError):
            await client.create("a red circle")
    assert len(answers.requests) == 2
    # A wait of an hour is the caller's decision.
    answers = Answers(problem(429, "tenant_limit", retry_after_s=3600, request_id="req_1"))
    async with AsyncClient(transport=answers) as client:
        with pytest.raises(NoCapacityError) as later:
            await client.create("a red circle")
    assert later.value.retry_after_s == 3600
    assert later.value.request_id == "req_1"
    assert len(answers.requests) == 1


@pytest.mark.parametrize(("status", "error"), [(401, UnauthorizedError), (404, NotFoundError)])
async def test_errors_have_a_type(status: int, error: type[ProblemError]) -> None:
    async with AsyncClient(transport=Answers(problem(status, "some_code"))) as client:
        with pytest.raises(error):
            await client.session("ses_1").refresh()


async def test_an_answer_that_is_no_problem_names_its_status() -> None:
    async with AsyncClient(transport=Answers(lambda _: httpx.Response(502, text="<html>"))) as client:
        with pytest.raises(ProblemError, match="502 Bad Gateway"):
            await client.models()


async def test_a_gateway_that_never_answers_is_unreachable() -> None:
    answers = Answers(lost)
    async with AsyncClient(transport=answers, attempts=2) as client:
        with pytest.raises(GatewayUnreachableError, match="connection reset"):
            await client.models()
    assert len(answers.requests) == 2


async def test_all_pages_are_listed() -> None:
    second = {**SESSION, "id": "ses_2"}
    answers = Answers(
        answer(200, {"sessions": [SESSION], "next": "cursor"}),
        answer(200, {"sessions": [second], "next": None}),
    )
    async with AsyncClient(transport=answers) as client:
        assert [each.id async for each in client.sessions(["active"])] == ["ses_1", "ses_2"]
    assert [request.url.params.get("after") for request in answers.requests] == [None, "cursor"]
    assert answers.requests[0].url.params.get_list("phase") == ["active"]


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "ftp://host", "http://"])
def test_an_address_without_scheme_or_host_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="base_url"):
        AsyncClient(url)


def test_the_client_without_async_needs_its_block() -> None:
    with pytest.raises(RuntimeError, match="with"):
        Client().models()


async def test_a_change_has_only_what_is_given_and_none_resets_it() -> None:
    changed = {**SESSION, "quality": {"floor": 0.9, "pin": False}, "max_lead_s": 1.5}
    answers = Answers(lost, answer(200, changed))
    async with AsyncClient(transport=answers) as client:
        session = client.session("ses_1")
        info = await session.change(quality=Quality(floor=0.9), max_lead_s=1.5)
        assert (info.quality, info.max_lead_s) == (Quality(floor=0.9), 1.5)
        await session.change(quality=None)
        await session.change(max_lead_s=None, quality={"pin": True})
    assert {(request.method, request.url.path) for request in answers.requests} == {
        ("PATCH", "/v1/sessions/ses_1")
    }
    assert [json.loads(request.content) for request in answers.requests[1:]] == [
        {"quality": {"floor": 0.9, "pin": False}, "max_lead_s": 1.5},
        {"quality": None},
        {"quality": {"pin": True}, "max_lead_s": None},
    ]


async def test_limits_are_given_with_a_session_and_its_prompts() -> None:
    receipt = {
        "session": "ses_1",
        "prompt_id": "prm_1",
        "control_seq": 1,
        "accepted_at": "2026-11-22T21:04:05.250000Z",
    }
    answers = Answers(answer(201, SESSION), answer(202, receipt))
    async with AsyncClient(transport=answers) as client:
        session = await client.create("a red circle", quality=Quality(pin=True), max_lead_s=0.75)
        await session.prompt("a blue square", drop_buffer=True)
        await session.prompt("a blue square")
    assert [json.loads(request.content) for request in answers.requests] == [
        {
            "prompt": "a red circle",
            "metadata": {},
            "quality": {"floor": None, "pin": True},
            "max_lead_s": 0.75,
        },
        {"prompt": "a blue square", "drop_buffer": True},
        {"prompt": "a blue square"},
    ]


async def test_a_phase_of_a_newer_gateway_is_a_text() -> None:
    async with AsyncClient(transport=Answers(answer(200, {**SESSION, "phase": "hibernating"}))) as client:
        info = await client.session("ses_1").refresh()
    assert info.phase == "hibernating"
    assert not info.ended


def ended_stream(_: httpx.Request) -> httpx.Response:
    event = {
        "type": "session.ended",
        "sequence": 3,
        "id": "ev_3",
        "at": "2026-11-22T21:04:05.250000Z",
        "phase": "terminated",
        "activity": "watching",
        "epoch": 1,
        "control_seq": 0,
    }
    headers = {"Content-Type": "text/event-stream"}
    return httpx.Response(200, headers=headers, text=f"data: {json.dumps(event)}\n\n")


def proxy_is_busy(_: httpx.Request) -> httpx.Response:
    return httpx.Response(503, text="<html>", headers={"Retry-After": "0"})


async def test_events_are_asked_for_again_after_the_time_that_a_refusal_names() -> None:
    """Incident: a gateway that was full for a second ended the program."""
    full = problem(429, "too_many_streams", retry_after_s=0.01)
    answers = Answers(full, proxy_is_busy, lost, ended_stream)
    async with AsyncClient(transport=answers) as client:
        assert [event.type async for event in client.session("ses_1").events()] == ["session.ended"]
    assert len(answers.requests) == 4
    for refusals, attempts in ((Answers(full), 2), (Answers(problem(503, "starting")), 1)):
        async with AsyncClient(transport=refusals, attempts=2) as client:
            with pytest.raises(ProblemError):
                await anext(client.session("ses_1").events())
        assert len(refusals.requests) == attempts


class Broken(httpx.AsyncByteStream):
    """A body that ends too early."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"0123"
        raise httpx.ReadError("lost")


@pytest.mark.parametrize("changed", [False, True])
async def test_a_download_goes_on_after_a_broken_connection(tmp_path: Path, changed: bool) -> None:
    asked: list[tuple[str | None, str | None]] = []

    def answered(request: httpx.Request) -> httpx.Response:
        asked.append((request.headers.get("range"), request.headers.get("if-range")))
        if len(asked) == 1:
            return httpx.Response(200, headers={"ETag": '"1"', "Content-Length": "10"}, stream=Broken())
        if changed:
            return httpx.Response(200, headers={"ETag": '"2"'}, content=b"abc")
        return httpx.Response(206, headers={"ETag": '"1"'}, content=b"456789")

    target = tmp_path / "video.mp4"
    target.write_bytes(b"an earlier file that is longer")
    async with AsyncClient(transport=httpx.MockTransport(answered)) as client:
        await client.recording("rec_1").download(target)
    assert asked == [(None, None), ("bytes=4-", '"1"')]
    assert target.read_bytes() == (b"abc" if changed else b"0123456789")
