"""A home and a donor in two real processes over gloo: equality, a donor killed or frozen, many loans."""

import itertools
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch._C._distributed_c10d import HashStore

from turboserve.bench.sequence_parallel import donor as donor_module
from turboserve.bench.sequence_parallel.donor import DonorProcess, donor_process, engine_of, parallel_of
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.errors import PartnerLostError
from turboserve.worker.engine.interface import ChunkReady, Control, SessionSpec
from turboserve.worker.engine.sequence_parallel_sizes import exchanged_bytes
from turboserve.worker.replicas.toyworld import load_toyworld
from turboserve.worker.sequence_parallel.group import GlooGroup

LIMIT_S = 4.0
"""Longest time of one exchange where a donor freezes."""
PATIENCE_S = 600.0
"""Longest time of one exchange elsewhere: a donor that a busy machine stops for a while is not lost."""
PROMPT = "a red circle moving left on black"


@pytest.fixture(autouse=True)
def forked_donors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork each donor from a server that has imported torch: an import takes longer than most tests."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([donor_module.__name__])
    monkeypatch.setattr(donor_module, "multiprocessing", SimpleNamespace(get_context=lambda _: context))


def engine_with_session() -> Engine:
    engine = engine_of(load_toyworld())
    engine.admit(SessionSpec("s", PROMPT, 3), time.monotonic())
    engine.playhead("s", 1e6, now=time.monotonic())
    return engine


def chunks(engine: Engine, count: int) -> list[ChunkReady]:
    found: list[ChunkReady] = []
    while len(found) < count:
        found += [event for event in engine.step(time.monotonic()) if isinstance(event, ChunkReady)]
    return found


def borrow(engine: Engine, donor: DonorProcess, broken: Callable[[Exception], Any], loan: int = 1) -> None:
    donor.loan(loan)
    state = engine.sessions["s"].state
    parallel_of(engine).borrow(loan, state, donor.announce, donor.group, broken)


def same(one: Engine, two: Engine, count: int) -> None:
    """Both generate equal chunks, and their rings are equal after them."""
    for expected, found in zip(chunks(one, count), chunks(two, count), strict=True):
        torch.testing.assert_close(expected.latents, found.latents, atol=1e-5, rtol=1e-5)
    for name in ("keys", "values"):
        rings = [engine.sessions["s"].state.ring.filled()[name] for engine in (one, two)]
        torch.testing.assert_close(*rings, atol=1e-5, rtol=1e-5)


def test_a_video_on_two_processes_is_that_of_one() -> None:
    alone, home = engine_with_session(), engine_with_session()
    broken: list[Exception] = []
    with donor_process(PATIENCE_S) as donor:
        borrow(home, donor, broken.append)
        same(alone, home, 4)
        for engine in (alone, home):
            engine.control("s", Control(1, prompt="a blue square on white"))
        same(alone, home, 3)
        # Everything that the donor computes for a chunk comes home: it sends about half of the bytes.
        config = home.config
        attentions = exchanged_bytes(config, config.frames_per_chunk, 4)
        sent = donor.sent_bytes()
        assert 0.4 < sent / (7 * config.chunk_forwards * attentions) < 0.9
        # The loan ends without a transfer: the home alone continues with what it has.
        parallel_of(home).return_donor()
        before = donor.group.exchanges
        same(alone, home, 2)
        assert donor.group.exchanges == before
    assert not broken


@pytest.mark.parametrize(("fault", "limit_s"), [("die", PATIENCE_S), ("freeze", LIMIT_S)])
def test_a_donor_that_dies_or_freezes_inside_a_layer_costs_one_repeated_step(
    fault: str, limit_s: float
) -> None:
    """The kernel closes a dead donor's connection: the home does not wait for the deadline."""
    alone, home = engine_with_session(), engine_with_session()
    broken: list[tuple[Exception, float]] = []
    with donor_process(limit_s) as donor:
        borrow(home, donor, lambda error: broken.append((error, time.monotonic())))
        same(alone, home, 1)
        # Two exchanges of each of the model's layers make a forward: this one is inside of it.
        inside = donor.group.exchanges + 2 * home.config.num_layers
        (donor.die_in_exchange if fault == "die" else donor.freeze_in_exchange)(inside)
        began = time.monotonic()
        same(alone, home, 3)
        assert [type(error) for error, _ in broken] == [PartnerLostError]
        # Far more than the three chunks take before, also on a busy machine.
        assert broken[0][1] - began < LIMIT_S + 60.0
        # The group is of no more use: it says so at once instead of waiting again.
        assert donor.group.closed
        with pytest.raises(PartnerLostError, match="closed"):
            donor.group((), ())


def test_a_forward_breaks_whose_exchanges_take_too_long_together() -> None:
    """Each of them is within its limit: the other worker is slow, and not frozen."""
    store, limit_s, calls = HashStore(), 1.0, 4
    with ThreadPoolExecutor(2) as pool:
        making = [pool.submit(GlooGroup, store, rank, bytes(32), "slow", 60.0, limit_s) for rank in (0, 1)]
        home, donor = (one.result() for one in making)

        def is_slow() -> None:
            with suppress(PartnerLostError):
                for _ in range(calls):
                    time.sleep(0.4 * limit_s)
                    home((torch.ones(1),), ())

        def takes_part() -> None:
            with donor.one_forward():
                for _ in range(calls):
                    donor((), (torch.zeros(1),))

        running = pool.submit(is_slow)
        with pytest.raises(PartnerLostError):
            takes_part()
        assert donor.closed
        running.result()


@pytest.mark.parametrize(("before", "loans_each"), [(10, 20), pytest.param(20, 50, marks=pytest.mark.soak)])
def test_many_loans_leave_no_memory_behind(before: int, loans_each: int) -> None:
    alone, home = engine_with_session(), engine_with_session()
    broken: list[Exception] = []
    with donor_process(PATIENCE_S) as donor:

        def loans(count: int) -> tuple[int, int]:
            for number in range(count):
                borrow(home, donor, broken.append, number)
                began = donor.group.exchanges
                while donor.group.exchanges == began:
                    home.step(time.monotonic())
                parallel_of(home).return_donor()
            donor.sent_bytes()
            here, there = (psutil.Process(pid).memory_info().rss for pid in (os.getpid(), donor.pid))
            return here, there

        loans(before)
        resident = [loans(1), loans(loans_each), loans(loans_each)]
        last = chunks(home, 1)[0]
        expected = chunks(alone, last.index + 1)[-1]
        torch.testing.assert_close(expected.latents, last.latents, atol=1e-5, rtol=1e-5)
    assert not broken
    # What is left behind grows with each loan. Memory that an allocator takes once does not.
    grown = [
        min(later - earlier for earlier, later in itertools.pairwise(process))
        for process in zip(*resident, strict=True)
    ]
    # A fifth of what so many loans would leave behind if each kept its part of the keys and values.
    kept = parallel_of(home).lent_memory().allocated_bytes
    assert max(grown) < loans_each / 5 * kept, (grown, kept)
