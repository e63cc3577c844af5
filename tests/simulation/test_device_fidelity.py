"""The virtual device takes the declared time of each chunk's configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from turboserve.simulation.runtime.device.backend import DTYPE, VirtualReplica
from turboserve.simulation.runtime.device.clock import DeviceClock
from turboserve.simulation.runtime.device.faults import DeviceFaults
from turboserve.simulation.runtime.device.packager import VirtualEncoder
from turboserve.simulation.runtime.device.profile import DeviceProfile
from turboserve.simulation.runtime.loop import VirtualLoop
from turboserve.simulation.service import HostClock
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.fidelity import Fidelity
from turboserve.worker.engine.fidelity_ladder import FidelityLadder, Rung
from turboserve.worker.engine.gather import LatencyProfile
from turboserve.worker.engine.interface import EngineOptions, Event, SessionSpec
from turboserve.worker.engine.memory import SlabLayout
from turboserve.worker.service import commands
from turboserve.worker.service.engine_driver import EngineDriver
from turboserve.worker.service.packager import ChunkPackager, FromEngine, PackagedChunk
from turboserve.worker.service.ports import Loaded
from turboserve.worker.service.worker_classes import WorkerClasses

LINEAR = {1: 0.1, 2: 0.2, 4: 0.4}
NOTHING = {1: 0.0}
FULL, WINDOW_1 = Fidelity(4, 3), Fidelity(4, 1)


class Lone:
    """An engine on a virtual device, stepped by hand."""

    def __init__(self, profile: DeviceProfile, fidelities: dict[str, Fidelity | None], gather: str) -> None:
        loop = VirtualLoop(0)
        self.clock = DeviceClock(HostClock(loop))
        replica = VirtualReplica(profile, self.clock, loop, DeviceFaults())
        slab = SlabLayout.of(profile.config, DTYPE).total_bytes
        options = EngineOptions(profile.slabs * slab, max_lead_s=1e6, policy=gather)
        self.engine = Engine(replica, options, self.clock, profile.stages())
        for number, (name, fidelity) in enumerate(fidelities.items(), 1):
            self.engine.admit(SessionSpec(name, "a", number, fidelity=fidelity), self.clock.now)

    def run(self) -> dict[str, float]:
        """Step until nothing is left. Returns the time of each session's last forward of its first chunk."""
        done: dict[str, float] = {}
        for _ in range(200):
            events: list[Event] = self.engine.step(self.clock.now)
            for session in self.engine.sessions.values():
                if session.task is not None and session.task.work.done == session.task.work.total:
                    done.setdefault(session.name, self.clock.now)
            if not events and not self.engine.has_work(self.clock.now):
                break
        return done


