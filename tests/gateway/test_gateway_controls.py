"""Typed controls over REST and the WebSocket: from the declaration to the chunk that shows a value."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import StartSession, Watch
from tests.helpers.problem import problem


async def test_a_model_declares_its_controls(api: httpx.AsyncClient, start: StartSession) -> None:
    session = await start()
    [model] = (await api.get("/v1/models")).json()["models"]
    [steer] = model["controls"]
    assert (model["id"], steer["name"]) == (session["model"], "steer")
    assert {"stop", "left", "right", "up", "down"} <= set(steer["schema"]["enum"])
    assert (session["controls"], session["links"]["controls"]) == (
        {},
        f"/v1/sessions/{session['id']}/controls",
    )


async def test_a_control_over_rest_has_two_receipts_and_is_in_the_session(
    api: httpx.AsyncClient, start: StartSession, watch: Watch
) -> None:
    session = await start()
    viewer = await watch(session["id"])
    await viewer.chunks(2)
    body = {"name": "steer", "value": "left"}
    answer = await api.post(session["links"]["controls"], json=body)
    assert answer.status_code == 202, answer.text
    assert "RateLimit" in answer.headers
    receipt = answer.json()
    assert (receipt["session"], receipt["control_seq"]) == (session["id"], 1)
    accepted = await viewer.until("control.accepted", control_id=receipt["control_id"])
    assert (accepted["name"], accepted["value"], accepted["control_seq"]) == ("steer", "left", 1)
    shown = await viewer.until("chunk", control_seq=1)
    # The event may be before or after the chunk itself.
    applied = [each for each in viewer.seen if each["type"] == "control.applied"]
    event = applied[0] if applied else await viewer.until("control.applied")
    assert (event["control_id"], event["chunk_index"]) == (receipt["control_id"], shown["index"])
    row = (await api.get(session["links"]["self"])).json()
    assert (row["controls"], row["control_seq"], row["prompt"]) == ({"steer": "left"}, 1, session["prompt"])
    later = await watch(session["id"])
    assert (await later.next())["controls"] == {"steer": "left"}
    await api.post(session["links"]["controls"], json={"name": "steer", "value": None})
    assert (await api.get(session["links"]["self"])).json()["controls"] == {}
    reset = await viewer.until("control.accepted")
    assert "value" not in reset


async def test_a_session_begins_with_values_of_controls(
    api: httpx.AsyncClient, start: StartSession, watch: Watch
) -> None:
    session = await start(controls={"steer": "up"})
    assert (session["controls"], session["control_seq"]) == ({"steer": "up"}, 0)
    assert (await (await watch(session["id"])).next())["controls"] == {"steer": "up"}
    for given, field in (
        ({"steer": "sideways"}, "controls.steer"),
        ({"fly": 1}, "controls.fly"),
        ({"Steer!": 1}, "controls"),
        ({"steer": "x" * 13_000}, "controls"),
        ({"steer": json.loads("[" * 400 + "]" * 400)}, "controls"),
        ({f"a{n}": "x" * 12_000 for n in range(3)}, "controls"),
        ("left", "controls"),
    ):
        answer = await api.post("/v1/sessions", json={"prompt": "a red circle", "controls": given})
        problem(answer, 422, "invalid_input", field)
    [model] = (await api.get("/v1/models")).json()["models"]
    assert [each["fixed"] for each in model["controls"]] == [False]


async def test_a_control_over_the_socket(start: StartSession, watch: Watch) -> None:
    viewer = await watch((await start())["id"])
    await viewer.chunks(1)
    await viewer.say(type="control", id="c1", name="steer", value="up", drop_buffer=True)
    receipt = await viewer.until("control_receipt")
    assert (receipt["id"], receipt["control_seq"]) == ("c1", 1)
    skip = await viewer.until("skip")
    assert skip["control_seq"] == 1
    assert (await viewer.until("chunk"))["control_seq"] == 1
    # The same id is the same value.
    await viewer.say(type="control", id="c1", name="steer", value="up", drop_buffer=True)
    again = await viewer.until("control_receipt")
    assert (again["control_id"], again["control_seq"]) == (receipt["control_id"], 1)
    await viewer.say(type="control", id="c1", name="steer", value="down")
    error = await viewer.until("error")
    assert (error["id"], error["code"], error["field"]) == ("c1", "idempotency_key_reused", "id")
    await viewer.say(type="control", id="c2", name="steer", value="sideways")
    refused = await viewer.until("error")
    assert (refused["id"], refused["code"], refused["field"]) == ("c2", "invalid_input", "value")
    assert "left" in refused["limit"]


async def test_a_later_direction_supersedes_an_earlier_one(
    api: httpx.AsyncClient, start: StartSession, watch: Watch
) -> None:
    session = await start()
    viewer = await watch(session["id"])
    await viewer.chunks(1)
    # Paused, so that both wait for one boundary.
    await api.post(session["links"]["pause"])
    await viewer.until("session.suspended")
    sent = [
        (await api.post(session["links"]["controls"], json={"name": "steer", "value": value})).json()
        for value in ("left", "right")
    ]
    await api.post(session["links"]["resume"])
    lost = await viewer.until("control.superseded")
    assert (lost["control_id"], lost["superseded_by"]) == (sent[0]["control_id"], sent[1]["control_id"])
    assert (await viewer.until("control.applied"))["control_id"] == sent[1]["control_id"]


async def test_a_repeated_key_is_one_value(api: httpx.AsyncClient, start: StartSession) -> None:
    path = (await start())["links"]["controls"]
    key = {"Idempotency-Key": "left-1"}
    body = {"name": "steer", "value": "left"}
    first, again = [(await api.post(path, json=body, headers=key)).json() for _ in range(2)]
    assert first == again
    other = await api.post(path, json={**body, "value": "right"}, headers=key)
    problem(other, 422, "idempotency_key_reused", "Idempotency-Key")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"name": "steer", "value": "sideways"}, "value"),
        ({"name": "steer", "value": 3}, "value"),
        ({"name": "steer", "value": {"x": [1, 2]}}, "value"),
        ({"name": "steer", "value": "x" * 2_000}, "value"),
        ({"name": "steer", "value": "\x00"}, "value"),
        ({"name": "steer", "value": json.loads("[" * 400 + "]" * 400)}, "value"),
        ({"name": "fly", "value": "left"}, "name"),
        ({"name": "Steer!", "value": "left"}, "name"),
        ({"value": "left"}, "name"),
        ({"name": "steer", "value": "left", "speed": 2}, "speed"),
    ],
    ids=lambda each: None if isinstance(each, str) else str(each)[:40],
)
async def test_what_the_schema_does_not_allow_names_the_field(
    api: httpx.AsyncClient, start: StartSession, body: dict[str, Any], field: str
) -> None:
    session = await start()
    problem(await api.post(session["links"]["controls"], json=body), 422, "invalid_input", field)
    assert (await api.get(session["links"]["self"])).json()["control_seq"] == 0


async def test_an_ended_session_an_unknown_one_and_a_huge_body(
    api: httpx.AsyncClient, start: StartSession
) -> None:
    links = (await start())["links"]
    body = {"name": "steer", "value": "left"}
    huge = await api.post(links["controls"], json={**body, "value": "x" * 5_000_000})
    assert huge.status_code == 413
    await api.delete(links["self"])
    ended = await api.post(links["controls"], json=body)
    problem(ended, 409, "transition_not_allowed", "phase")
    unknown = await api.post("/v1/sessions/ses_none/controls", json=body)
    problem(unknown, 404, "session_not_found", "session")
