"""Loans of a device: a lent worker's own sessions are never late because of one, and one that breaks costs a
forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import pytest

from tests.simulation.loan_host import LoanHost
from tests.simulation.simulate_plants import is_found
from turboserve.simulation import streams
from turboserve.simulation.faults import CALM, Faults
from turboserve.simulation.mechanisms import EXCHANGE_LIMITS_S, HOST_WORKERS, Mechanisms, with_mechanisms
from turboserve.simulation.runtime.device.loans import VirtualGroup, VirtualLentForward, VirtualLoans
from turboserve.simulation.runtime.device.profile import DeviceProfile
from turboserve.simulation.runtime.process import current
from turboserve.simulation.scenario import run_scenario, scale_of
from turboserve.simulation.settings import Scale
from turboserve.simulation.slow_devices import FORWARDS_OF
from turboserve.simulation.streams import StreamPlan, StreamScale, run_streams
from turboserve.simulation.world import World
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.playout import Playout
from turboserve.worker.engine.sequence_parallel import ForwardSpec
from turboserve.worker.sequence_parallel import policy

SECONDS = 10.0
LIMITS_S = (0.1, 0.5, 0.8)
"""Longest times of one exchange; the second is the shipped one."""


def late_because_of_loans(
    seeds: range, limit_s: float | None = None, breaks: float | None = None
) -> tuple[dict[int, dict[str, list[int]]], Counter[str]]:
    """Return the late chunks of donors whose sessions are in time without loans, and what took place."""
    counts: Counter[str] = Counter()
    found = {}
    for seed in seeds:
        longest_s = LIMITS_S[seed % 3] if limit_s is None else limit_s
        alone = LoanHost(seed, longest_s, lends=False, breaks=breaks)
        alone.run(SECONDS)
        if alone.late():
            continue
        counts["donors"] += 1
        host = LoanHost(seed, longest_s, breaks=breaks)
        host.run(SECONDS)
        counts.update(host.counts)
        if late := host.late():
            found[seed] = late
    return found, counts


def lends_if(monkeypatch: pytest.MonkeyPatch, rule: Callable[[Iterable[Playout], float], bool]) -> None:
    """Plant another rule by which a donor lends."""
    monkeypatch.setattr(policy, "may_lend", rule)
    monkeypatch.setattr(Engine, "in_time_after", lambda self, now, busy_s: True)


@pytest.mark.parametrize("seeds", [8, pytest.param(32, marks=pytest.mark.soak)])
def test_no_loan_makes_an_own_session_of_the_donor_late(seeds: int) -> None:
    late, counts = late_because_of_loans(range(seeds))
    assert late == {}
    assert counts["donors"] > seeds / 2
    assert min(counts[name] for name in ("loans", "declined", "forwards")) > 0


@pytest.mark.parametrize("seeds", [6, pytest.param(28, marks=pytest.mark.soak)])
def test_neither_does_a_home_or_a_donor_that_breaks_in_the_middle_of_a_layer(seeds: int) -> None:
    late, counts = late_because_of_loans(range(seeds), limit_s=0.3, breaks=1.0)
    assert late == {}
    assert counts["home freezes"] > 0
    assert counts["donor dies"] + counts["donor freezes"] > 0


def test_a_donor_that_always_lends_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lends_if(monkeypatch, lambda shrinking, limit_s: True)
    late, _ = late_because_of_loans(range(7, 8))
    assert late


def test_a_donor_that_does_not_count_the_longest_exchange_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sessions are relaxed, and a home that freezes stops the donor for longer than they can wait."""
    lends_if(monkeypatch, lambda shrinking, limit_s: all(one.tier == "relaxed" for one in shrinking))
    late, counts = late_because_of_loans(range(2, 3), limit_s=0.8, breaks=0.5)
    assert late
    assert counts["home freezes"] > 0


LENDING = Scale(workers=2, most_workers=2, slots=3, gateways=1, host_workers=2)
STUTTERING = Faults(loan_stutters=1.0)
TROUBLED = Faults(
    crash={"worker": 0.03},
    freeze={"worker": 0.03},
    crash_step={"worker": 0.00005},
    lost_request=0.05,
    transfer_fails=0.05,
    loan_breaks=0.2,
    loan_stutters=0.2,
)


def test_loans_under_faults_violate_nothing() -> None:
    counts: Counter[str] = Counter()
    for seed in (7, 9):
        outcome = run_scenario(seed, seconds=12.0, scale=LENDING, faults=TROUBLED)
        assert outcome.violations == {}, outcome.messages
        counts.update(outcome.counts)
    assert min(counts[name] for name in ("loans", "lent_forwards", "lent_beside_own", "broken_forwards")) > 0


def test_a_donor_that_always_lends_is_found_in_a_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    lends_if(monkeypatch, lambda shrinking, limit_s: True)
    assert is_found("loans_harmless", range(20), CALM, scale=LENDING, finds=6)


def test_a_home_that_is_slow_in_each_exchange_is_found_where_the_forward_has_no_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(VirtualGroup, "one_forward", lambda self: nullcontext())
    assert is_found("loans_harmless", range(20), STUTTERING, scale=LENDING, finds=2)


def test_a_share_of_the_seeds_lends_and_the_others_run_as_before() -> None:
    for seed in range(400):
        drawn, without = scale_of(seed), scale_of(seed, may_lend=False)
        assert not without.host_workers
        assert drawn == without or drawn.host_workers
    lending = [scale for scale in map(scale_of, range(400)) if scale.host_workers]
    assert 30 < len(lending) < 100
    # Some lend beside each of the others, and some lend alone.
    for name in ("fidelity", "gather", "rescue_horizon_s", "quality_debt_limit", "host_sessions"):
        assert len({getattr(scale, name) for scale in lending}) > 1, name
    every = with_mechanisms(Scale(), 1, Mechanisms.ALL)
    assert every.host_workers
    assert (every.fidelity, every.gather) == ("in-time", "tiers")
    assert not any(scale_of(seed, Mechanisms.NONE).host_workers for seed in range(60))


