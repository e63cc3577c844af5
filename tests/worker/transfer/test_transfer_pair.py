"""A group of two in one process: the aftereffects of an aborted transfer."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.helpers.waiting import eventually_blocking
from turboserve.worker.transfer import pair, rendezvous
from turboserve.worker.transfer.deadline import Deadline
from turboserve.worker.transfer.errors import AuthenticationError, PeerLostError, TransferAbortedError
from turboserve.worker.transfer.handshake import link_proof
from turboserve.worker.transfer.link import PIECE_BYTES, LocalPages, RemotePages

HOST = "127.0.0.1"
PATIENCE_S = 60.0


ENDS = pair.LinkEndpoints(bytes(32), HOST, (HOST,))


def made(
    threads: ThreadPoolExecutor, source_ends: pair.LinkEndpoints, target_ends: pair.LinkEndpoints
) -> tuple[pair.GlooLink, pair.GlooLink]:
    store = rendezvous.new_store(PATIENCE_S)
    target = threads.submit(pair.GlooLink, "link", store, pair.TARGET, target_ends, PATIENCE_S)
    try:
        source = pair.GlooLink("link", store, pair.SOURCE, source_ends, PATIENCE_S)
    finally:
        wait([target])
    return source, target.result()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def threads_of_others() -> set[str]:
    """Gloo's threads that earlier tests of this process have left."""
    return library_threads()


@pytest.fixture
def links(threads: ThreadPoolExecutor, threads_of_others: set[str]) -> tuple[pair.GlooLink, pair.GlooLink]:
    """Source and target."""
    return made(threads, ENDS, ENDS)


def send(link: pair.GlooLink, data: Tensor) -> int:
    return link.transfer("ses_1", LocalPages([[data]]), RemotePages(), range(1), Deadline(PATIENCE_S))


def library_threads() -> set[str]:
    """Return the ids of this process's threads that move gloo's data."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        # A thread may end meanwhile.
        with suppress(FileNotFoundError, ProcessLookupError):
            if "gloo" in task.joinpath("comm").read_text():
                found.add(task.name)
    return found


def test_no_thread_writes_to_the_memory_of_an_aborted_receive_while_its_error_is_held(
    links: tuple[pair.GlooLink, pair.GlooLink],
    threads: ThreadPoolExecutor,
    threads_of_others: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Incident: after an abort with a piece in flight, a receive's memory went to another session.

    The piece arrived later.
    """
    # Neither end is dead here, however slow this machine is.
    monkeypatch.setattr(pair, "PROGRESS_S", PATIENCE_S)
    source, target = links
    of_links = library_threads() - threads_of_others
    assert of_links
    memory = torch.zeros(2 * PIECE_BYTES, dtype=torch.uint8)
    sent = torch.ones(PIECE_BYTES, dtype=torch.uint8)
    deadline = Deadline(PATIENCE_S)
    receiving = threads.submit(
        target.transfer, "ses_1", RemotePages(), LocalPages([[memory]]), range(1), deadline
    )
    eventually_blocking(lambda: len(target._flights) == 2, PATIENCE_S)
    # It waits for the first.
    deadline.abort()
    assert send(source, sent) == PIECE_BYTES
    with pytest.raises(TransferAbortedError) as held:
        receiving.result(PATIENCE_S)
    with pytest.raises(PeerLostError):
        send(source, sent)
    # Only these threads could still write.
    eventually_blocking(lambda: not library_threads() & of_links, PATIENCE_S)
    assert not memory[PIECE_BYTES:].any()
    assert held.value.__cause__ is None
    assert target.closed


def test_an_end_with_another_key_is_not_the_peer(threads: ThreadPoolExecutor) -> None:
    """Incident: the first process to reach the library's listener passed for the peer and got the state."""
    stranger = pair.LinkEndpoints(b"1" * 32, HOST, (HOST,))
    with pytest.raises(AuthenticationError):
        made(threads, ENDS, stranger)


def test_a_reflected_proof_is_refused(threads: ThreadPoolExecutor) -> None:
    proofs = {link_proof(ENDS.key, name, role) for name in ("link", "other") for role in pair.ROLES}
    assert len(proofs) == 4
