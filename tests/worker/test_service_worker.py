"""Workers as processes, with a real broker, state store, Redis and Postgres. The test plays the scheduler."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import av
import pytest
import torch
from pydantic import SecretStr

from tests.worker.tiny_worker import CONFIG, tiny_models
from tests.worker.worker_processes import Store
from tests.worker.worker_scene import FENCED, LOST, TAKEOVERS, Scene, environment, pool, scene, store
from turboserve.bus import next_entry
from turboserve.bus.log import Entry
from turboserve.contracts.chunks import HEADER, ChunkHeader, Ownership
from turboserve.contracts.errors import NoCapacityError
from turboserve.contracts.requests import (
    EndSession,
    ListWorkers,
    SessionRef,
    SubmitPrompt,
)
from turboserve.contracts.sessions import Phase
from turboserve.contracts.workers import Playhead, WorkerPhase
from turboserve.ids import new_id
from turboserve.subjects import (
    CHUNK,
    CHUNKS,
    END_SESSION,
    LIST_WORKERS,
    OWN,
    PAUSE_SESSION,
    PLAYHEAD,
    RESUME_SESSION,
    SUBMIT_PROMPT,
)
from turboserve.tasks import stop
from turboserve.worker.engine.decode_jobs import CachedDecoder, CacheTable
from turboserve.worker.model.presets import SHIPPED
from turboserve.worker.remote_decoding import role_server, server, text_server
from turboserve.worker.remote_decoding.chunk_time import ChunkTime
from turboserve.worker.remote_decoding.server import DecodeServer, DecodeTimes
from turboserve.worker.remote_decoding.text_server import TextServer
from turboserve.worker.replicas.toyworld import load_toyworld
from turboserve.worker.service.decode_roles import key_of
from turboserve.worker.settings import Settings
from turboserve.worker.transfer.network import listen

__all__ = ["environment", "pool", "scene", "store"]

# The first test waits until torch, Postgres and the state store have started.
pytestmark = pytest.mark.timeout(900)


async def test_a_placed_session_fills_the_log_and_stops_at_its_lead(scene: Scene, tmp_path: Path) -> None:
    worker = await scene.worker()
    session = await scene.started(worker)
    chunks = await scene.chunks(session, 12)

    video = tmp_path / "video.mp4"
    inits = {chunk.data[: chunk.header.init_bytes] for chunk in chunks}
    assert len(inits) == 1
    video.write_bytes(inits.pop() + b"".join(chunk.data[chunk.header.init_bytes :] for chunk in chunks))
    with av.open(str(video)) as container:
        times = [picture.time for picture in container.decode(video=0)]
    assert times == pytest.approx([n / 16 for n in range(9 + 11 * 12)])

    await scene.more_reports(worker, 4)
    last = await scene.newest(session)
    assert last.header.start_s - chunks[-1].header.start_s < 3.0 + 0.75

    def held() -> bool:
        return any(one.session == session and one.resident for one in scene.loads[worker].sessions)

    await scene.until(held, "it reports the session")
    assert scene.loads[worker].chunk_latency_s.keys() >= {1, 2}


async def test_a_gateway_whose_viewers_are_behind_does_not_hold_back_anothers(scene: Scene) -> None:
    """Incident: before a playhead named its gateway, the last report counted for all."""
    session = await scene.started(await scene.worker())
    await scene.chunks(session, 1)
    for gateway, playhead_s, viewers in (("gtw_ahead", 9.0, 1), ("gtw_behind", 0.0, 1), ("gtw_left", 0.0, 0)):
        word = Playhead(session=session, gateway=gateway, playhead_s=playhead_s, viewers=viewers)
        await scene.bus.publish(PLAYHEAD, session, word)

    async def made_for_the_one_ahead() -> bool:
        return (await scene.newest(session)).header.start_s > 9.0

    await scene.until(made_for_the_one_ahead, "video beyond the furthest viewer")


async def test_a_prompt_switch_is_applied_and_counted(scene: Scene) -> None:
    worker = await scene.worker()
    session = await scene.started(worker)
    await scene.chunks(session, 2)
    receipt = await scene.ask(
        SUBMIT_PROMPT, SubmitPrompt(session=session, prompt_id=new_id("prm"), prompt="a blue square")
    )
    assert receipt.control_seq == 1

    async def applied() -> bool:
        await scene.chunks(session, (await scene.record(session)).next_chunk + 2)
        return (await scene.record(session)).applied_control_seq == 1

    await scene.until(applied, "the prompt is applied")
    chunks = await scene.chunks(session, 8)
    sequence = [chunk.header.control_seq for chunk in chunks]
    assert sequence == sorted(sequence)
    assert sequence[0] == 0


async def test_pause_and_resume_continue_bit_for_bit(scene: Scene) -> None:
    worker = await scene.worker()
    straight = await scene.started(worker, seed=77)
    reference = await scene.chunks(straight, 10)
    await scene.ask(END_SESSION, EndSession(session=straight))

    session = await scene.started(worker, seed=77)
    await scene.chunks(session, 4)
    await scene.ask(PAUSE_SESSION, SessionRef(session=session))

    def on_host() -> bool:
        return any(one.session == session and not one.resident for one in scene.loads[worker].sessions)

    await scene.until(on_host, "the state is on the host")
    await scene.ask(RESUME_SESSION, SessionRef(session=session))
    await scene.place(session, worker, "resume")
    resumed = await scene.chunks(session, 10)

    assert resumed[-1].header.epoch == 2
    assert [chunk.data for chunk in resumed] == [chunk.data for chunk in reference]
    wanted = {(name, index) for name in (straight, session) for index in range(10)}
    await scene.until(lambda: wanted <= scene.latents.keys(), "the latents of both")
    for index in range(10):
        assert scene.latents[session, index] == scene.latents[straight, index], f"latents of chunk {index}"


async def test_another_worker_goes_on_after_a_death(scene: Scene) -> None:
    first, second = await scene.worker(), await scene.worker()
    before = scene.metric(second, TAKEOVERS)
    session = await scene.started(first, seed=5)
    await scene.chunks(session, 6)
    scene.signal(first, signal.SIGKILL)
    await scene.declare_gone(first)
    await scene.place(session, second, "recover")
    chunks = await scene.chunks(session, (await scene.newest(session)).header.index + 7)
    assert chunks[0].header.worker == first
    assert chunks[-1].header.worker == second
    assert chunks[-1].header.epoch == 2
    assert scene.metric(second, TAKEOVERS) == before + 1


async def test_lost_latents_cost_the_context_but_not_the_session(
    scene: Scene, store: Store, redis_url: str
) -> None:
    import redis

    first, second = await scene.worker(), await scene.worker()
    before = scene.metric(second, TAKEOVERS, LOST)
    session = await scene.started(first)
    await scene.chunks(session, 5)
    scene.signal(first, signal.SIGKILL)
    # Otherwise, latents that it has received and not written yet would come back.
    store.kill()
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    store.start()
    await scene.declare_gone(first)
    await scene.place(session, second, "recover")
    chunks = await scene.chunks(session, 14)
    assert chunks[-1].header.worker == second
    assert scene.metric(second, TAKEOVERS, LOST) == before + 1


async def test_a_worker_that_slept_through_a_change_of_owner_is_kept_out(scene: Scene) -> None:
    first, second = await scene.worker(), await scene.worker()
    session = await scene.started(first)
    await scene.chunks(session, 3)
    scene.signal(first, signal.SIGSTOP)
    await scene.place(session, second, "migrate")
    count = len(await scene.chunks(session, 8))
    scene.signal(first, signal.SIGCONT)

    def dropped() -> bool:
        return all(one.session != session for one in scene.loads[first].sessions)

    scene.loads.pop(first)
    await scene.until(lambda: first in scene.loads and dropped(), "the old worker lets go")
    chunks = await scene.chunks(session, count + 6)
    epochs = [(chunk.header.epoch, chunk.header.worker) for chunk in chunks]
    assert epochs == sorted(epochs, key=lambda pair: pair[0])
    assert set(epochs) == {(1, first), (2, second)}


async def grows(scene: Scene, worker: str, session: str) -> bool:
    """Return whether the log grows while its viewer plays on, for three reports of the worker.

    The worker's own time counts: between two reports it checks several times what it can make and publish.
    """
    before = last = await scene.newest(session)
    reports = scene.beats[worker] + 3

    async def reported() -> bool:
        nonlocal last
        await scene.play(session, last.header.start_s)
        last = await scene.newest(session)
        return scene.beats[worker] >= reports

    await scene.until(reported, f"{worker} goes on reporting")
    return last.sequence > before.sequence


async def test_the_broker_refuses_who_is_not_the_owner_and_the_worker_stops(scene: Scene) -> None:
    """The owner changes in the log, and the message to the old worker is late."""
    first, second = await scene.worker(), await scene.worker()
    session = await scene.started(first)
    await scene.chunks(session, 3)
    refusals = scene.metric(first, FENCED)
    usurper = Ownership(session=session, epoch=2, worker=second)
    await scene.append(OWN.of(session), usurper.to_bytes())

    async def refused() -> bool:
        await scene.play(session, (await scene.newest(session)).header.start_s)
        return scene.metric(first, FENCED) == refusals + 1

    await scene.until(refused, "the broker refuses the chunk")
    assert not await grows(scene, first, session)
    assert scene.metric(first, FENCED) == refusals + 1


async def test_ended_sessions_leave_no_memory(scene: Scene) -> None:
    worker = await scene.worker()
    running = await scene.started(worker)
    suspended = await scene.started(worker)
    await scene.chunks(running, 2)
    await scene.chunks(suspended, 2)
    await scene.ask(PAUSE_SESSION, SessionRef(session=suspended))
    await scene.until(
        lambda: scene.metric(worker, "turboserve_worker_host_memory_bytes") > 0, "the host holds it"
    )
    for session in (running, suspended):
        await scene.ask(END_SESSION, EndSession(session=session))

    def empty() -> bool:
        kv = scene.metric(worker, "turboserve_worker_kv_bytes")
        return kv + scene.metric(worker, "turboserve_worker_host_memory_bytes") == 0

    await scene.until(empty, "all memory is free")


async def test_a_session_that_cannot_be_computed_fails_alone(scene: Scene) -> None:
    worker = await scene.worker()
    good = await scene.started(worker)
    bad = await scene.started(worker, prompt="raise")

    async def failed() -> bool:
        return (await scene.record(bad)).phase is Phase.FAILED

    await scene.until(failed, "the session fails")
    assert "text encoder" in str((await scene.record(bad)).reason)
    await scene.chunks(good, 6)


async def test_a_session_begins_behind_what_no_owner_wrote(scene: Scene) -> None:
    """Any process with a worker's credentials may append to its log, before it has an owner and after."""
    worker = await scene.worker()
    session = await scene.create()
    header = ChunkHeader(
        session=session,
        index=7,
        epoch=1,
        worker=worker,
        control_seq=0,
        first_frame=84,
        frames=12,
        fps=16.0,
        width=64,
        height=64,
        codec="avc1.42c01e",
        init_bytes=0,
    )
    for headers in ({HEADER: "{}"}, header.to_headers(), {HEADER: "no header"}):
        await scene.append(CHUNK.by(session, header.worker), b"no video", headers)
    await scene.place(session, worker)
    entries: list[Entry] = []

    async def made() -> bool:
        entries.clear()
        while True:
            sequence = entries[-1].sequence + 1 if entries else 1
            entry = await next_entry(scene.bus, CHUNKS, CHUNK.of(session), sequence)
            if entry is None:
                return len(entries) >= 6
            entries.append(entry)

    await scene.until(made, "it has chunks")
    made_here = [ChunkHeader.of_entry(session, entry.headers) for entry in entries[3:]]
    assert [header.index for header in made_here] == list(range(len(made_here)))
    assert (await scene.record(session)).phase is Phase.ACTIVE
    # The newest of them; from there on the worker reads what its owner may have written.
    assert scene.metric(worker, "turboserve_worker_foreign_chunks_total") >= 1


