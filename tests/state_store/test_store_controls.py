"""Typed controls: validated by the declaration of the session's worker, numbered and settled like prompts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.state_store.conftest import StartStore
from tests.state_store.state_store_harness import Harness
from turboserve.contracts.control_declarations import ControlDeclaration
from turboserve.contracts.errors import (
    ConflictError,
    InvalidInputError,
    NoCapacityError,
    SessionNotFoundError,
    TenantLimitError,
    TransitionError,
)
from turboserve.contracts.events import ControlAccepted, ControlApplied, ControlSuperseded, PromptApplied
from turboserve.contracts.pool import PoolReport
from turboserve.contracts.requests import FailSession, SetControl
from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import WorkerPhase
from turboserve.ids import new_id
from turboserve.state_store.repository import changes
from turboserve.state_store.settings import Settings
from turboserve.subjects import FAIL_SESSION, REPORT_POOL, SET_CONTROL

STEER = ControlDeclaration(
    name="steer", description="Where the figure moves.", value_schema={"enum": ["left", "right", "stop"]}
)
CAMERA = ControlDeclaration(
    name="camera",
    description="Pose of the camera.",
    value_schema={
        "type": "object",
        "properties": {"yaw": {"type": "number", "minimum": -90, "maximum": 90}},
        "required": ["yaw"],
        "additionalProperties": False,
    },
)


FIRST_FRAME = ControlDeclaration(
    name="first_frame",
    description="The first frame.",
    value_schema={"type": "string", "contentEncoding": "base64", "contentMediaType": "image/png"},
    fixed=True,
)


async def steerable(api: Harness, model: str, *declared: ControlDeclaration) -> SessionRecord:
    """Create a session on a worker that declares controls."""
    worker = new_id("wrk")
    await api.renew(worker, model, controls=declared or (STEER, CAMERA))
    return await api.place(await api.create(model), worker)


async def test_a_control_from_its_value_to_the_chunk_that_shows_it(api: Harness) -> None:
    record = await steerable(api, "life")
    first = await api.control(record.id, "steer", "left")
    assert (first.control_seq, first.name, first.value) == (1, "steer", "left")
    prompt = await api.prompt(record.id, "a blue square")
    second = await api.control(record.id, "steer", "right")
    camera = await api.control(record.id, "camera", {"yaw": 12.5})
    assert (prompt.control_seq, second.control_seq, camera.control_seq) == (2, 3, 4)
    row = await api.get(record.id)
    assert row.controls == {"steer": "right", "camera": {"yaw": 12.5}}
    assert (row.prompt, row.control_seq) == ("a blue square", 4)
    await api.chunk(record, 0, control_seq=0)
    # One boundary: the later direction supersedes the earlier one, and neither prompt nor camera.
    await api.chunk(record, 1, control_seq=4)
    accepted = ("control.accepted", "prompt.accepted", "control.accepted", "control.accepted")
    settled = ("control.superseded", "prompt.applied", "control.applied", "control.applied")
    events = await api.until_events(record.id, "session.created", "session.placed", *accepted, *settled)
    assert isinstance(events[2], ControlAccepted)
    assert (events[2].control_id, events[2].value) == (first.control_id, "left")
    lost, shown, won, pose = events[6:]
    assert isinstance(lost, ControlSuperseded)
    assert (lost.control_id, lost.superseded_by) == (first.control_id, second.control_id)
    assert isinstance(shown, PromptApplied)
    assert (shown.prompt_id, shown.chunk_index) == (prompt.prompt_id, 1)
    assert isinstance(won, ControlApplied)
    assert (won.control_id, won.value, won.chunk_index) == (second.control_id, "right", 1)
    assert isinstance(pose, ControlApplied)
    assert (pose.name, pose.value) == ("camera", {"yaw": 12.5})
    await api.control(record.id, "steer", None)
    assert (await api.get(record.id)).controls == {"camera": {"yaw": 12.5}}


async def test_a_state_store_that_knows_no_values_leaves_those_of_a_row(
    api: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During an upgrade, stores of two versions write the same rows."""
    record = await steerable(api, "upgrade")
    await api.control(record.id, "steer", "left")
    with monkeypatch.context() as older:
        older.setattr(changes, "_CHANGED", changes._CHANGED - {"controls"})
        older.setattr(changes, "_written", changes._written.__wrapped__)
        await api.prompt(record.id, "a blue square")
    row = await api.get(record.id)
    assert (row.prompt, row.controls) == ("a blue square", {"steer": "left"})


