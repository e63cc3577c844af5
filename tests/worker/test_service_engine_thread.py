"""The engine's thread: commands in, stamped events out, each with its run."""

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
from turboserve.worker.service import commands, events
from turboserve.worker.service.engine_commands import AdmitRequest, FetchedContext
from turboserve.worker.service.host_platform import EngineThread
from turboserve.worker.service.packager import FromEngine, GeneratedChunk

WAIT_S = 120.0


class EngineHarness:
    """A running engine thread and its deliveries."""

    def __init__(self, thread: EngineThread) -> None:
        self.thread = thread
        self.delivered: queue.SimpleQueue[FromEngine] = queue.SimpleQueue()

    def admit(self, run: int, next_chunk: int = 0, session: str = "a", **rest: Any) -> None:
        admit = commands.Admit(session, run, next_chunk, "a red circle", 7, 0, next_chunk * 0.75)
        self.thread.submit(AdmitRequest(admit, FetchedContext(**rest)))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make the thread take all commands of the body at once, with no chunk between two of them."""
        gate = threading.Event()
        holding = self.thread.call(lambda engine: gate.wait(WAIT_S))
        try:
            yield
        finally:
            gate.set()
        assert holding.result(WAIT_S)

    def next(self, *kinds: type[Any]) -> Any:
        """Return the next event of these kinds; others are dropped."""
        while True:
            item = self.delivered.get(timeout=WAIT_S)
            if isinstance(item, kinds):
                return item


@pytest.fixture
def harness(make_driver: Callable[..., Any]) -> Iterator[EngineHarness]:
    engine = make_driver(slabs=2, max_lead_s=2.0).engine
    started: EngineHarness = EngineHarness(
        EngineThread(engine, lambda item: started.delivered.put(item), SystemClock())
    )
    started.thread.start()
    started.thread.submit(commands.GenerateUntil(math.inf))
    yield started
    started.thread.stop(5.0)
    assert started.thread.failure is None


def test_chunks_carry_the_run_of_their_session(harness: EngineHarness) -> None:
    harness.admit(run=4)
    assert (harness.next(GeneratedChunk).run, harness.next(GeneratedChunk).ready.index) == (4, 1)
    harness.thread.submit(commands.Evict("a", 4))
    harness.admit(run=9)
    made = harness.next(GeneratedChunk)
    while made.run == 4:
        made = harness.next(GeneratedChunk)
    assert (made.run, made.ready.index) == (9, 0)


def test_commands_of_an_earlier_run_mean_nothing(harness: EngineHarness) -> None:
    harness.admit(run=4)
    harness.thread.submit(commands.Evict("a", 3))
    harness.thread.submit(commands.Suspend("a", 3))
    harness.thread.submit(commands.SetPlayhead("a", 4, 60.0, True))
    assert [harness.next(GeneratedChunk).ready.index for _ in range(6)] == [0, 1, 2, 3, 4, 5]


def test_what_there_is_no_slab_for_is_refused(harness: EngineHarness) -> None:
    for number, session in enumerate("abc"):
        harness.admit(run=number, session=session)
    refused = harness.next(events.AdmissionRefused)
    assert (refused.session, refused.run, refused.on_host) == ("c", 2, False)


def test_a_session_goes_to_the_host_and_back_and_a_missing_slab_leaves_it_there(
    harness: EngineHarness,
) -> None:
    harness.admit(run=1)
    harness.next(GeneratedChunk)
    harness.thread.submit(commands.Suspend("a", 1))
    moved = harness.next(events.MovedToHost)
    harness.admit(run=2, session="b")
    harness.admit(run=3, session="c")
    harness.thread.submit(commands.Resume("a", 1, 0.0))
    refused = harness.next(events.AdmissionRefused)
    assert (refused.session, refused.on_host) == ("a", True)
    harness.thread.submit(commands.Evict("b", 2))
    harness.thread.submit(commands.Resume("a", 1, 60.0))
    made = harness.next(GeneratedChunk)
    while made.run != 1:
        made = harness.next(GeneratedChunk)
    assert made.ready.index == moved.next_chunk


def test_a_command_that_a_suspension_overtook_harms_no_session(harness: EngineHarness) -> None:
    """Incident: a playhead under way when the session left its slab failed the session."""
    harness.admit(run=1)
    harness.next(GeneratedChunk)
    harness.thread.submit(commands.Suspend("a", 1))
    moved = harness.next(events.MovedToHost)
    harness.thread.submit(commands.SetPlayhead("a", 1, 0.5, True))
    harness.thread.submit(commands.PauseGeneration("a", 1, 0))
    harness.thread.submit(commands.Resume("a", 1, 60.0))
    made = harness.next(GeneratedChunk, events.RunFailed)
    assert isinstance(made, GeneratedChunk), made
    assert made.ready.index == moved.next_chunk


def test_a_session_without_latents_goes_on_at_its_chunk_with_a_decoder_that_is_warm(
    harness: EngineHarness,
) -> None:
    with harness.held():
        harness.admit(run=1, next_chunk=5)
        # Commands that arrive meanwhile take effect once the session is there.
        harness.thread.submit(commands.SetConditions("a", 1, 3, "a blue square"))
    first = harness.next(GeneratedChunk, events.ControlTookEffect)
    while not isinstance(first, GeneratedChunk):
        first = harness.next(GeneratedChunk, events.ControlTookEffect)
    assert first.ready.index == 5
    assert first.ready.frames.shape[0] == 12
    second = harness.next(GeneratedChunk)
    assert second.ready.index == 6
    assert second.ready.control_seq == 3


def test_a_session_without_latents_can_be_evicted_before_it_is_there(harness: EngineHarness) -> None:
    with harness.held():
        harness.admit(run=1, next_chunk=5)
        harness.thread.submit(commands.Evict("a", 1))
        harness.admit(run=2, session="b")
        harness.admit(run=3, session="c")
    assert {harness.next(GeneratedChunk).run, harness.next(GeneratedChunk).run} <= {2, 3}


def test_latents_of_the_wrong_shape_fail_the_run(harness: EngineHarness) -> None:
    harness.admit(run=1, next_chunk=5, latents=torch.zeros(3, 16, 9, 9))
    failed = harness.next(events.RunFailed)
    assert failed.run == 1
    assert "latents: shape" in failed.reason


def test_nothing_is_made_while_generating_is_stopped(harness: EngineHarness) -> None:
    harness.thread.submit(commands.StopGenerating())
    harness.admit(run=1)
    with pytest.raises(queue.Empty):
        harness.delivered.get(timeout=0.5)
    harness.thread.submit(commands.GenerateUntil(math.inf))
    assert harness.next(GeneratedChunk).ready.index == 0


def test_nothing_is_made_after_the_time_that_was_given(harness: EngineHarness) -> None:
    """A process that was stopped continues with its next step, before any command can stop it."""
    harness.thread.submit(commands.GenerateUntil(time.monotonic()))
    harness.admit(run=1)
    with pytest.raises(queue.Empty):
        harness.delivered.get(timeout=0.5)
    harness.thread.submit(commands.GenerateUntil(math.inf))
    assert harness.next(GeneratedChunk).ready.index == 0


def test_an_abandoned_call_has_no_effect_on_other_calls(harness: EngineHarness) -> None:
    """Incident: a migration that was given up during a step ended the thread, and thus the worker."""
    gate = threading.Event()
    busy = harness.thread.call(lambda engine: gate.wait(WAIT_S))
    given_up = harness.thread.call(lambda engine: 1)
    assert given_up.cancel()
    gate.set()
    assert busy.result(WAIT_S)
    assert harness.thread.call(lambda engine: 2).result(WAIT_S) == 2
