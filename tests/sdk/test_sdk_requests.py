"""The client's requests: what is repeated, with which key, and which errors come back."""

from __future__ import annotations

import json
from collections.abc import Callable
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
    answers = Answers(problem(429, "tenant_limit", retry_after_s=3600))
    async with AsyncClient(transport=answers) as client:
        with pytest.raises(NoCapacityError) as later:
            await client.create("a red circle")
    assert later.value.retry_after_s == 3600
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