@pytest.mark.parametrize(
    ("name", "value", "field", "limit"),
    [
        ("steer", "up", "value", "left, right, stop"),
        ("steer", {"yaw": 1}, "value", "left, right, stop"),
        ("camera", {"yaw": 90.5}, "value.yaw", 90),
        ("camera", {}, "value", "required"),
        ("camera", {"yaw": 1, "roll": 2}, "value", "additionalProperties"),
        ("fly", "left", "name", "camera, steer"),
    ],
)
async def test_a_value_outside_the_schema_is_refused_with_field_and_limit(
    api: Harness, name: str, value: Any, field: str, limit: object
) -> None:
    record = await steerable(api, "schema")
    with pytest.raises(InvalidInputError) as refused:
        await api.control(record.id, name, value)
    assert (refused.value.field, refused.value.limit) == (field, limit)
    assert (await api.get(record.id)).control_seq == 0


async def test_a_model_without_controls_takes_none(api: Harness) -> None:
    record = await api.running("plain")
    with pytest.raises(InvalidInputError) as refused:
        await api.control(record.id, "steer", "left")
    assert (refused.value.field, refused.value.limit) == ("name", "none")


async def test_the_owner_decides_and_without_one_the_newest_worker_that_declares_any(api: Harness) -> None:
    """During an upgrade, a session's worker may be older than others of its model."""
    record = await api.running("upgrade")
    new, newer = new_id("wrk"), new_id("wrk")
    await api.renew(new, "upgrade", controls=(CAMERA,), started_at=1.0)
    await api.renew(newer, "upgrade", controls=(STEER,), started_at=2.0)
    with pytest.raises(InvalidInputError):
        await api.control(record.id, "steer", "left")
    waiting = await api.create("upgrade")
    assert (await api.control(waiting.id, "steer", "left")).control_seq == 1
    placed = await api.place(await api.get(waiting.id), new)
    assert placed.controls == {"steer": "left"}
    with pytest.raises(InvalidInputError):
        await api.control(waiting.id, "steer", "left")
    assert (await api.control(waiting.id, "camera", {"yaw": 1})).control_seq == 2


async def test_the_same_id_is_accepted_once(api: Harness) -> None:
    record = await steerable(api, "twice")
    name = new_id("ctl")
    receipts = await asyncio.gather(*(api.control(record.id, "steer", "left", name) for _ in range(5)))
    assert {receipt.control_seq for receipt in receipts} == {1}
    with pytest.raises(InvalidInputError) as refused:
        await api.control(record.id, "steer", "right", name)
    assert refused.value.field == "control_id"
    with pytest.raises(InvalidInputError):
        await api.prompt(record.id, "left", name)
    prompt = await api.prompt(record.id, "a star")
    with pytest.raises(InvalidInputError):
        await api.control(record.id, "steer", "left", prompt.prompt_id)
    other = await steerable(api, "twice-other")
    with pytest.raises(ConflictError):
        await api.control(other.id, "steer", "left", name)


async def test_an_ended_session_and_another_tenants_take_none(api: Harness) -> None:
    record = await steerable(api, "ends")
    with pytest.raises(SessionNotFoundError):
        await api.control(record.id, "steer", "left", tenant="rival")
    await api.pause(record.id)
    assert (await api.control(record.id, "steer", "left")).control_seq == 1
    await api.end(record.id)
    with pytest.raises(TransitionError) as refused:
        await api.control(record.id, "steer", "right")
    assert refused.value.limit == "terminated"


@pytest.mark.usefixtures("standing_clock")
async def test_controls_count_as_prompts(start_store: StartStore, settings: Settings) -> None:
    await start_store(tenant_prompts_per_minute=2)
    async with Harness.connected(settings) as api:
        record = await steerable(api, "rate")
        first = await api.control(record.id, "steer", "left")
        assert [rate.left for rate in first.rates] == [1]
        await api.prompt(record.id, "a star")
        with pytest.raises(TenantLimitError) as refused:
            await api.control(record.id, "steer", "right")
        assert refused.value.field == "tenant_prompts_per_minute"
        assert refused.value.retry_after_s is not None
        assert (await api.get(record.id)).controls == {"steer": "left"}


async def test_only_a_control_that_drops_the_buffer_lets_viewers_skip(api: Harness) -> None:
    record = await steerable(api, "drop")
    await api.control(record.id, "steer", "left")
    assert (await api.get(record.id)).drop_buffer_seq == 0
    await api.control(record.id, "steer", "right", drop_buffer=True)
    row = await api.get(record.id)
    assert (row.drop_buffer_seq, row.control_seq) == (2, 2)


