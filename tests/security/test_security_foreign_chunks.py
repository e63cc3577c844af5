"""Entries that a worker's credentials append to another worker's chunk log, with viewers watching.

The fence binds only writers that name it. Readers therefore compare each entry with the owners in the log.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from websockets.sync.client import ClientConnection, connect

from tests.helpers.attack_target import KEYS, Target, running_target
from tests.helpers.service_process import connected
from turboserve.bus import Bus, append, last_entry, next_entry
from turboserve.contracts.chunks import ChunkHeader, Ownership
from turboserve.contracts.errors import TurboServeError
from turboserve.contracts.requests import FailSession, GetLatents
from turboserve.ids import new_id
from turboserve.subjects import CHUNK, CHUNKS, FAIL_SESSION, GET_LATENTS

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with running_target(tmp_path_factory.mktemp("stack")) as running:
        yield running


class Viewer:
    """Plays a stream as it watches. Fails at any chunk but the next."""

    def __init__(self, socket: ClientConnection, after: int) -> None:
        self._socket = socket
        self.last = after

    def watch(self, count: int) -> None:
        until = self.last + count
        while self.last < until:
            message = self._socket.recv(timeout=PATIENCE_S)
            if isinstance(message, bytes):
                continue
            said = json.loads(message)
            assert said["type"] not in ("error", "end"), said
            if said["type"] == "chunk":
                assert said["index"] == self.last + 1
                self.last = said["index"]
                self._socket.send(json.dumps({"type": "playhead", "playhead_s": said["start_s"]}))


@contextmanager
def viewing(target: Target, session: str, after: int = -1) -> Iterator[Viewer]:
    """Connect a viewer by one WebSocket, from the chunk behind `after`."""
    address = f"{target.url.replace('http', 'ws', 1)}/v1/sessions/{session}/stream"
    with connect(
        f"{address}?after={after}",
        additional_headers={"Authorization": f"Bearer {KEYS['alice']}"},
        max_size=None,
        open_timeout=PATIENCE_S,
        ping_interval=None,
    ) as socket:
        yield Viewer(socket, after)


class Attacker:
    """A connection as the workers' user."""

    def __init__(self, runner: asyncio.Runner, target: Target, session: str) -> None:
        self._runner, self.session = runner, session
        self.bus: Bus = runner.run(connected(target.pool.nats, "worker", PATIENCE_S))

    def newest(self) -> ChunkHeader:
        entry = self._runner.run(last_entry(self.bus, CHUNKS, CHUNK.of(self.session)))
        assert entry is not None
        return ChunkHeader.of_entry(self.session, entry.headers)

    def append(self, **changes: object) -> None:
        """Append a copy of the newest chunk, with `changes`, without the fence, on the subject of its owner.

        Every worker may do so if all workers share one user.
        """
        newest = self.newest()
        header = newest.model_copy(update={"init_bytes": 0, **changes})
        self._runner.run(
            append(
                self.bus,
                CHUNK.by(self.session, newest.worker),
                b"no video",
                message_id=new_id("test"),
                headers=header.to_headers(),
            )
        )

    def owned(self) -> Ownership:
        async def read() -> Ownership:
            found, position = None, 1
            while entry := await next_entry(self.bus, CHUNKS, f"own.{self.session}", position):
                found, position = Ownership.from_bytes(entry.data), entry.sequence + 1
            assert found is not None
            return found

        return self._runner.run(read())

    def close(self) -> None:
        self._runner.run(self.bus.close())


@pytest.fixture
def session(target: Target) -> Iterator[str]:
    name = target.session()
    yield name
    target.end(name)


@pytest.fixture
def attacker(target: Target, session: str) -> Iterator[Attacker]:
    with asyncio.Runner() as runner:
        attacker = Attacker(runner, target, session)
        yield attacker
        attacker.close()


def record(target: Target, session: str) -> dict[str, object]:
    with target.client("alice") as client:
        row: dict[str, object] = client.get(f"/v1/sessions/{session}").json()
        return row


def metric(target: Target, name: str) -> float:
    with httpx.Client(base_url=target.url, timeout=PATIENCE_S) as client:
        lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_chunks_that_name_another_worker_or_epoch_reach_no_viewer(
    target: Target, session: str, attacker: Attacker
) -> None:
    before = metric(target, "turboserve_gateway_foreign_chunks_total")
    with ExitStack() as sockets:
        viewer = sockets.enter_context(viewing(target, session))
        viewer.watch(2)
        own = attacker.owned()
        for step in (1, 4, 1000):
            for change in ({"worker": "wrk_other"}, {"epoch": own.epoch + 1}, {"epoch": own.epoch - 1}):
                attacker.append(index=attacker.newest().index + step, control_seq=10**6, **change)
        viewer.watch(3)
        # A viewer that connects while the newest entry is the attacker's begins at the owner's.
        attacker.append(index=10**6, worker="wrk_other")
        late = sockets.enter_context(viewing(target, session, viewer.last))
        late.watch(2)
        viewer.watch(2)
        # Workers make chunks ahead. Entries behind those are read when these are watched.
        deadline = time.monotonic() + PATIENCE_S
        while metric(target, "turboserve_gateway_foreign_chunks_total") < before + 9:
            assert time.monotonic() < deadline, "the gateway did not meet all of the attacker's chunks"
            viewer.watch(1)
    deadline = time.monotonic() + PATIENCE_S
    while int(str(record(target, session)["next_chunk"])) <= late.last:
        assert time.monotonic() < deadline, "the chunks are not counted"
        time.sleep(0.05)
    row = record(target, session)
    assert int(str(row["next_chunk"])) < 1000
    assert row["applied_control_seq"] == 0


def test_a_copied_header_cannot_skip_chunks_for_a_viewer(
    target: Target, session: str, attacker: Attacker
) -> None:
    """The owner's name is copied.

    Incident: at index +4, viewers got the error that chunks are gone (4410).
    """
    with viewing(target, session) as viewer:
        viewer.watch(2)
        for step in (2, 4, 30):
            attacker.append(index=attacker.newest().index + step)
            viewer.watch(3)


def test_a_session_is_failed_and_its_latents_are_read_by_its_owner_alone(
    target: Target, session: str, attacker: Attacker
) -> None:
    own = attacker.owned()
    other = "wrk_other"
    failures = [
        FailSession(session=session, epoch=epoch, worker=other, reason="x")
        for epoch in (own.epoch, own.epoch - 1)
    ]
    reads = [GetLatents(session=session, index=0, worker=worker) for worker in (other, None)]
    for attempt in (
        *(attacker.bus.call(FAIL_SESSION, failure) for failure in failures),
        *(attacker.bus.call(GET_LATENTS, read) for read in reads),
    ):
        with pytest.raises(TurboServeError) as refused:
            attacker._runner.run(attempt)
        assert refused.value.code in ("stale_epoch", "forbidden")
    # Unwatched for a few seconds, a session is suspended.
    assert record(target, session)["phase"] in ("active", "suspended")