async def test_a_worker_that_was_declared_gone_exits_with_its_own_status(scene: Scene) -> None:
    worker = await scene.worker()
    await scene.declare_gone(worker)
    assert await scene.exit_status(worker) == 3


async def test_a_worker_that_is_asked_to_stop_publishes_what_it_has_and_leaves(scene: Scene) -> None:
    worker = await scene.worker()
    session = await scene.started(worker)
    await scene.chunks(session, 3)
    scene.signal(worker, signal.SIGTERM)
    assert await scene.exit_status(worker) == 0

    async def left() -> bool:
        page = await scene.bus.call(LIST_WORKERS, ListWorkers(include_gone=True))
        record = next(record for record in page.workers if record.id == worker)
        return (record.phase, record.reason) == (WorkerPhase.GONE, "the worker has shut down")

    await scene.until(left, "it said goodbye")


async def test_a_worker_that_gets_no_answer_stops_when_its_lease_is_over(scene: Scene, store: Store) -> None:
    worker = await scene.worker(TURBOSERVE_LEASE_S="2", TURBOSERVE_REQUEST_DEADLINE_S="0.5")
    session = await scene.started(worker)
    await scene.chunks(session, 3)
    store.process.send_signal(signal.SIGSTOP)

    async def stands_still() -> bool:
        return not await grows(scene, worker, session)

    try:
        # A chunk under way at the end of the lease may take long to come.
        await scene.until(stands_still, "it stops")
    finally:
        store.process.send_signal(signal.SIGCONT)
    await scene.until(lambda: grows(scene, worker, session), "it goes on once it is answered")
    await scene.chunks(session, 12)


