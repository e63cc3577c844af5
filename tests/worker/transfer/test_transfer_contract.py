"""Guarantees of every transfer backend, if the other side dies, stops or lies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch

from tests.helpers.waiting import eventually_blocking
from tests.worker.transfer import transfer_peer
from tests.worker.transfer.transfer_peer import CHANGED, LAYERS, LONG_S, MIGRATION, POSITIONS, SESSION
from turboserve.worker.transfer import nixl
from turboserve.worker.transfer import source as source_role
from turboserve.worker.transfer import target as target_role
from turboserve.worker.transfer.fetched_state import FetchedState
from turboserve.worker.transfer.links import available

# The first test waits until torch is loaded.
pytestmark = pytest.mark.timeout(900)

BACKENDS = ("gloo", "shm", "nixl", "nccl")
SIZE = 50_000
"""Bytes of one part: odd enough to cross pieces."""
PATIENCE_S = 240.0
DEADLINE_S = 8.0
"""Deadline of a source. It includes the steps before the target ends."""
TARGET_DEADLINE_S = 4.0
"""Deadline of a target, from when the test lets time pass. Longer than the progress limit of a link."""
WITHOUT_ANSWER_S = 0.5
"""Time for which a target searches for a dead source, so that it does not end by the deadline."""
LATE_S = 100.0
"""Maximum delay of a side beyond its deadline on a busy machine. It must never hang."""
STEPS = ("pages", "rest", "acknowledged")
ENDS = [
    # A stopped peer costs a whole deadline: with gloo in every run, with the others in `make soak`.
    pytest.param(
        backend, number, step, marks=[pytest.mark.soak] * (number is signal.SIGSTOP and backend != "gloo")
    )
    for backend in BACKENDS
    for number in (signal.SIGKILL, signal.SIGSTOP)
    for step in STEPS
]
"""Backend, how a peer ends, and at which step."""


def missing(backend: str) -> str | None:
    """Return why a backend cannot be tried on this machine."""
    if backend == "nccl" and torch.cuda.device_count() < 2:
        return "nccl needs two GPUs"
    if not available(backend, torch.device("cuda" if backend == "nccl" else "cpu")):
        return f"{backend} is not installed"
    return None


class Peer:
    """A process with one role."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self.process, self.pipe = process, pipe

    def say(self, word: Any) -> None:
        self.pipe.send(word)

    def hear(self, patience_s: float = PATIENCE_S) -> Any:
        assert self.pipe.poll(patience_s), "no message for"
        return self.pipe.recv()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def facts(self) -> dict[str, int]:
        self.say("facts")
        found: dict[str, int] = self.hear()[1]
        return found

    def until(self, links: int, files: int) -> None:
        """Wait until it holds no more than this."""

        def holds() -> bool:
            facts = self.facts()
            return facts["links"] == links and facts["files"] <= files

        eventually_blocking(holds, PATIENCE_S, lambda: str(self.facts()))


