"""Loans between real processes: workers find each other, a session in deficit borrows, donors break."""

import asyncio
import os
import signal
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest
import torch

from tests.helpers import forked_process
from tests.worker.loan_worker import LoanWorker
from turboserve.contracts.errors import InvalidInputError
from turboserve.contracts.loans import LoanRole, WorkerLoan
from turboserve.worker.sequence_parallel.group import Group
from turboserve.worker.sequence_parallel.loan_messages import Borrowing, Free, Lending
from turboserve.worker.sequence_parallel.peers import HostDirectory

LIMIT_S = 2.0
"""Least credit of a donor's sessions. Their lead is 3 s."""
EXCHANGE_S = 60.0
"""Longest time of one exchange: a busy machine is no frozen worker."""
FROZEN_S = 15.0
"""The same where a worker freezes."""
WAIT_S = 180.0


@contextmanager
def process(
    directory: Path, worker: str, *session: str, exchange_s: float = EXCHANGE_S
) -> Iterator[forked_process.Started]:
    limits = str(LIMIT_S), str(exchange_s)
    command = ["-m", "tests.worker.loan_worker", str(directory), worker, *limits, *session]
    started = forked_process.start(command, os.environ, 2, stdout=1)
    try:
        yield started
    finally:
        started.kill()
        started.wait()


@asynccontextmanager
async def home(directory: Path, exchange_s: float = EXCHANGE_S) -> AsyncIterator[LoanWorker]:
    worker = LoanWorker(directory, "wrk_0", LIMIT_S, exchange_s)
    running = asyncio.create_task(worker.service.run())
    try:
        yield worker
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        worker.thread.stop(WAIT_S)


async def until(condition: Callable[[], object], what: str) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < WAIT_S, what
        await asyncio.sleep(0.02)


def same_video(home: LoanWorker, alone: LoanWorker) -> None:
    count = min(len(home.chunks), len(alone.chunks))
    for one, two in zip(home.chunks[:count], alone.chunks[:count], strict=True):
        assert one.index == two.index
        torch.testing.assert_close(one.latents, two.latents, atol=1e-5, rtol=1e-5)


def group_with(worker: LoanWorker, peer: str) -> Group:
    group = worker.service.peers[peer].group
    assert isinstance(group, Group)
    return group


def reported(worker: LoanWorker) -> tuple[WorkerLoan | None, int]:
    """Return the loan that the worker reports, and how often it has changed."""
    return worker.service.loan, worker.changes


async def borrows(worker: LoanWorker) -> None:
    """Begin a session whose viewer is far ahead of it, and wait for its loan."""
    await worker.begin("s")
    await worker.playhead("s", 1e6)
    await until(lambda: isinstance(worker.service.loans.state, Borrowing), "no loan")


async def expected(count: int, directory: Path) -> LoanWorker:
    """The same session on a worker alone, which has no peers."""
    alone = LoanWorker(directory, "alone", LIMIT_S, EXCHANGE_S)
    await alone.begin("s")
    await alone.playhead("s", 1e6)
    await until(lambda: len(alone.chunks) >= count, "no chunks alone")
    alone.thread.stop(WAIT_S)
    return alone


async def test_a_session_in_deficit_borrows_and_returns_when_it_has_recovered(tmp_path: Path) -> None:
    with process(tmp_path / "host", "wrk_1"):
        async with home(tmp_path / "host") as worker:
            await until(lambda: worker.service.peers, "no peer")
            await borrows(worker)
            assert reported(worker) == (WorkerLoan(role=LoanRole.HOME, peer="wrk_1"), 1)
            group = group_with(worker, "wrk_1")
            began = group.exchanges
            first = len(worker.chunks)
            await until(lambda: len(worker.chunks) >= first + 3, "no chunks")
            # At least the forwards of two whole chunks, with two exchanges per layer each.
            config = worker.thread.engine.config
            assert group.exchanges > began + 2 * config.chunk_forwards * 2 * config.num_layers
            # The viewer stops far behind what is generated: credit returns, and the loan ends.
            await worker.playhead("s", 0.0)
            await until(lambda: isinstance(worker.service.loans.state, Free), "the loan does not end")
            assert reported(worker) == (None, 2)
            ended = len(worker.chunks)
            await worker.playhead("s", 1e6)
            await until(lambda: isinstance(worker.service.loans.state, Borrowing), "no second loan")
            await until(lambda: len(worker.chunks) >= ended + 2, "no chunks of the second loan")
            same_video(worker, await expected(5, tmp_path / "other"))


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_donor_that_dies_or_freezes_does_not_stop_the_session(
    tmp_path: Path, fault: signal.Signals
) -> None:
    exchange_s = FROZEN_S if fault == signal.SIGSTOP else EXCHANGE_S
    with process(tmp_path / "host", "wrk_1", exchange_s=exchange_s) as donor:
        async with home(tmp_path / "host", exchange_s) as worker:
            await until(lambda: worker.service.peers, "no peer")
            await borrows(worker)
            group = group_with(worker, "wrk_1")
            began = group.exchanges
            await until(lambda: group.exchanges > began + 40, "no forwards with the donor")
            os.kill(donor.pid, fault)
            await until(lambda: isinstance(worker.service.loans.state, Free), "the loan does not end")
            await until(lambda: not worker.service.peers, "the peer is kept")
            assert group.closed
            count = len(worker.chunks) + 3
            await until(lambda: len(worker.chunks) >= count, "the session has stopped")
            same_video(worker, await expected(count, tmp_path / "other"))