async def test_a_worker_goes_on_while_there_is_no_state_store(scene: Scene, store: Store) -> None:
    # The broker answers a renewal at once that no store is there. A busy machine reads the answer late, and
    # an answer after the deadline extends no lease: so the lease is that of several renewals with a long
    # deadline.
    lease_s = 8.0
    worker = await scene.worker(TURBOSERVE_LEASE_S=str(lease_s), TURBOSERVE_REQUEST_DEADLINE_S="2")
    session = await scene.started(worker)
    await scene.chunks(session, 3)
    store.kill()
    try:
        over = time.monotonic() + lease_s + 1.0
        while time.monotonic() < over:
            await grows(scene, worker, session)
        # More than an ended lease could have left under way. A fast machine has generated more chunks by now
        # than the log keeps.
        end = (await scene.newest(session)).header.index + 9

        async def reached() -> bool:
            newest = (await scene.newest(session)).header
            await scene.play(session, newest.start_s)
            return newest.index >= end

        await scene.until(reached, "nine more chunks")
    finally:
        store.start()

    async def counted() -> bool:
        return (await scene.record(session)).next_chunk > 6

    await scene.until(counted, "the new state store has counted the chunks")


async def test_a_session_that_breaks_devices_is_failed_and_its_mate_goes_on(scene: Scene) -> None:
    """Three workers die of it, and each reports it as it leaves. It is not placed on a fourth."""
    first = await scene.worker()
    mate = await scene.started(first)
    await scene.chunks(mate, 2)
    poison = await scene.create("break")
    for turn in range(3):
        worker = first if turn == 0 else await scene.worker()
        if turn:
            await scene.place(mate, worker, "recover")
        await scene.place(poison, worker, "recover" if turn else "place")
        scene.spent.add(worker)
        assert await scene.exit_status(worker) != 0

        async def counted(errors: int = turn + 1) -> bool:
            return (await scene.record(poison)).device_errors == errors

        await scene.until(counted, "the goodbye is heard")
    failed = await scene.record(poison)
    assert failed.phase is Phase.FAILED
    assert str(failed.reason).startswith("poisoned: 3 workers in a row failed with a device error")
    # It was alone in the steps of the second and the third.
    spared = await scene.record(mate)
    assert spared.phase is Phase.ACTIVE
    assert spared.device_errors <= 1
    await scene.place(mate, await scene.worker(), "recover")
    await scene.chunks(mate, (await scene.record(mate)).next_chunk + 2)


