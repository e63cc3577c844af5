"""REST over a real pool: sessions, controls, and refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from tests.gateway.conftest import StartSession
from tests.helpers.pool_harness import Pool
from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.gateway.workers.schemas import Worker

PROBLEM = "application/problem+json"
LIMIT = 2_000


def problem(answer: httpx.Response, status: int, code: str, field: str | None = None) -> dict[str, object]:
    """Check that the answer is this problem, complete."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == PROBLEM
    body: dict[str, object] = answer.json()
    assert body["type"] == f"urn:turboserve:problem:{code}"
    assert (body["status"], body["code"], body.get("field")) == (status, code, field)
    assert body["title"]
    assert body["detail"]
    assert body["instance"] == answer.request.url.path
    return body


async def test_a_session_from_creation_to_end(api: httpx.AsyncClient, start: StartSession) -> None:
    session = await start("a red circle", seed=7, metadata={"who": "me"})
    assert session["phase"] == "requested"
    assert (session["model"], session["seed"], session["metadata"]) == ("toyworld", 7, {"who": "me"})
    links = session["links"]
    assert links["stream"] == f"/v1/sessions/{session['id']}/stream"
    read = await api.get(links["self"])
    assert read.status_code == 200
    assert read.json()["prompt"] == "a red circle"

    receipt = await api.post(links["prompts"], json={"prompt": "a blue square"})
    assert receipt.status_code == 202
    assert receipt.json()["control_seq"] == 1
    assert (await api.get(links["self"])).json()["prompt"] == "a blue square"

    for _ in range(2):
        paused = await api.post(links["pause"])
        assert (paused.status_code, paused.json()["activity"]) == (202, "paused")
    for _ in range(2):
        resumed = await api.post(links["resume"])
        assert (resumed.status_code, resumed.json()["activity"]) == (202, "watching")

    ends = [await api.delete(links["self"]) for _ in range(2)]
    assert [(each.status_code, each.json()["phase"]) for each in ends] == [(200, "terminated")] * 2
    problem(await api.post(links["prompts"], json={"prompt": "x"}), 409, "transition_not_allowed", "phase")
    # Answers have the number of the newest event that they reflect.
    answers = [session, read.json(), paused.json(), resumed.json(), *(each.json() for each in ends)]
    numbers = [each["newest_event"] for each in answers]
    assert numbers[0] == 1
    assert numbers == sorted(numbers)
    last = (await api.get(links["events"])).text.split("event: ")[-1]
    assert last.startswith("session.ended\n")
    assert last.endswith(f"id: {ends[0].json()['newest_event']}\n\n")
    problem(await api.post(links["pause"]), 409, "transition_not_allowed", "phase")


async def test_a_repeated_pause_and_resume_make_no_second_event(
    api: httpx.AsyncClient, start: StartSession
) -> None:
    session = await start()
    links = session["links"]
    for name in ("pause", "pause", "resume", "resume", "pause"):
        assert (await api.post(links[name])).status_code == 202
    await api.delete(links["self"])
    lines = (await api.get(links["events"])).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    # The scheduler may place or suspend the session between two calls: those events have other types, or
    # another activity.
    seen = [(event["type"], event["activity"]) for event in events]
    assert seen.count(("session.suspended", "paused")) == 2
    assert seen.count(("session.resume_requested", "watching")) == 1


async def test_times_are_those_of_rfc_3339(api: httpx.AsyncClient, start: StartSession) -> None:
    session = await start()
    receipt = (await api.post(session["links"]["prompts"], json={"prompt": "a blue square"})).json()
    for time in (session["created_at"], session["updated_at"], receipt["accepted_at"]):
        parsed = datetime.fromisoformat(time)
        assert time.endswith("Z")
        assert abs(parsed - datetime.now(UTC)) < timedelta(hours=1)


async def test_location_says_where_the_session_is(api: httpx.AsyncClient) -> None:
    answer = await api.post("/v1/sessions", json={"prompt": "x"})
    assert (await api.get(answer.headers["location"])).json()["id"] == answer.json()["id"]
    await api.delete(answer.headers["location"])


async def test_decisions_say_why_it_was_placed(api: httpx.AsyncClient, start: StartSession) -> None:
    session = await start()
    async with asyncio.timeout(60):
        while not (found := (await api.get(session["links"]["decisions"])).json()["decisions"]):
            await asyncio.sleep(0.1)
    assert found[0]["kind"] == "place"
    assert found[0]["reason"]


async def test_a_repeated_creation_is_one_session(api: httpx.AsyncClient) -> None:
    headers = {"Idempotency-Key": "create-once"}
    answers = await asyncio.gather(
        *(api.post("/v1/sessions", json={"prompt": "a red circle"}, headers=headers) for _ in range(4))
    )
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert len({answer.json()["seed"] for answer in answers}) == 1
    other = await api.post("/v1/sessions", json={"prompt": "a blue square"}, headers=headers)
    problem(other, 422, "idempotency_key_reused", "Idempotency-Key")
    await api.delete(answers[0].headers["location"])


