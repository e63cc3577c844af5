"""The virtual device takes the declared time of each chunk's configuration."""

from __future__ import annotations

import pytest

from turboserve.simulation.runtime.device.backend import DTYPE, VirtualReplica
from turboserve.simulation.runtime.device.clock import DeviceClock
from turboserve.simulation.runtime.device.faults import DeviceFaults
from turboserve.simulation.runtime.device.profile import DeviceProfile
from turboserve.simulation.runtime.loop import VirtualLoop
from turboserve.simulation.service import HostClock
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.fidelity import Fidelity
from turboserve.worker.engine.interface import EngineOptions, Event, SessionSpec
from turboserve.worker.engine.memory import SlabLayout

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