class Pair:
    """A source and a target."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.peers: list[Peer] = []
        self.context = multiprocessing.get_context("forkserver")
        # Loading torch once is enough for all processes of a test run.
        names = [source_role.__name__, target_role.__name__, transfer_peer.__name__]
        self.context.set_forkserver_preload([*names, "nixl._api"] if nixl.installed() else names)

    def start(self, role: Any, **options: Any) -> Peer:
        ours, theirs = self.context.Pipe()
        chosen = {"backend": self.backend, "size": SIZE, **options}
        process = self.context.Process(target=role, args=(theirs, chosen), daemon=True)
        process.start()
        theirs.close()
        peer = Peer(process, ours)
        self.peers.append(peer)
        return peer

    def source(self, **options: Any) -> tuple[Peer, str]:
        peer = self.start(transfer_peer.run_source, **options)
        return peer, peer.hear()[1]

    def target(self, **options: Any) -> Peer:
        return self.start(transfer_peer.run_target, **options)

    def end(self) -> None:
        for peer in self.peers:
            if peer.process.is_alive():
                peer.signal(signal.SIGKILL)
            peer.process.join()
            peer.pipe.close()


@pytest.fixture(params=BACKENDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    reason = missing(request.param)
    if reason is not None:
        pytest.skip(reason)
    pair = Pair(request.param)
    yield pair
    pair.end()


def fetch(target: Peer, address: str, session: str = SESSION, migration: int = MIGRATION) -> None:
    target.say(("fetch", session, migration, address))


def fetched(target: Peer) -> FetchedState:
    word = target.hear()
    assert word[0] == "fetched", word
    assert word[2], "what arrived is not what was sent"
    found: FetchedState = word[1]
    return found


def failed(target: Peer) -> str:
    word = target.hear()
    assert word[0] == "error", word
    return str(word[1])


def test_a_state_arrives_bit_for_bit_in_rounds_and_only_what_changed_is_sent_twice(pair: Pair) -> None:
    (_, address), target = pair.source(), pair.target()
    fetch(target, address)
    found = fetched(target)
    assert found.backend == pair.backend
    assert found.next_chunk == 4
    assert found.state_bytes == POSITIONS * LAYERS * SIZE
    assert found.bytes_copied == (POSITIONS + CHANGED) * LAYERS * SIZE
    assert found.rounds == 2


def test_links_are_kept_warm_and_nothing_else_is_kept(pair: Pair) -> None:
    (source, address), target = pair.source(), pair.target()
    fetch(target, address)
    first = fetched(target)
    held = [peer.facts() for peer in (source, target)]
    for _ in range(3):
        fetch(target, address)
        assert fetched(target).digest == first.digest
    for peer, before in zip((source, target), held, strict=True):
        peer.until(links=1, files=before["files"])


def test_a_session_at_rest_goes_in_one_round(pair: Pair) -> None:
    (_, address), target = pair.source(quiesced=True), pair.target()
    fetch(target, address)
    found = fetched(target)
    assert (found.rounds, found.bytes_copied) == (1, found.state_bytes)


def test_large_pages_go_in_pieces(pair: Pair) -> None:
    size = 9_000_001
    (_, address), target = pair.source(size=size), pair.target(size=size)
    fetch(target, address)
    assert fetched(target).state_bytes == POSITIONS * LAYERS * size


@pytest.mark.parametrize(("pair", "number", "step"), ENDS, indirect=["pair"])
def test_a_source_that_dies_or_stops_costs_the_target_an_error_and_no_memory(
    pair: Pair, step: str, number: signal.Signals
) -> None:
    # A dead source does not answer the retry; a stopped one costs the deadline.
    patience_s = WITHOUT_ANSWER_S if number is signal.SIGKILL else 2 * TARGET_DEADLINE_S
    source, address = pair.source(stop_at=step)
    target = pair.target(deadline_s=TARGET_DEADLINE_S, patience_s=patience_s)
    before = target.facts()
    fetch(target, address)
    assert source.hear() == ("step", step)
    source.signal(number)
    target.say("time passes")
    assert failed(target) in ("peer_lost", "deadline_passed", "backend_failed")
    target.until(links=0, files=before["files"] + 2)
    # It works for the next source as before.
    _, other = pair.source()
    fetch(target, other)
    fetched(target)


@pytest.mark.parametrize(("pair", "number", "step"), ENDS, indirect=["pair"])
def test_a_target_that_dies_or_stops_leaves_the_source_free_for_the_next(
    pair: Pair, step: str, number: signal.Signals
) -> None:
    # The death of a target is noticed at once; only a stopped one costs the deadline.
    deadline_s = LATE_S if number is signal.SIGKILL else DEADLINE_S
    (source, address), target = pair.source(stop_at=step, deadline_s=deadline_s), pair.target()
    fetch(target, address)
    assert source.hear() == ("step", step)
    target.signal(number)
    source.say("go on")
    end = time.monotonic() + DEADLINE_S + LATE_S
    while True:
        source.say("facts")
        overs, held = source.hear()
        if overs == 1:
            break
        assert time.monotonic() < end, "the source still waits"
        time.sleep(0.1)
    assert held["links"] == 0
    source.say("step nowhere")
    other = pair.target()
    fetch(other, address)
    fetched(other)


@pytest.mark.parametrize("step", STEPS)
def test_an_abort_at_the_target_frees_both_sides(pair: Pair, step: str) -> None:
    (source, address), target = pair.source(stop_at=step), pair.target()
    fetch(target, address)
    assert source.hear() == ("step", step)
    target.say("cancel")
    assert failed(target) == "cancelled"
    source.say("go on")
    source.say("step nowhere")
    source.until(links=0, files=1_000)
    target.until(links=0, files=1_000)
    fetch(target, address)
    fetched(target)


def test_a_source_that_never_comes_to_the_boundary_costs_the_deadline(pair: Pair) -> None:
    (source, address), target = pair.source(stop_at="rest"), pair.target(deadline_s=1.0)
    fetch(target, address)
    assert source.hear() == ("step", "rest")
    started = time.monotonic()
    target.say("time passes")
    assert failed(target) == "deadline_passed"
    assert time.monotonic() - started < 1.0 + LATE_S


def test_a_way_that_is_slower_than_the_session_writes_costs_it_no_standstill(pair: Pair) -> None:
    """Every round finds as much to send as the one before: it would be quiesced for all of that."""
    size = 200_000
    source, address = pair.source(size=size, restless=True, still_s=1e-6, stop_at="rest")
    target = pair.target(size=size)
    fetch(target, address)
    assert failed(target) == "too_slow"
    # It was never asked to quiesce.
    assert not source.pipe.poll(0.1)


def test_a_session_stands_still_for_no_longer_than_it_may(pair: Pair) -> None:
    # Its chunks never enter the log; a busy machine may need the time for the last round already.
    (_, address), target = pair.source(stop_at="acknowledged", still_s=1.0), pair.target()
    fetch(target, address)
    assert failed(target) == "too_slow"


def test_a_session_at_rest_may_take_as_long_as_the_target_waits(pair: Pair) -> None:
    (source, address), target = (
        pair.source(stop_at="acknowledged", still_s=1e-3, quiesced=True),
        pair.target(),
    )
    fetch(target, address)
    assert source.hear() == ("step", "acknowledged")
    source.say("go on")
    fetched(target)


def test_a_flipped_bit_is_found(pair: Pair) -> None:
    (_, address), target = pair.source(), pair.target(harm="flip")
    fetch(target, address)
    assert failed(target) == "digest_mismatch"
    target.until(links=0, files=1_000)


def test_a_truncated_transfer_is_refused(pair: Pair) -> None:
    (_, address), target = pair.source(harm="truncate"), pair.target(deadline_s=DEADLINE_S)
    fetch(target, address)
    # For gloo, a message that is too short is no error: there the digest finds it, and twice is enough.
    # Errors that the link itself finds are retried until the deadline.
    by_digest = pair.backend in ("gloo", "nccl")
    if not by_digest:
        target.say("the deadline passes after an attempt")
    assert failed(target) == ("digest_mismatch" if by_digest else "truncated")
    target.until(links=0, files=1_000)


def test_pages_of_another_layout_are_refused(pair: Pair) -> None:
    (source, address), target = pair.source(), pair.target(size=SIZE + 1)
    fetch(target, address)
    assert failed(target) == "wrong_layout"
    source.until(links=0, files=1_000)


def test_another_model_is_refused_before_anything_is_copied(pair: Pair) -> None:
    (source, address), target = pair.source(), pair.target(model="f" * 16)
    fetch(target, address)
    assert failed(target) == "wrong_layout"
    source.say("facts")
    assert source.hear()[0] == 0


@pytest.mark.parametrize(("session", "migration"), [("ses_2", MIGRATION), (SESSION, MIGRATION + 1)])
def test_a_session_or_migration_that_the_row_does_not_name_is_refused(
    pair: Pair, session: str, migration: int
) -> None:
    (_, address), target = pair.source(), pair.target(deadline_s=DEADLINE_S)
    fetch(target, address, session, migration)
    target.say("the deadline passes after an attempt")
    assert failed(target) == "not_authenticated"


def test_an_unused_address_is_an_error(pair: Pair) -> None:
    target = pair.target(deadline_s=DEADLINE_S)
    fetch(target, "tcp://127.0.0.1:1")
    target.say("the deadline passes after an attempt")
    assert failed(target) == "peer_lost"


def test_connecting_has_a_shorter_limit_than_a_large_copy(pair: Pair) -> None:
    target = pair.target(deadline_s=3_600.0, patience_s=1.0)
    fetch(target, "tcp://127.0.0.1:1")
    target.say("time passes")
    assert failed(target) == "peer_lost"


def test_a_copy_that_broke_in_the_middle_is_tried_again_all_the_same(pair: Pair) -> None:
    """It may take longer than the timeout, because something arrived."""
    (_, address), target = pair.source(), pair.target(harm="flip once", patience_s=LONG_S / 2)
    fetch(target, address)
    fetched(target)


def test_two_workers_without_a_way_in_common_say_so() -> None:
    pair = Pair("gloo")
    try:
        (_, address), target = pair.source(), pair.target(backend="shm")
        fetch(target, address)
        assert failed(target) == "no_backend"
    finally:
        pair.end()