async def test_a_worker_gets_its_weights_from_one_that_serves_the_model(scene: Scene) -> None:
    manifest = load_toyworld(path=SHIPPED["toyworld-small"]).manifest
    assert manifest is not None
    settings = {
        "TURBOSERVE_MODEL": "toyworld-small",
        "TURBOSERVE_WEIGHTS": "peers",
        "TURBOSERVE_WEIGHTS_DIGEST": manifest.digest,
        # A busy state store names the other workers late.
        "TURBOSERVE_REQUEST_DEADLINE_S": "20",
    }
    # The first finds no other worker, and reads its file. So does one whose file has other weights.
    first = await scene.worker("-m", "turboserve.worker", **settings)
    second = await scene.worker("-m", "turboserve.worker", **settings)
    wrong = {**settings, "TURBOSERVE_WEIGHTS_DIGEST": "0" * 32}
    third = await scene.worker("-m", "turboserve.worker", **wrong)
    received = [
        scene.metric(one, "turboserve_worker_weights_received_bytes_total") for one in (first, second, third)
    ]
    assert received == [0.0, manifest.size, 0.0]
    digests = {scene.loads[one].weights_digest for one in (first, second, third)}
    assert len(digests) == 1
    assert None not in digests
    for part in ("import", "weights", "warm_up"):
        name, label = "turboserve_worker_start_duration_seconds", f'turboserve_start_part="{part}"'
        assert scene.metric(second, name, label) > 0, part