@pytest.mark.parametrize(
    ("declared", "field"),
    [
        ((STEER, STEER), "name"),
        ((STEER.model_copy(update={"value_schema": {"pattern": "(a+)+$"}}),), "value_schema"),
        ((STEER.model_copy(update={"value_schema": {"type": "direction"}}),), "value_schema.type"),
    ],
    ids=["twice", "a keyword", "no schema"],
)
async def test_a_worker_with_another_declaration_is_not_renewed(
    api: Harness, declared: tuple[ControlDeclaration, ...], field: str
) -> None:
    with pytest.raises(InvalidInputError) as refused:
        await api.renew(new_id("wrk"), "declared", controls=declared)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("value", "field"),
    [("x" * 2_000, "value"), ("a\x00b", "value"), ([[[[1]]]] * 400, "value")],
    ids=["long", "NUL", "large"],
)
async def test_a_value_that_cannot_be_stored_is_refused(api: Harness, value: Any, field: str) -> None:
    record = await steerable(api, "sizes")
    plain = SetControl(session=record.id, control_id=new_id("ctl"), name="steer")
    with pytest.raises(InvalidInputError) as refused:
        await api.bus.call(SET_CONTROL, plain.model_copy(update={"value": value}))
    assert refused.value.field == field


async def test_a_session_begins_with_values_of_its_models_controls(api: Harness) -> None:
    model, worker = "begins", new_id("wrk")
    await api.renew(worker, model, controls=(STEER, CAMERA, FIRST_FRAME))
    image = "A" * 12_000
    given = {"steer": "left", "first_frame": image, "camera": None}
    record = await api.create(model, controls=given)
    assert (record.controls, record.control_seq) == ({"steer": "left", "first_frame": image}, 0)
    assert (await api.get(record.id)).controls == record.controls
    # A repeat gets the session, whose values may have changed since.
    await api.control(record.id, "steer", "right")
    again = await api.create(model, id=record.id, controls=given)
    assert again.controls == {"steer": "right", "first_frame": image}
    # A fixed one is never set again.
    for value in ("QUJD", None):
        with pytest.raises(InvalidInputError) as refused:
            await api.control(record.id, "first_frame", value)
        assert (refused.value.field, refused.value.limit) == ("name", "fixed")
    # The answer to a worker that fails it may be a repetition, which any worker gets.
    owned = await api.place(again, worker)
    fails = FailSession(session=owned.id, epoch=owned.epoch, worker=worker, reason="x")
    assert (await api.bus.call(FAIL_SESSION, fails)).controls == {}


@pytest.mark.parametrize(
    ("given", "field", "limit"),
    [
        ({"steer": "up"}, "controls.steer", "left, right, stop"),
        ({"camera": {"yaw": 91}}, "controls.camera.yaw", 90),
        ({"first_frame": "no base64!"}, "controls.first_frame", "base64"),
        ({"frames": ["QUJD", "no base64!"]}, "controls.frames.1", "base64"),
        ({"fly": True}, "controls.fly", "camera, first_frame, frames, free, steer"),
        ({"free": "x" * 1_100}, "controls.free", 1_024),
    ],
)
async def test_a_value_that_a_session_cannot_begin_with_is_refused(
    api: Harness, given: dict[str, Any], field: str, limit: object
) -> None:
    free = ControlDeclaration(name="free", description="Any.", value_schema={})
    frames = FIRST_FRAME.model_copy(
        update={"name": "frames", "value_schema": {"type": "array", "items": FIRST_FRAME.value_schema}}
    )
    await api.renew(new_id("wrk"), "refuses", controls=(STEER, CAMERA, FIRST_FRAME, frames, free))
    with pytest.raises(InvalidInputError) as refused:
        await api.create("refuses", controls=given)
    assert (refused.value.field, refused.value.limit) == (field, limit)


async def test_a_pool_without_workers_knows_the_controls_of_those_that_are_gone(api: Harness) -> None:
    """Each value was refused with "no control", and an idle pool stays at zero until a session comes."""
    report = PoolReport(pool="idle", model="idle", maximum=1, process="asc_1")
    await api.bus.call(REPORT_POOL, report)
    with pytest.raises(NoCapacityError, match="not known before its first worker"):
        await api.create("idle", controls={"steer": "left"})
    worker = new_id("wrk")
    await api.renew(worker, "idle", controls=(STEER,))
    await api.gone(worker)
    await api.renew(new_id("wrk"), "idle", phase=WorkerPhase.STARTING)
    assert (await api.create("idle", controls={"steer": "left"})).controls == {"steer": "left"}
    with pytest.raises(InvalidInputError, match="is not one of"):
        await api.create("idle", controls={"steer": "up"})
