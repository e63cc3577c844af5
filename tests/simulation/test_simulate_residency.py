"""More sessions than slabs in whole deployments, also under faults. Planted faults are found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import typer

from tests.simulation.simulate_plants import SHORT_S, is_found
from turboserve.clock import SystemClock
from turboserve.simulation import command
from turboserve.simulation.calm import run_calm
from turboserve.simulation.faults import CALM, Faults
from turboserve.simulation.mechanisms import Mechanisms, with_mechanisms
from turboserve.simulation.runtime.device.arrival import VirtualArrival
from turboserve.simulation.runtime.device.clock import DeviceClock
from turboserve.simulation.scenario import run_scenario, scale_of, with_classes
from turboserve.simulation.settings import Scale
from turboserve.worker.engine.host_transfers import HostTransfers
from turboserve.worker.engine.session import Session
from turboserve.worker.engine.state_transfer import Transfer

CROWDED = Scale(workers=1, most_workers=2, slots=3, host_sessions=2, gateways=1)
BROKEN = Faults(
    crash={"worker": 0.05},
    cut={"worker": 0.05},
    freeze={"worker": 0.05},
    host_full=0.4,
    transfer_fails=0.2,
    device_lost=0.02,
)


def test_sessions_take_turns_in_the_slabs_and_nothing_is_violated() -> None:
    calm = run_scenario(1, seconds=SHORT_S, faults=CALM, scale=CROWDED)
    assert calm.violations == {}, calm.messages
    assert min(calm.counts["offloads"], calm.counts["returns"]) > 5
    assert calm.counts["moves"] > 0


@pytest.mark.parametrize("copy_s", [0.01, 0.3])
def test_under_faults_nothing_is_violated(copy_s: float) -> None:
    returns = 0
    for seed in (1, 3):
        outcome = run_scenario(
            seed, seconds=SHORT_S, faults=BROKEN, scale=replace(CROWDED, state_copy_s=copy_s)
        )
        assert outcome.violations == {}, outcome.messages
        returns += outcome.counts["returns"]
    assert returns > 0


def test_a_calm_deployment_serves_more_sessions_than_slabs_in_real_time() -> None:
    """9 sessions, and 6 slabs."""
    sizes: dict[str, Any] = {"seed": 1, "workers": 3, "slots": 3, "sessions": 9, "seconds": 90.0}
    result = run_calm(**sizes, host_sessions=1)
    assert not any(result["violations"].values()), result["messages"]
    assert (result["refused"], result["host_sessions"]) == (0, 1)
    assert result["counts"]["returns"] > 20
    # Sessions that share slabs get as much video as sessions with a slab each.
    assert result["counts"]["viewed"] > 0.95 * run_calm(**sizes)["counts"]["viewed"]


def test_a_share_of_the_seeds_has_more_sessions_than_slabs() -> None:
    drawn = [scale_of(seed) for seed in range(400)]
    crowded = [scale for scale in drawn if scale.host_sessions]
    assert 30 < len(crowded) < 90
    for scale in crowded:
        device = scale.profile(1.0)
        assert device.slabs + scale.host_sessions == scale.most_sessions
        assert device.slabs >= 1
    assert with_mechanisms(Scale(), 1, Mechanisms.ALL).host_sessions > 0
    assert not any(scale_of(seed, Mechanisms.NONE).host_sessions for seed in range(400))
    for seed, scale in enumerate(drawn):
        # Workers of several classes have no sessions beyond the slabs.
        assert with_classes(scale, seed).host_sessions == 0
        assert with_classes(scale, seed).slots in (1, 2, 3)


def test_a_forward_waits_for_layers_that_are_still_to_arrive() -> None:
    clock = DeviceClock(SystemClock())
    arrival = VirtualArrival("ses_1", 4, clock)
    arrival.takes(clock.now, clock.now + 0.4)
    assert (arrival.begun, arrival.complete) == (False, False)
    clock.advance(0.11)
    assert (arrival.begun, arrival.complete) == (True, False)
    # The last layer is there after 0.29 s, and its part of the forward takes 0.05 s.
    assert arrival.wait_s(0.2) == pytest.approx(0.14)
    # A slow forward comes to the last layer later than the copy.
    assert arrival.wait_s(1.0) == 0.0
    clock.advance(0.3)
    assert arrival.complete


def test_more_host_sessions_than_slots_are_refused() -> None:
    with pytest.raises(typer.BadParameter, match="--host-sessions: 8 must be less than --slots, 8"):
        command.run(mode=command.SimulationMode.CALM, host_sessions=8)


def test_a_state_that_is_not_copied_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session continues from the contents that it left in host memory first."""
    bring, first = HostTransfers.bring, dict[str, Any]()

    def stale(self: HostTransfers, session: Session, host: Any) -> None:
        tensors = first.setdefault(session.name, host.snapshot.tensors)
        bring(self, session, replace(host, snapshot=replace(host.snapshot, tensors=tensors)))

    monkeypatch.setattr(HostTransfers, "bring", stale)
    assert is_found("chunks_contiguous", (0, 2), CALM, scale=CROWDED)


def test_memory_of_offloaded_sessions_that_is_not_free_at_the_end_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrived = HostTransfers._arrived

    def keeps(self: HostTransfers, session: Session, transfer: Transfer) -> None:
        transfer.extent = None
        arrived(self, session, transfer)

    monkeypatch.setattr(HostTransfers, "_arrived", keeps)
    one = Scale(workers=1, most_workers=1, slots=2, host_sessions=1, gateways=1)
    assert is_found("memory_returns", range(4), CALM, scale=one, finds=1)