@pytest.mark.parametrize("peer", ["wrk_1", "vrk_1"])
async def test_the_service_ends_with_all_its_tasks(tmp_path: Path, peer: str) -> None:
    """It has connected to `wrk_1`, and `vrk_1` has connected to it."""
    worker = LoanWorker(tmp_path / "host", "wrk_0", LIMIT_S, EXCHANGE_S)
    before = asyncio.all_tasks()
    try:
        with process(tmp_path / "host", peer):
            running = asyncio.create_task(worker.service.run())
            await until(lambda: worker.service.peers, "no peer")
            await borrows(worker)
            group = group_with(worker, peer)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert asyncio.all_tasks() == before
            assert group.closed
            assert not worker.service.peers
            # What the engine's thread reports later starts no task either.
            count = len(worker.chunks) + 1
            await until(lambda: len(worker.chunks) >= count, "the session has stopped")
            assert asyncio.all_tasks() == before
    finally:
        worker.thread.stop(WAIT_S)


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(InvalidInputError, match="mode 700"):
        HostDirectory(tmp_path, "wrk_1")
    with pytest.raises(InvalidInputError, match="107 bytes"):
        HostDirectory(tmp_path, "w" * 107)
    HostDirectory(tmp_path / "new", "wrk_1")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


async def test_a_home_that_freezes_costs_its_donor_one_exchange(tmp_path: Path) -> None:
    async with home(tmp_path / "host", FROZEN_S) as donor:
        await donor.begin("own", seed=4)
        await donor.playhead("own", 0.0)
        await until(lambda: len(donor.chunks) >= 4, "the donor's session has no lead")
        with process(tmp_path / "host", "wrk_1", "s", exchange_s=FROZEN_S) as borrower:
            await until(lambda: isinstance(donor.service.loans.state, Lending), "no loan")
            group = group_with(donor, "wrk_1")
            began = group.exchanges
            await until(lambda: group.exchanges > began + 40, "no forwards for the home")
            os.kill(borrower.pid, signal.SIGSTOP)
            # The donor's viewer needs a chunk: it comes although the home never answers.
            count = len(donor.chunks)
            await donor.playhead("own", 1.0)
            await until(lambda: len(donor.chunks) > count, "the donor's session waits for the home")


async def test_a_donor_serves_its_own_session_between_and_ends_the_loan_for_it(tmp_path: Path) -> None:
    donor = LoanWorker(tmp_path / "host", "wrk_1", LIMIT_S, EXCHANGE_S)
    serving = asyncio.create_task(donor.service.run())
    try:
        await donor.begin("own", seed=4)
        await donor.playhead("own", 0.0)
        # The donor's viewer has a whole lead left.
        await until(lambda: len(donor.chunks) >= 4, "the donor's session has no lead")
        async with home(tmp_path / "host") as worker:
            await until(lambda: worker.service.peers, "no peer")
            await borrows(worker)
            before, group = len(donor.chunks), group_with(worker, "wrk_1")
            began = group.exchanges
            await until(lambda: group.exchanges > began + 40, "no forwards with the donor")
            # One more chunk becomes due at the donor: it is generated between forwards of the loan.
            await donor.playhead("own", 1.0)
            await until(lambda: len(donor.chunks) > before, "the donor's session waits for the loan")
            # The viewer is at the end of the video: the donor needs its device for itself.
            await donor.playhead("own", 1e6)
            await until(lambda: isinstance(donor.service.loans.state, Free), "the donor still lends")
            await until(lambda: not isinstance(worker.service.loans.state, Borrowing), "still borrowed")
            # Nothing broke: the connection stays for the next loan.
            assert worker.service.peers
            assert not group_with(worker, "wrk_1").closed
            count = len(worker.chunks)
            await until(lambda: len(worker.chunks) >= count + 2, "the home has stopped")
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving
        donor.thread.stop(WAIT_S)