async def test_a_home_takes_no_more_sessions_than_its_decode_workers_carry(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine keeps the connection.
    monkeypatch.setattr(role_server, "ADMIT_S", 60.0)
    monkeypatch.setattr(server, "ANSWER_S", 60.0)
    monkeypatch.setattr(text_server, "ANSWER_S", 60.0)
    key = "k" * 32
    settings = Settings(roles="decode", decode_key=SecretStr(key))
    models = tiny_models(settings)
    decoder = CachedDecoder(models.decoder, torch.device("cpu"), CacheTable(8))
    served = DecodeServer(
        "dec_1",
        models.fingerprint,
        CONFIG,
        decoder,
        key_of(settings),
        time.monotonic,
        DecodeTimes(ChunkTime(1.0), lambda _: 3),
    )
    serving = asyncio.create_task(served.run())
    listener, port = await listen(served.serve, "127.0.0.1", 0)
    texts = TextServer("txt_1", models.fingerprint, models.text, key_of(settings), time.monotonic)
    encoding = asyncio.create_task(texts.run())
    text_listener, text_port = await listen(texts.serve, "127.0.0.1", 0)
    try:
        home = await scene.worker(
            TURBOSERVE_ROLES="denoise",
            TURBOSERVE_TEXT_WORKERS=f"tcp://127.0.0.1:{text_port}",
            TURBOSERVE_DECODE_WORKERS=f"tcp://127.0.0.1:{port}",
            TURBOSERVE_DECODE_KEY=key,
            # A busy machine is not taken for a frozen decode worker.
            TURBOSERVE_DECODE_TIMEOUT_S="60",
            TURBOSERVE_WORKER_MAX_SESSIONS="5",
        )

        async def limited() -> bool:
            page = await scene.bus.call(LIST_WORKERS, ListWorkers())
            return any(row.id == home and row.capacity == 3 for row in page.workers)

        # Its own memory has room for more.
        await scene.until(limited, "the home has as many slots as its decode worker")
        assert scene.metric(home, "turboserve_worker_capacity") == 3
        sessions = [await scene.started(home, seed=seed) for seed in range(3)]
        # It is not created unless another worker has room, and not placed here.
        with pytest.raises(NoCapacityError):
            await scene.started(home, seed=3)
        await scene.chunks(sessions[0], 2)
        assert served.decoded > 0
        # Each session's prompt was encoded by the text worker.
        assert texts.encoded >= 1
        assert scene.metric(home, "turboserve_worker_encode_own_total") == 0
    finally:
        listener.close()
        text_listener.close()
        await stop(serving, encoding)