def test_seeds_with_loans_alone_use_no_other_mechanism() -> None:
    lending = [scale_of(seed, Mechanisms.LOANS) for seed in range(60)]
    assert {scale.host_workers for scale in lending} == set(HOST_WORKERS)
    assert {scale.exchange_limit_s for scale in lending} == set(EXCHANGE_LIMITS_S)
    assert min(scale.workers for scale in lending) == 2
    assert min(scale.slots for scale in lending) == 3
    for scale in lending:
        used = scale.fidelity, scale.rescue_horizon_s, scale.quality_debt_limit, scale.host_sessions
        assert used == ("best", 0.0, 0.0, 0)


def test_each_device_that_lends_carries_one_session_at_its_floor() -> None:
    """Without that, its sessions are late for ever: a world with such a device cannot settle."""
    slow = 0
    for seed in range(200):
        for mechanisms in (Mechanisms.DRAWN, Mechanisms.ALL, Mechanisms.LOANS):
            scale = scale_of(seed, mechanisms)
            device = scale.profile(1.0)
            lowest = min(FORWARDS_OF.values()) if device.ladder is not None else 1.0
            for member in ("local-0", "local-1"):
                slowdown = scale.slowdown(member)
                slow += slowdown > 1 and mechanisms is Mechanisms.DRAWN
                assert slowdown * lowest * device.chunk_s()[1] <= device.config.chunk_media_s
    assert slow > 0


CHUNKS = 14
DEVICE = DeviceProfile(
    forward_s={1: 0.2, 4: 0.8}, decode_s={1: 0.0}, text_s={1: 0.0}, package_s=0.0, parallel_share=0.55
)
"""A chunk takes a second alone, longer than it plays, and 0.55 s with a donor."""


def play_one_stream(host_workers: int) -> tuple[int, int, dict[str, int]]:
    """Play one stream in a deployment of two workers. Returns chunks, those in time, and the counts."""
    scale = StreamScale(
        workers=2,
        most_workers=2,
        gather="tiers",
        device=DEVICE,
        worker_settings={"max_lead_s": 1e6},
        host_workers=host_workers,
    )
    [record], run = run_streams(1, scale, [StreamPlan(0.0, CHUNKS)], 4.0, 120.0)
    assert run["violations"] == {}, run["messages"]
    return len(record.received), sum(chunk.in_time for chunk in record.received), run["counts"]


def test_a_worker_of_a_whole_deployment_borrows_one_of_its_host() -> None:
    chunks, in_time, counts = play_one_stream(host_workers=2)
    assert (chunks, in_time) == (CHUNKS, CHUNKS)
    assert counts["loans"] > 0
    # The two workers are not on one host.
    chunks, in_time, counts = play_one_stream(host_workers=1)
    assert (chunks, counts["loans"]) == (CHUNKS, 0)
    assert in_time < CHUNKS


@pytest.mark.parametrize("fault", ["donor dies", "donor freezes", "home freezes"])
def test_a_deployment_outlives_a_loan_that_breaks_in_the_middle_of_a_forward(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worlds: list[World] = []
    whole: list[bool] = []
    accepted = 0

    def kept(*given: object) -> World:
        worlds.append(World(*given))  # type: ignore[arg-type]
        return worlds[-1]

    compute, forward = VirtualLentForward.__call__, VirtualLoans.forward

    def noted(self: VirtualLoans, frames: int, seconds: float) -> bool:
        whole.append(forward(self, frames, seconds))
        return whole[-1]

    def breaks(self: VirtualLentForward, spec: ForwardSpec, *, accept: bool = True) -> None:
        nonlocal accepted
        accepted += accept
        if accepted == 5:
            [world], process = worlds, current()
            workers = [service for service in world.running() if service.kind == "worker"]
            [donor] = [service for service in workers if service.process is process]
            [home] = [service for service in workers if service is not donor]
            hit = home if fault == "home freezes" else donor
            action = (lambda: hit.kill("test")) if fault == "donor dies" else (lambda: hit.freeze(3.0))
            world.later(0.02, action)
        compute(self, spec, accept=accept)

    monkeypatch.setattr(streams, "World", kept)
    monkeypatch.setattr(VirtualLentForward, "__call__", breaks)
    monkeypatch.setattr(VirtualLoans, "forward", noted)
    chunks, _, counts = play_one_stream(host_workers=2)
    assert whole[:5] == [True, True, True, True, False]
    assert chunks == CHUNKS
    assert counts["workers"] == 2 + (fault == "donor dies")


def test_settings_of_workers_differ_by_their_names_and_their_host() -> None:
    scale = StreamScale(
        workers=3, most_workers=3, slots=4, host_workers=2, worker_settings={"max_lead_s": 7.0}
    )
    first, second, third = (scale.worker(f"w{number}", f"local-{number}") for number in (0, 1, 2))
    names = {"worker_id": "w0", "pool_member": "local-0", "nats_user": first.nats_user}
    assert {name: getattr(first, name) for name in names} == names
    assert first.max_lead_s == third.max_lead_s == 7.0
    assert second.worker_id == "w1"
    assert second.model_copy(update=names) == first
    assert third.sequence_parallel_directory != first.sequence_parallel_directory