def device(**values: object) -> DeviceProfile:
    """Return a device without batching gain, whose sessions end after one chunk."""
    given: dict[str, object] = {
        "forward_s": LINEAR,
        "text_s": NOTHING,
        "decode_s": NOTHING,
        "package_s": 0.0,
        "chunks_of": {1: 1, 2: 1},
    }
    return DeviceProfile(**{**given, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fidelity", "seconds"), [(None, 0.5), (FULL, 0.5), (Fidelity(2, 3), 0.3), (Fidelity(1, 3), 0.2)]
)
@pytest.mark.parametrize("chunk_at_once", [False, True])
def test_a_chunk_takes_as_many_forwards_as_its_configuration(
    fidelity: Fidelity | None, seconds: float, chunk_at_once: bool
) -> None:
    found = Lone(device(chunk_at_once=chunk_at_once), {"a": fidelity}, "fcfs").run()
    assert found == {"a": pytest.approx(seconds)}


def test_a_shorter_window_takes_its_declared_share_of_a_forward() -> None:
    profile = device(forward_shares={(1, 0.0): 0.6})
    assert Lone(profile, {"a": WINDOW_1}, "fcfs").run() == {"a": pytest.approx(0.3)}
    assert Lone(profile, {"a": FULL}, "fcfs").run() == {"a": pytest.approx(0.5)}


def test_a_row_with_fewer_steps_leaves_its_batch_earlier() -> None:
    # Three forwards of both rows take 0.2 s each, then two of one row 0.1 s each.
    found = Lone(device(), {"short": Fidelity(2, 3), "whole": None}, "chunk").run()
    assert found == {"short": pytest.approx(0.6), "whole": pytest.approx(0.8)}


def test_a_session_ends_after_its_declared_chunks() -> None:
    lone = Lone(device(chunks_of={1: 3}), {"a": None}, "fcfs")
    lone.run()
    [session] = lone.engine.sessions.values()
    assert (session.state.next_chunk, session.ended) == (3, True)


SHORT = Fidelity(2, 3)
LADDER = FidelityLadder(
    (Rung(FULL, 5.0, 1.0), Rung(WINDOW_1, 3.5, 0.9, forward_share=0.7), Rung(SHORT, 3.0, 0.85))
)


class Reported:
    """What a worker on a virtual device knows of its latency, chunk by chunk."""

    def __init__(self, fidelities: Mapping[str, Fidelity | None], gather: str = "fcfs") -> None:
        loop, self.faults = VirtualLoop(0), DeviceFaults()
        clock = DeviceClock(HostClock(loop))
        profile = device(chunks_of={}, forward_shares={(1, 0.0): 0.7}, overlaps=False, ladder=LADDER)
        slab = SlabLayout.of(profile.config, DTYPE).total_bytes
        options = EngineOptions(profile.slabs * slab, max_lead_s=1e6, policy=gather)
        replica = VirtualReplica(profile, clock, loop, self.faults)
        self.engine = Engine(replica, options, clock, profile.stages(), LADDER)
        self.classes = WorkerClasses(Loaded(self.engine, profile.chunk_s()), {})
        self.made = 0
        encoder = VirtualEncoder(profile.config, 0.0, clock)
        packager = ChunkPackager(encoder, profile.fps, clock, LatencyProfile(), LADDER)

        def deliver(item: FromEngine) -> None:
            if isinstance(chunk := packager.convert(item), PackagedChunk):
                self.classes.observe(chunk)
                self.made += 1

        self.driver = EngineDriver(self.engine, deliver, lambda: clock.now)
        self.driver.carry_out(commands.GenerateUntil(math.inf))
        for number, (name, fidelity) in enumerate(fidelities.items(), 1):
            self.engine.admit(SessionSpec(name, "a", number, fidelity=fidelity), clock.now)
            self.driver.has_come(name, 1)

    def after(self, chunks: int) -> tuple[float, float]:
        """Make so many chunks. Returns L of a forward and of a chunk."""
        until, size = self.made + chunks, len(self.engine.sessions)
        while self.made < until:
            for event in self.driver.step():
                self.driver.stamp(event)
        return self.engine.forward.profile(size), self.classes.profile(size)


@pytest.mark.parametrize("lowered", [WINDOW_1, SHORT])
def test_a_worker_that_lowers_all_chunks_reports_a_slower_device(lowered: Fidelity) -> None:
    best, low = Reported({"a": None}), Reported({"a": lowered})
    for worker in (best, low):
        assert worker.after(100) == pytest.approx((0.1, 0.5), rel=1e-3)
        worker.faults.slowdown = 2.0
    for _ in range(6):
        expected, found = best.after(5), low.after(5)
        assert found[1] == pytest.approx(expected[1], rel=1e-3)
    assert found[1] > 0.95
    assert found[0] > 0.19


def test_rows_of_different_configurations_leave_a_steady_devices_latency_as_it_is() -> None:
    assert Reported({"a": WINDOW_1, "b": None}, "chunk").after(150) == pytest.approx((0.2, 1.0), rel=1e-2)


@pytest.mark.parametrize("fidelity", [None, WINDOW_1])
def test_chunks_with_another_workers_help_tell_nothing_about_the_device(fidelity: Fidelity | None) -> None:
    """Incident: a worker that borrowed another one at the best configuration reported to be faster."""
    worker = Reported({"a": fidelity})
    before = worker.after(20)
    worker.faults.slowdown = 2.0
    worker.engine.forward.split_at_s = math.inf
    assert worker.after(20)[1] == before[1]