async def test_a_repeated_prompt_is_accepted_once(api: httpx.AsyncClient, start: StartSession) -> None:
    session = await start()
    headers = {"Idempotency-Key": "prompt-once"}
    first, second = [
        await api.post(session["links"]["prompts"], json={"prompt": "a blue square"}, headers=headers)
        for _ in range(2)
    ]
    assert first.json() == second.json()


async def test_pages_hold_every_session_once(api: httpx.AsyncClient, start: StartSession) -> None:
    made = {(await start())["id"] for _ in range(3)}
    seen: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        page = (await api.get("/v1/sessions", params={"limit": 2, **cursor})).json()
        assert len(page["sessions"]) <= 2
        seen += [session["id"] for session in page["sessions"]]
        if page["next"] is None:
            break
        cursor = {"after": page["next"]}
    assert len(seen) == len(set(seen))
    assert made <= set(seen)
    # No viewer watches them, so on a slow machine they may be suspended by now.
    for phases, there in ((["requested", "active", "suspended"], made), (["terminated", "failed"], set())):
        found = (await api.get("/v1/sessions", params={"phase": phases})).json()["sessions"]
        assert made & {session["id"] for session in found} == there
        assert {session["phase"] for session in found} <= set(phases)


BAD = [
    ({}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": " \n\t "}, "prompt"),
    ({"prompt": "x" * (LIMIT + 1)}, "prompt"),
    ({"prompt": "nul \0"}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ["x"]}, "prompt"),
    ({"prompt": "x", "seed": "5"}, "seed"),
    ({"prompt": "x", "seed": 1.5}, "seed"),
    ({"prompt": "x", "seed": True}, "seed"),
    ({"prompt": "x", "seed": -1}, "seed"),
    ({"prompt": "x", "seed": 2**63}, "seed"),
    ({"prompt": "x", "model": "no/such model"}, "model"),
    ({"prompt": "x", "model": ""}, "model"),
    ({"prompt": "x", "metadata": [1]}, "metadata"),
    ({"prompt": "x", "metadata": {"k": 1}}, "metadata.k"),
    ({"prompt": "x", "metadata": {"k": "v" * 513}}, "metadata.k"),
    ({"prompt": "x", "metadata": {str(n): "v" for n in range(17)}}, "metadata"),
    ({"prompt": "x", "promt": "y"}, "promt"),
]


@pytest.mark.parametrize(("body", "field"), BAD)
async def test_a_bad_field_is_named(api: httpx.AsyncClient, body: object, field: str) -> None:
    problem(await api.post("/v1/sessions", json=body), 422, "invalid_input", field)


async def test_all_bad_fields_are_named_at_once(api: httpx.AsyncClient) -> None:
    body = {"prompt": "x" * (LIMIT + 1), "seed": -1, "metadata": {"k": 5}, "promt": "y"}
    found = problem(await api.post("/v1/sessions", json=body), 422, "invalid_input", "prompt")
    assert isinstance(found["errors"], list)
    assert [(error["field"], error.get("limit")) for error in found["errors"]] == [
        ("prompt", LIMIT),
        ("seed", 0),
        ("metadata.k", None),
        ("promt", None),
    ]
    assert all(error["message"] for error in found["errors"])
    assert found["errors"][0]["message"] == f"must have at most {LIMIT} characters, not {LIMIT + 1}"
    found = problem(await api.post("/v1/sessions", json={"prompt": ""}), 422, "invalid_input", "prompt")
    assert found["detail"] == "prompt: must have at least 1 character, not 0"
    found = problem(await api.get("/v1/sessions?limit=0&phase=asleep"), 422, "invalid_input", "phase.0")
    assert isinstance(found["errors"], list)
    assert {error["field"] for error in found["errors"]} == {"limit", "phase.0"}


async def test_a_body_with_thousands_of_errors_gets_a_short_answer(api: httpx.AsyncClient) -> None:
    body = {"prompt": "x"} | {f"unknown{number}": 1 for number in range(3_000)}
    answer = await api.post("/v1/sessions", json=body)
    assert len(problem(answer, 422, "invalid_input", "unknown0")["errors"]) == 32  # type: ignore[arg-type]


async def test_limits_are_named(api: httpx.AsyncClient) -> None:
    answer = await api.post("/v1/sessions", json={"prompt": "x" * (LIMIT + 1)})
    assert answer.json()["limit"] == LIMIT
    assert str(LIMIT) in answer.json()["detail"]


