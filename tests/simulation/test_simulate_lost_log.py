"""The broker loses its disk: no viewer and no worker wait for each other afterwards.

The worker waits for the viewer's playhead, and the viewer for a chunk that only the lost log had.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.simulation.simulate_scene import Scene, scene
from turboserve.contracts.sessions import Activity, Phase, SessionRecord
from turboserve.gateway.auth.access import DEFAULT_TENANT as TENANT
from turboserve.simulation.runtime.rows.changes import MemoryFence
from turboserve.state_store.publish.fence import Fence

LEAD = 5
"""Chunks that a session makes before its viewer has played anything."""
AWAY_S = 0.3
"""Time for which the broker is away, seconds."""


def lose_log(one: Scene) -> None:
    one.world.broker.stop()
    one.world.loop.advance(AWAY_S)
    one.world.restart_broker()


def made(one: Scene) -> int:
    """Number of chunks that were accepted."""
    last = one.world.checker.log.of(one.session).last
    return 0 if last is None else last.header.index + 1


def started(one: Scene) -> None:
    world = one.world
    one.until(lambda: world.free_slots() == world.scale.workers * world.scale.slots)
    created = one.does(one.users.create(1, attempts=4))
    one.until(created.done)
    one.session = created.result().id


def pause(one: Scene) -> None:
    paused = one.does(one.users.ask(lambda g: g.sessions.pause(TENANT, one.session)))
    # A client without an answer repeats its request.
    one.until(lambda: paused.done() and one.row.phase is Phase.SUSPENDED)


def resume(one: Scene) -> None:
    one.does(one.users.ask(lambda g: g.sessions.resume(TENANT, one.session), 20))
    one.until(lambda: one.row.activity is Activity.WATCHING)


@pytest.mark.parametrize(
    "chunks", [0, *(pytest.param(chunks, marks=pytest.mark.soak) for chunks in (1, 3)), LEAD]
)
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("before", [None, "socket", "http"])
def test_video_goes_on_after_the_log_is_lost(chunks: int, counted: bool, before: str | None) -> None:
    """`counted`: whether the row had counted the chunks. One viewer joins before, and one after."""
    with scene() as one:
        started(one)
        one.until(lambda: one.row.own_revision is not None)
        if not counted:
            one.world.service("state-store-1").freeze(2.0)
        if before is not None:
            one.users.watch(one.session, socket=before == "socket", from_start=True)
        one.until(lambda: made(one) >= chunks)
        if counted:
            one.until(lambda: one.row.next_chunk >= chunks)
        lose_log(one)
        one.users.watch(one.session)
        one.rests()


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("harm", ["paused", "migrating", "worker lost"])
@pytest.mark.parametrize("watched", [True, False])
def test_video_goes_on_after_the_log_is_lost_with_more(counted: bool, harm: str, watched: bool) -> None:
    with scene() as one:
        started(one)
        one.until(lambda: one.row.own_revision is not None)
        if watched:
            one.users.watch(one.session, from_start=True)
        one.until(lambda: made(one) >= LEAD)
        worker = one.worker(one.row.worker).service
        assert worker is not None
        if harm == "paused":
            pause(one)
        elif harm == "migrating":
            one.does(one.users.ask(lambda g: g.sessions.migrate(None, one.session, None), 1))
            one.until(lambda: one.row.migration is not None)
        elif counted:
            one.until(lambda: one.row.next_chunk >= LEAD)
        if not counted:
            one.world.service("state-store-1").freeze(2.0)
        lose_log(one)
        if harm == "worker lost":
            worker.kill("kill -9")
        one.users.watch(one.session)
        if harm == "paused":
            resume(one)
        one.rests()


def test_video_goes_on_after_the_second_log_is_lost_as_well() -> None:
    with scene(workers=1) as one:
        started(one)
        one.until(lambda: one.row.own_revision is not None)
        for chunks in (LEAD, LEAD + 1):
            one.world.service("state-store-1").freeze(1.5)
            one.until(lambda: made(one) >= chunks)  # noqa: B023
            version = one.row.version
            lose_log(one)
            one.until(lambda: one.row.version > version and one.row.own_revision is not None)  # noqa: B023
        one.users.watch(one.session)
        one.rests()


def fences_after_losses(one: Scene, loss: str) -> list[int]:
    """Lose the log three times. Returns the sequences of the session's fences."""
    began_at = one.world.loop.time()
    started(one)
    one.users.watch(one.session)
    one.until(lambda: made(one) >= 1)
    found: list[int] = []
    for _ in range(3):
        one.until(lambda: one.row.own_revision is not None)
        assert one.row.own_revision is not None
        found.append(one.row.own_revision)
        losses = one.row.log_losses
        one.world.broker.stop()
        one.world.loop.advance(AWAY_S)
        if loss == "disk":
            one.world.restart_broker()
        else:
            one.world.restart_broker_without_tail(began_at)
        one.until(lambda: one.row.log_losses > losses)  # noqa: B023
    return found


def increase(sequences: list[int]) -> bool:
    return all(after > before for before, after in pairwise(sequences))


@pytest.mark.parametrize("loss", ["disk", "end"])
def test_every_fence_has_a_greater_sequence_than_each_lost_one(loss: str) -> None:
    """Incident: the fence of a session's end got the sequence of the lost one.

    The broker then took chunks from a worker that had been cut off under the lost one.
    """
    with scene(workers=1) as one:
        found = fences_after_losses(one, loss)
        one.rests()
        ended = one.row.own_revision
        assert ended is not None
        assert increase([*found, ended])


def test_a_store_whose_fences_repeat_a_sequence_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store appends a fence after what the log still has, whatever sequences the row has had."""
    write, store = Fence._write, MemoryFence.store

    async def after_the_log(self: Fence, record: SessionRecord, newest: int) -> int | None:
        return await write(self, record, 0)

    async def any_sequence(
        self: MemoryFence, session: str, epoch: int, revision: int
    ) -> SessionRecord | None:
        row = self._rows.rows[session]
        self._rows.rows[session] = replace(row, fence_revision=0)
        return await store(self, session, epoch, revision)

    monkeypatch.setattr(Fence, "_write", after_the_log)
    monkeypatch.setattr(MemoryFence, "store", any_sequence)
    with scene(workers=1) as one:
        assert not increase(fences_after_losses(one, "end"))


def test_video_goes_on_after_chunks_are_lost_that_no_viewer_has() -> None:
    """A test plants a worker and a gateway that do not notice this, and the session stays stuck."""
    with scene(workers=1) as one:
        one.session_runs()
        one.loses_unseen_chunks(AWAY_S)
        one.rests()
