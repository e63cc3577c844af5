"""The engine's thread: commands in, stamped events out, with the run that they belong to."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from turboserve.clock import SystemClock
from turboserve.worker.service import commands as do
from turboserve.worker.service import inputs as told
from turboserve.worker.service.engine_driver import AdmitWith
from turboserve.worker.service.engine_thread import EngineThread
from turboserve.worker.service.stamped import FromEngine, Made

WAIT_S = 120.0


class Desk:
    """A running engine thread and what it delivered."""

    def __init__(self, thread: EngineThread) -> None:
        self.thread = thread
        self.delivered: queue.SimpleQueue[FromEngine] = queue.SimpleQueue()

    def admit(self, run: int, next_chunk: int = 0, session: str = "a", **rest: Any) -> None:
        admit = do.Admit(session, run, next_chunk, "a red circle", 7, 0, next_chunk * 0.75)
        self.thread.submit(AdmitWith(admit, **rest))

    @contextmanager
    def held(self) -> Iterator[None]:
        """The thread takes all commands of the body at once: it makes nothing between two of them."""
        gate = threading.Event()
        holding = self.thread.call(lambda engine: gate.wait(WAIT_S))
        try:
            yield
        finally:
            gate.set()
        assert holding.result(WAIT_S)

    def next(self, kind: type[Any]) -> Any:
        """The next event of this kind; others are dropped."""
        while True:
            item = self.delivered.get(timeout=WAIT_S)
            if isinstance(item, kind):
                return item


@pytest.fixture
def desk(make_driver: Callable[..., Any]) -> Iterator[Desk]:
    engine = make_driver(slots=2, max_lead_s=2.0).engine
    desk = Desk(EngineThread(engine, lambda item: desk.delivered.put(item), SystemClock()))
    desk.thread.start()
    desk.thread.submit(do.GenerateUntil(math.inf))
    yield desk
    desk.thread.stop(5.0)
    assert desk.thread.failure is None


def test_chunks_carry_the_run_of_their_session(desk: Desk) -> None:
    desk.admit(run=4)
    assert (desk.next(Made).run, desk.next(Made).ready.index) == (4, 1)
    desk.thread.submit(do.Evict("a", 4))
    desk.admit(run=9)
    made = desk.next(Made)
    while made.run == 4:
        made = desk.next(Made)
    assert (made.run, made.ready.index) == (9, 0)


def test_commands_of_an_earlier_run_mean_nothing(desk: Desk) -> None:
    desk.admit(run=4)
    desk.thread.submit(do.Evict("a", 3))
    desk.thread.submit(do.Suspend("a", 3))
    desk.thread.submit(do.SetPlayhead("a", 4, 60.0, True))
    assert [desk.next(Made).ready.index for _ in range(6)] == [0, 1, 2, 3, 4, 5]


def test_what_there_is_no_slab_for_is_refused(desk: Desk) -> None:
    for number, session in enumerate("abc"):
        desk.admit(run=number, session=session)
    refused = desk.next(told.AdmissionRefused)
    assert (refused.session, refused.run, refused.on_host) == ("c", 2, False)


def test_a_session_goes_to_the_host_and_back_and_a_missing_slab_leaves_it_there(desk: Desk) -> None:
    desk.admit(run=1)
    desk.next(Made)
    desk.thread.submit(do.Suspend("a", 1))
    moved = desk.next(told.MovedToHost)
    desk.admit(run=2, session="b")
    desk.admit(run=3, session="c")
    desk.thread.submit(do.Resume("a", 1, 0.0))
    refused = desk.next(told.AdmissionRefused)
    assert (refused.session, refused.on_host) == ("a", True)
    desk.thread.submit(do.Evict("b", 2))
    desk.thread.submit(do.Resume("a", 1, 60.0))
    made = desk.next(Made)
    while made.run != 1:
        made = desk.next(Made)
    assert made.ready.index == moved.next_chunk


def test_a_command_that_a_suspension_overtook_harms_no_session(desk: Desk) -> None:
    """A viewer's playhead that was on its way when the session left its slab once failed the session."""
    desk.admit(run=1)
    desk.next(Made)
    desk.thread.submit(do.Suspend("a", 1))
    moved = desk.next(told.MovedToHost)
    desk.thread.submit(do.SetPlayhead("a", 1, 0.5, True))
    desk.thread.submit(do.Halt("a", 1, 0))
    desk.thread.submit(do.Resume("a", 1, 60.0))
    made = desk.next((Made, told.RunFailed))
    assert isinstance(made, Made), made
    assert made.ready.index == moved.next_chunk


def test_a_session_without_latents_goes_on_at_its_chunk_with_a_decoder_that_is_warm(desk: Desk) -> None:
    with desk.held():
        desk.admit(run=1, next_chunk=5)
        # What arrives meanwhile takes effect once the session is there.
        desk.thread.submit(do.SetPrompt("a", 1, 3, "a blue square"))
    first = desk.next((Made, told.ControlTaken))
    while not isinstance(first, Made):
        first = desk.next((Made, told.ControlTaken))
    assert first.ready.index == 5
    assert first.ready.frames.shape[0] == 12
    second = desk.next(Made)
    assert second.ready.index == 6
    assert second.ready.control_seq == 3


def test_a_session_without_latents_can_be_evicted_before_it_is_there(desk: Desk) -> None:
    with desk.held():
        desk.admit(run=1, next_chunk=5)
        desk.thread.submit(do.Evict("a", 1))
        desk.admit(run=2, session="b")
        desk.admit(run=3, session="c")
    assert {desk.next(Made).run, desk.next(Made).run} <= {2, 3}


def test_latents_of_the_wrong_shape_fail_the_run(desk: Desk) -> None:
    desk.admit(run=1, next_chunk=5, latents=torch.zeros(3, 16, 9, 9))
    failed = desk.next(told.RunFailed)
    assert failed.run == 1
    assert "latents: shape" in failed.reason


def test_nothing_is_made_while_generating_is_stopped(desk: Desk) -> None:
    desk.thread.submit(do.StopGenerating())
    desk.admit(run=1)
    with pytest.raises(queue.Empty):
        desk.delivered.get(timeout=0.5)
    desk.thread.submit(do.GenerateUntil(math.inf))
    assert desk.next(Made).ready.index == 0


def test_nothing_is_made_after_the_time_that_was_given(desk: Desk) -> None:
    """A process that stood still goes on with its next step, before anyone can tell it to stop."""
    desk.thread.submit(do.GenerateUntil(time.monotonic()))
    desk.admit(run=1)
    with pytest.raises(queue.Empty):
        desk.delivered.get(timeout=0.5)
    desk.thread.submit(do.GenerateUntil(math.inf))
    assert desk.next(Made).ready.index == 0


def test_a_call_that_nobody_waits_for_any_more_harms_nobody(desk: Desk) -> None:
    """A move that was given up while the engine was in a step ended the thread, and so the worker."""
    gate = threading.Event()
    busy = desk.thread.call(lambda engine: gate.wait(WAIT_S))
    given_up = desk.thread.call(lambda engine: 1)
    assert given_up.cancel()
    gate.set()
    assert busy.result(WAIT_S)
    assert desk.thread.call(lambda engine: 2).result(WAIT_S) == 2