async def test_the_longest_prompt_is_taken(start: StartSession) -> None:
    assert len((await start("ü😀" * (LIMIT // 2)))["prompt"]) == LIMIT


async def test_an_unknown_model_is_refused(api: httpx.AsyncClient) -> None:
    problem(
        await api.post("/v1/sessions", json={"prompt": "x", "model": "wan-900b"}),
        422,
        "unknown_model",
        "model",
    )


@pytest.mark.parametrize(
    "content", [b"", b"{", b"null", b"[]", b'"x"', b"5", b"\xff\xfe", b"[" * 60_000, b'{"prompt": "\\ud800"}']
)
async def test_a_body_that_cannot_be_read_is_refused(api: httpx.AsyncClient, content: bytes) -> None:
    answer = await api.post("/v1/sessions", content=content, headers={"Content-Type": "application/json"})
    readable = content in (b"", b"null", b"[]", b'"x"', b"5", b'{"prompt": "\\ud800"}')
    code = (422, "invalid_input") if readable else (400, "malformed_request")
    assert (answer.status_code, answer.json()["code"]) == code
    assert answer.headers["content-type"] == PROBLEM
    assert answer.json()["field"] in ("body", "prompt")


async def test_a_body_over_the_limit_is_refused_with_and_without_a_length(api: httpx.AsyncClient) -> None:
    body = problem(
        await api.post("/v1/sessions", content=b" " * (64 * 1024 + 1)), 413, "body_too_large", "body"
    )
    assert body["limit"] == 64 * 1024

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 4096

    problem(await api.post("/v1/sessions", content=endless()), 413, "body_too_large", "body")


SESSION_PATHS = [
    ("GET", ""),
    ("DELETE", ""),
    ("POST", "/prompts"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/decisions"),
    ("GET", "/events"),
    ("GET", "/stream.mp4"),
]


@pytest.mark.parametrize("session", ["ses_nobody", "no.such", "*", "%3E", "a b", "x" * 65, "ses_%00"])
@pytest.mark.parametrize(("method", "path"), SESSION_PATHS)
async def test_an_unknown_session_is_not_found(
    api: httpx.AsyncClient, method: str, path: str, session: str
) -> None:
    body = {"prompt": "x"} if path == "/prompts" else None
    answer = await api.request(method, f"/v1/sessions/{session}{path}", json=body)
    assert answer.status_code == 404
    assert answer.json()["code"] == "session_not_found"


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/sessions?limit=0", "limit"),
        ("/v1/sessions?limit=many", "limit"),
        ("/v1/sessions?phase=sleeping", "phase.0"),
        ("/v1/sessions?after=not-a-cursor", "after"),
        ("/v1/sessions/ses_x/stream.mp4?after=-2", "after"),
        ("/v1/sessions/ses_x/stream.mp4?after=last", "after"),
    ],
)
async def test_bad_queries_are_refused(api: httpx.AsyncClient, path: str, field: str) -> None:
    problem(await api.get(path), 422, "invalid_input", field)


async def test_unknown_paths_and_methods_are_problems(api: httpx.AsyncClient) -> None:
    problem(await api.get("/v2/sessions"), 404, "not_found", "path")
    problem(await api.get("/page/nothing.js"), 404, "not_found", "path")
    answer = await api.put("/v1/sessions", json={})
    problem(answer, 405, "method_not_allowed", "method")
    assert answer.headers["allow"] == "GET, HEAD, POST"
    assert (await api.post("/")).headers["allow"] == "GET, HEAD"


async def test_the_pool_is_shown(api: httpx.AsyncClient) -> None:
    models = (await api.get("/v1/models")).json()["models"]
    # Other tests' workers may serve other models here.
    [default] = [model for model in models if model["default"]]
    assert (default["id"], default["capacity"]) == ("toyworld", 8)
    workers = (await api.get("/v1/workers")).json()["workers"]
    assert {worker["phase"] for worker in workers} == {"ready"}


@pytest.mark.parametrize(("floor", "most"), [(None, 4), (3, 4), (9, 9)])
def test_a_worker_shows_how_many_sessions_it_holds_at_most(floor: int | None, most: int) -> None:
    """A worker of an earlier version reports no K_floor."""
    record = WorkerRecord(
        id="wk",
        model="m",
        phase=WorkerPhase.READY,
        capacity=4,
        floor_capacity=floor,
        started_at=1,
        renewed_at=1,
    )
    assert Worker.of(record).floor_capacity == most


async def test_health_and_metrics(api: httpx.AsyncClient, start: StartSession) -> None:
    await start()
    assert (await api.get("/healthz")).json() == {"status": "ok"}
    ready = await api.get("/readyz")
    assert (ready.status_code, ready.json()["status"]) == (200, "ready")
    text = (await api.get("/metrics")).text
    assert "turboserve_gateway_sessions_created_total" in text


async def test_the_page_loads_nothing_from_elsewhere(api: httpx.AsyncClient) -> None:
    page = await api.get("/")
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in page.text.replace("http-equiv", "")
    for name in ("player.js", "client/index.js", "client/player.js"):
        script = await api.get(f"/page/{name}")
        assert script.headers["content-type"].startswith("text/javascript")
        assert script.headers["x-content-type-options"] == "nosniff"


def test_nothing_of_this_was_logged_as_a_crash(pool: Pool, gateway_url: str) -> None:
    log = pool.log("gateway")
    assert "Traceback" not in log
    assert " error " not in log
