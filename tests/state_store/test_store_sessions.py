"""Guarantees of the state store to its callers, over the bus of a store on real servers."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.helpers.waiting import eventually
from tests.state_store.conftest import StartStore
from tests.state_store.state_store_harness import Harness, Store
from turboserve import subjects
from turboserve.bus.requests import ERROR_HEADER
from turboserve.contracts.chunks import LatentsHeader
from turboserve.contracts.errors import (
    ConflictError,
    ErrorBody,
    ForbiddenError,
    InvalidInputError,
    NoCapacityError,
    NotFoundError,
    SessionNotFoundError,
    StaleEpochError,
    TransitionError,
    TurboServeError,
    UnknownModelError,
)
from turboserve.contracts.events import PromptAccepted, PromptApplied, SessionPlaced
from turboserve.contracts.requests import (
    DrainWorker,
    FailSession,
    GetLatents,
    ListSessions,
    NoteDecision,
    SessionRef,
)
from turboserve.contracts.sessions import Activity, Decision, Phase
from turboserve.contracts.versions import stamped
from turboserve.contracts.workers import Assignment, Playhead
from turboserve.ids import new_id
from turboserve.state_store.settings import Settings

SERVERS = ("real", "memory")


async def test_a_session_from_prompt_to_end(api: Harness) -> None:
    worker = await api.worker("life")
    told: list[Assignment] = []

    async def hear(message: Assignment, _: bytes) -> None:
        told.append(message)

    await api.bus.subscribe(subjects.ASSIGN, worker, hear)
    created = await api.create("life", metadata={"project": "demo"})
    assert (created.phase, created.epoch, created.version) == (Phase.REQUESTED, 0, 1)
    placed = await api.place(created, worker)
    assert (placed.phase, placed.epoch, placed.worker) == (Phase.ACTIVE, 1, worker)
    assert placed.own_revision is not None
    await eventually(lambda: told)
    assert told[0].record.own_revision == placed.own_revision

    receipt = await api.prompt(created.id, "a blue square")
    assert (receipt.control_seq, receipt.prompt) == (1, "a blue square")
    await api.chunk(placed, 0)
    await api.chunk(placed, 1, control_seq=1)
    events = await api.until_events(
        created.id, "session.created", "session.placed", "prompt.accepted", "prompt.applied"
    )
    assert isinstance(events[1], SessionPlaced)
    assert events[1].kind == "place"
    assert isinstance(events[2], PromptAccepted)
    assert isinstance(events[3], PromptApplied)
    assert (events[3].prompt_id, events[3].chunk_index) == (receipt.prompt_id, 1)

    row = await api.get(created.id)
    assert (row.next_chunk, row.control_seq, row.applied_control_seq) == (2, 1, 1)
    assert (row.prompt, row.metadata) == ("a blue square", {"project": "demo"})
    ended = await api.end(created.id)
    assert (ended.phase, ended.epoch, ended.worker) == (Phase.TERMINATED, 2, None)
    await eventually(lambda: told[-1].record.phase is Phase.TERMINATED)
    assert (await api.end(created.id)).version == ended.version
    await api.until_events(
        created.id,
        *("session.created", "session.placed", "prompt.accepted", "prompt.applied", "session.ended"),
    )


async def test_an_ended_session_keeps_its_last_playhead(api: Harness) -> None:
    """Incident: no chunk was counted after the last report, so the row kept an earlier playhead."""
    record = await api.running("last_playhead")
    await api.bus.publish(
        subjects.PLAYHEAD, record.id, Playhead(session=record.id, playhead_s=1.5, viewers=1)
    )

    async def heard() -> bool:
        return (await api.get(record.id)).playhead_s == 1.5

    await eventually(heard)
    await api.end(record.id)
    ended = await api.get(record.id)
    assert (ended.phase, ended.playhead_s) == (Phase.TERMINATED, 1.5)


async def test_the_same_create_makes_one_session_and_another_of_its_id_is_refused(api: Harness) -> None:
    await api.worker("twice")
    session = new_id("ses")
    same = await asyncio.gather(*(api.create("twice", id=session) for _ in range(8)))
    assert {record.created_at for record in same} == {same[0].created_at}
    await api.prompt(session, "something else by now")
    assert (await api.create("twice", id=session)).prompt == "something else by now"
    for other in ({"prompt": "a square"}, {"seed": 8}, {"tenant": "rival"}, {"metadata": {"a": "b"}}):
        with pytest.raises(ConflictError):
            await api.create("twice", id=session, **other)
    await api.until_events(session, "session.created", "prompt.accepted")


async def test_the_same_prompt_event_is_accepted_once(api: Harness) -> None:
    record = await api.running("prompts")
    event = new_id("prm")
    receipts = await asyncio.gather(*(api.prompt(record.id, "a star", event) for _ in range(5)))
    # Only the first one was charged, so only its receipt says what is left of the rates.
    assert len({receipt.model_dump_json(exclude={"rates"}) for receipt in receipts}) == 1
    assert sum(bool(receipt.rates) for receipt in receipts) == 1
    assert (await api.get(record.id)).control_seq == 1
    other = await api.create("prompts")
    with pytest.raises(ConflictError):
        await api.prompt(other.id, "a star", event)
    with pytest.raises(InvalidInputError):
        await api.prompt(record.id, "a square", event)
    assert (await api.get(record.id)).prompt == "a star"


async def test_a_foreign_session_is_exactly_as_unknown_as_one_that_never_was(api: Harness) -> None:
    record = await api.running("foreign")
    calls = (
        lambda ref: api.bus.call(subjects.GET_SESSION, ref),
        lambda ref: api.bus.call(subjects.PAUSE_SESSION, ref),
        lambda ref: api.bus.call(subjects.RESUME_SESSION, ref),
        lambda ref: api.bus.call(subjects.LIST_DECISIONS, ref),
        lambda ref: api.end(ref.session, ref.tenant),
    )
    for call in calls:
        bodies = []
        for session in (record.id, "ses_unknown"):
            with pytest.raises(SessionNotFoundError) as caught:
                await call(SessionRef(session=session, tenant="rival"))
            bodies.append(caught.value.body().model_dump_json().replace(session, "ID"))
        assert bodies[0] == bodies[1]
    assert (await api.get(record.id, "acme")).phase is Phase.ACTIVE


async def test_pause_and_resume(api: Harness) -> None:
    record = await api.running("pause")
    worker = record.worker
    paused = await api.pause(record.id)
    assert (paused.phase, paused.activity, paused.worker) == (Phase.SUSPENDED, Activity.PAUSED, worker)
    assert (paused.epoch, paused.own_revision) == (record.epoch, record.own_revision)
    again = await api.pause(record.id)
    assert (again.version, again.activity) == (paused.version, Activity.PAUSED)

    receipt = await api.prompt(record.id, "while it sleeps")
    resumed = await api.resume(record.id)
    assert (resumed.phase, resumed.activity) == (Phase.SUSPENDED, Activity.WATCHING)
    assert (await api.resume(record.id)).version == resumed.version
    assert worker is not None
    again = await api.place(resumed, worker, kind="resume")
    assert (again.phase, again.epoch, again.control_seq) == (Phase.ACTIVE, 2, receipt.control_seq)
    assert (await api.resume(record.id)).version == again.version
    await api.end(record.id)
    for call in (api.pause(record.id), api.resume(record.id), api.prompt(record.id, "too late")):
        with pytest.raises(TransitionError) as caught:
            await call
        assert caught.value.limit == "terminated"
    await api.until_events(
        record.id,
        *("session.created", "session.placed", "session.suspended", "prompt.accepted"),
        *("session.resume_requested", "session.placed", "session.ended"),
    )


async def test_no_more_sessions_than_places(api: Harness) -> None:
    worker = await api.worker("full", capacity=3)
    results = await asyncio.gather(*(api.create("full") for _ in range(10)), return_exceptions=True)
    refused = [result for result in results if isinstance(result, NoCapacityError)]
    admitted = [result for result in results if not isinstance(result, BaseException)]
    assert (len(admitted), len(refused)) == (3, 7)
    assert all(error.retry_after_s and error.limit == 3 for error in refused)

    placed = await api.place(admitted[0], worker)
    await api.pause(placed.id)
    fourth = await api.create("full")
    with pytest.raises(NoCapacityError) as caught:
        await api.resume(placed.id)
    assert caught.value.retry_after_s is not None
    await api.end(fourth.id)
    assert (await api.resume(placed.id)).activity is Activity.WATCHING
    with pytest.raises(NoCapacityError):
        await api.create("full")


async def test_a_model_is_unknown_until_a_worker_serves_it_and_stays_known_while_none_does(
    api: Harness,
) -> None:
    with pytest.raises(UnknownModelError) as caught:
        await api.create("nobodys")
    assert caught.value.field == "model"
    worker = await api.worker("briefly")
    await api.gone(worker)
    with pytest.raises(NoCapacityError) as busy:
        await api.create("briefly")
    assert busy.value.retry_after_s is not None


async def test_the_total_of_sessions_is_limited(start_store: StartStore, settings: Settings) -> None:
    await start_store(max_sessions=1)
    async with Harness.connected(settings) as api:
        listed = await api.bus.call(subjects.LIST_SESSIONS, ListSessions(limit=1000))
        for record in listed.sessions:
            await api.end(record.id)
        await api.worker("total", capacity=5)
        await api.create("total")
        with pytest.raises(NoCapacityError, match="takes no more than"):
            await api.create("total")


async def test_what_cannot_be_stored_names_its_field(api: Harness) -> None:
    record = await api.running("bad")
    new = {"id": new_id("ses"), "tenant": "acme", "model": "bad", "prompt": "a", "seed": 1}
    for endpoint, request, field in (
        (subjects.CREATE_SESSION, {**new, "prompt": "a\x00b"}, "prompt"),
        (subjects.CREATE_SESSION, {**new, "metadata": {"k": "\x00"}}, "metadata.k"),
        (subjects.SUBMIT_PROMPT, {"session": record.id, "prompt_id": "prm_1", "prompt": "\x00"}, "prompt"),
        (subjects.LIST_SESSIONS, {"after": "x; drop"}, "after"),
    ):
        answer = await api.bus.client.request(
            endpoint.request_subject(api.bus.user), stamped(json.dumps(request)).encode(), timeout=60
        )
        refusal = ErrorBody.from_bytes((answer.headers or {})[ERROR_HEADER].encode())
        assert (refusal.code, refusal.field) == ("invalid_input", field)
    raw = await api.bus.client.request(
        subjects.SUBMIT_PROMPT.request_subject(api.bus.user), stamped('{"session":5}').encode(), timeout=60
    )
    assert "invalid_input" in (raw.headers or {})["Ts-Error"]
    text = "日本 🎈 \\u0000 ' \" \\"
    assert (await api.prompt(record.id, text)).prompt == text
    assert (await api.get(record.id)).prompt == text


async def test_failing_is_for_the_owner(api: Harness) -> None:
    record = await api.running("fail")

    def fail(epoch: int, worker: str) -> FailSession:
        return FailSession(session=record.id, epoch=epoch, worker=worker, reason="out of memory")

    for epoch, worker in ((record.epoch - 1, str(record.worker)), (record.epoch, "wk_other")):
        with pytest.raises(StaleEpochError):
            await api.bus.call(subjects.FAIL_SESSION, fail(epoch, worker))
    for _ in range(2):
        failed = await api.bus.call(subjects.FAIL_SESSION, fail(record.epoch, str(record.worker)))
        assert (failed.phase, failed.reason, failed.epoch) == (Phase.FAILED, "out of memory", 2)
        assert failed.prompt == ""
    await api.until_events(record.id, "session.created", "session.placed", "session.ended")


async def test_a_session_without_an_owner_is_failed_by_no_worker(api: Harness) -> None:
    """A session that waits for its first worker has epoch 0, which any worker can guess."""
    await api.worker("unowned")
    record = await api.create("unowned")
    assert (record.worker, record.epoch) == (None, 0)
    request = FailSession(session=record.id, epoch=0, worker="wk_other", reason="x")
    with pytest.raises(StaleEpochError):
        await api.bus.call(subjects.FAIL_SESSION, request)
    assert (await api.get(record.id)).phase is Phase.REQUESTED


async def test_latents_are_for_the_owner(api: Harness) -> None:
    record = await api.running("latents")
    header = LatentsHeader(
        session=record.id,
        index=0,
        epoch=1,
        worker=record.worker,
        dtype="float16",
        shape=(1, 2, 2),
        first_latent=0,
    )

    async def get(worker: str | None) -> tuple[LatentsHeader, bytes]:
        request = GetLatents(session=record.id, index=0, worker=worker)
        return await api.bus.call_raw(subjects.GET_LATENTS, request)

    async def kept() -> bool:
        await api.bus.publish(subjects.LATENTS, str(record.worker), header, b"latents")
        try:
            return (await get(record.worker)) == (header, b"latents")
        except NotFoundError:
            return False

    await eventually(kept)
    for other in ("wk_other", None):
        with pytest.raises(ForbiddenError) as refused:
            await get(other)
        assert (refused.value.field, refused.value.limit) == ("worker", record.worker)


async def test_idle_suspension_compares_the_version_and_looks_for_viewers(api: Harness) -> None:
    record = await api.running("idle")
    playhead = Playhead(session=record.id, playhead_s=1.5, viewers=1)
    await api.bus.publish(subjects.PLAYHEAD, record.id, playhead)

    async def seen() -> bool:
        return (await api.get(record.id)).playhead_s == 1.5

    await eventually(seen)
    with pytest.raises(ConflictError, match="watched"):
        await api.suspend_idle(record)

    other = await api.running("idle2")
    with pytest.raises(ConflictError):
        await api.suspend_idle(other.model_copy(update={"version": other.version - 1}))
    idle = await api.suspend_idle(other)
    assert (idle.phase, idle.activity) == (Phase.SUSPENDED, Activity.IDLE)
    assert (await api.suspend_idle(other)).version == idle.version
    assert (await api.pause(other.id)).activity is Activity.PAUSED
    with pytest.raises(TransitionError):
        await api.suspend_idle(await api.get(other.id))


async def test_pages_go_from_newest_to_oldest_without_gap_or_repetition(api: Harness) -> None:
    await api.worker("pages", capacity=20)
    made = [(await api.create("pages", tenant="pager")).id for _ in range(7)]
    await api.create("pages", tenant="other")
    for session in made[:2]:
        await api.end(session)
    found: list[str] = []
    after: str | None = None
    while True:
        page = await api.bus.call(subjects.LIST_SESSIONS, ListSessions(tenant="pager", limit=3, after=after))
        found += [record.id for record in page.sessions]
        after = page.next
        if after is None:
            break
    assert found == made[::-1]
    waiting = ListSessions(tenant="pager", phases=(Phase.REQUESTED,), limit=1000)
    page = await api.bus.call(subjects.LIST_SESSIONS, waiting)
    assert [record.id for record in page.sessions] == made[:1:-1]


async def test_a_page_of_large_rows_fits_into_one_message(api: Harness) -> None:
    await api.worker("large", capacity=200)
    metadata = {f"key{n}": "x" * 512 for n in range(16)}
    for _ in range(70):
        await api.create("large", tenant="hoarder", prompt="y" * 2_000, metadata=metadata)
    found: list[str] = []
    after: str | None = None
    pages = 0
    while pages == 0 or after is not None:
        page = await api.bus.call(
            subjects.LIST_SESSIONS, ListSessions(tenant="hoarder", limit=1000, after=after)
        )
        assert len(page.to_bytes()) < 1_000_000
        found += [record.id for record in page.sessions]
        after, pages = page.next, pages + 1
    assert pages > 1
    assert len(set(found)) == len(found) == 70


async def test_decisions_are_kept_with_their_numbers_and_waiting_is_noted_once(api: Harness) -> None:
    worker = await api.worker("decide")
    record = await api.create("decide")
    wait = Decision(session=record.id, epoch=0, kind="wait", reason="no room", numbers={"rho": 1.0})
    for rho in (1.0, 0.9):
        noted = wait.model_copy(update={"numbers": {"rho": rho}})
        await api.bus.call(subjects.NOTE_DECISION, NoteDecision(decision=noted))
    await api.place(record, worker)
    page = await api.bus.call(subjects.LIST_DECISIONS, SessionRef(session=record.id, tenant="acme"))
    assert [(item.kind, item.worker, item.epoch) for item in page.decisions] == [
        ("wait", None, 0),
        ("place", worker, 1),
    ]
    assert page.decisions[0].numbers == {"rho": 0.9}
    unknown = wait.model_copy(update={"session": "ses_unknown"})
    with pytest.raises(SessionNotFoundError):
        await api.bus.call(subjects.NOTE_DECISION, NoteDecision(decision=unknown))


async def test_what_the_store_does_not_know_is_an_error_of_its_kind(api: Harness, store: Store) -> None:
    for call, error in (
        (api.bus.call(subjects.DRAIN_WORKER, DrainWorker(worker="wk_unknown")), NotFoundError),
        (api.bus.call_raw(subjects.GET_LATENTS, GetLatents(session="x", index=0)), SessionNotFoundError),
    ):
        with pytest.raises(error) as caught:
            await call
        assert isinstance(caught.value, TurboServeError)
    await api.gone("wk_unknown")
