"""What an owner allows of a session, prompts that drop the buffer, and the age of a request."""

from __future__ import annotations

import pytest

from tests.state_store.state_store_harness import Harness
from turboserve import subjects
from turboserve.contracts.errors import TransitionError
from turboserve.contracts.fidelity import QualityLimits
from turboserve.contracts.requests import ChangeSession, CreateSession, PlaceSession, SubmitPrompt
from turboserve.contracts.sessions import Activity, Decision, Phase
from turboserve.contracts.workers import WorkerPhase
from turboserve.ids import new_id
from turboserve.state_store.core import sessions as rules
from turboserve.state_store.core.workers import Slots

SERVERS = ("real", "memory")
PINNED = QualityLimits(pin=True)


async def test_limits_are_stored_and_changed_with_an_event(api: Harness) -> None:
    await api.worker("limits")
    created = await api.create("limits", quality=PINNED, max_lead_s=0.75)
    assert ((await api.get(created.id)).quality, created.max_lead_s) == (PINNED, 0.75)
    request = ChangeSession(session=created.id, changes=("max_lead_s",), max_lead_s=2.0)
    changed = await api.bus.call(subjects.CHANGE_SESSION, request)
    assert (changed.quality, changed.max_lead_s, changed.version) == (PINNED, 2.0, 2)
    again = await api.bus.call(subjects.CHANGE_SESSION, request)
    assert again.version == 2
    reset = ChangeSession(session=created.id, changes=("quality", "max_lead_s"))
    assert (await api.bus.call(subjects.CHANGE_SESSION, reset)).quality is None
    assert (await api.get(created.id)).max_lead_s is None
    await api.until_events(created.id, "session.created", "session.changed", "session.changed")
    await api.end(created.id)
    with pytest.raises(TransitionError):
        await api.bus.call(subjects.CHANGE_SESSION, reset)


async def test_an_answer_has_the_age_of_the_request(api: Harness) -> None:
    record = await api.running("age")
    assert record.waiting_s is not None
    first_s = (await api.get(record.id)).waiting_s
    assert first_s is not None
    assert 0.0 <= first_s < 60.0
    await api.pause(record.id)
    before = (await api.get(record.id)).requested_at
    resumed = await api.resume(record.id)
    assert before is not None
    assert resumed.requested_at is not None
    assert resumed.requested_at > before
    assert resumed.waiting_s is not None
    assert resumed.waiting_s < first_s + 60.0
    await api.end(record.id)
    assert (await api.get(record.id)).waiting_s is None


async def test_only_a_prompt_that_drops_the_buffer_is_such_a_request(api: Harness) -> None:
    record = await api.running("drop")
    await api.prompt(record.id, "a star")
    plain = await api.get(record.id)
    assert (plain.drop_buffer_seq, plain.requested_at) == (0, record.requested_at)
    await api.bus.call(
        subjects.SUBMIT_PROMPT,
        SubmitPrompt(session=record.id, prompt_id=new_id("prm"), prompt="a square", drop_buffer=True),
    )
    dropping = await api.get(record.id)
    assert dropping.drop_buffer_seq == dropping.control_seq == 2
    assert dropping.requested_at is not None
    assert record.requested_at is not None
    assert dropping.requested_at > record.requested_at
    await api.prompt(record.id, "a circle")
    assert (await api.get(record.id)).drop_buffer_seq == 2


def test_a_session_that_lost_its_worker_answers_no_request_unless_it_has_no_chunk() -> None:
    create = CreateSession(id="s", tenant="t", model="m", prompt="a circle", seed=1)
    slots = Slots("m", WorkerPhase.READY, 4, 0)
    decision = Decision(session="s", epoch=0, kind="recover", reason="lost")
    for phase, next_chunk, kept in (
        (Phase.REQUESTED, 0, True),
        (Phase.ACTIVE, 0, True),
        (Phase.ACTIVE, 3, False),
        (Phase.SUSPENDED, 3, True),
    ):
        record = rules.create(create, 5.0).record.model_copy(
            update={"phase": phase, "next_chunk": next_chunk, "activity": Activity.WATCHING}
        )
        request = PlaceSession(session="s", term=1, expected_version=1, worker="w", decision=decision)
        after = rules.place(record, request, slots, 9.0, 1.0).record
        assert (after.requested_at == 5.0) is kept
