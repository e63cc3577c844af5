"""The simulation: short seeds without a violation, the same trace in every process, and its command."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from collections import Counter
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.simulation.simulate_plants import SHORT_S, warn_if_stale, without_fence
from turboserve.cli.main import app
from turboserve.scheduler.placement.pool import LatencyCurve
from turboserve.simulation import command
from turboserve.simulation.calm import CalmScale, run_calm
from turboserve.simulation.faults import CALM, PROCESSES, Faults
from turboserve.simulation.names import INVARIANTS
from turboserve.simulation.runtime.broker.stream import Stream
from turboserve.simulation.runtime.device.runner import VirtualEngineRunner
from turboserve.simulation.scenario import run_scenario
from turboserve.simulation.world import World
from turboserve.worker.engine.gather import LatencyProfile
from turboserve.worker.engine.interface import Event

EVERYTHING = Faults(
    crash=dict.fromkeys(PROCESSES, 0.05),
    cut=dict.fromkeys(PROCESSES, 0.05),
    lost_request=0.05,
    broker_down=0.05,
    fresh_streams=0.1,
    postgres_down=0.05,
    commit_in_doubt=0.05,
    transfer_fails=0.1,
)
LATER = [pytest.param(first, marks=pytest.mark.soak) for first in range(10_000, 10_048, 6)]


# One of these seeds watches its pool afterwards, and none runs twice.
@pytest.mark.parametrize("first", [10_003, *LATER])
def test_no_seed_violates_anything(first: int) -> None:
    result = command.run(seeds=6, first=first, seconds=SHORT_S)
    assert result["failing"] == []
    assert set(result["violations"]) == set(INVARIANTS)
    assert result["counts"]["chunks"] > 0
    assert result["mode"] == "faults"
    assert result["events_per_cpu_s"] > 0


def test_a_calm_run_migrates_and_ends_its_sessions() -> None:
    outcome = run_scenario(3, faults=CALM)
    assert outcome.violations == {}
    assert outcome.counts["chunks"] > 20
    assert outcome.counts["moves"] > 0
    assert outcome.settled_s is not None


def test_the_same_seed_gives_the_same_trace_in_another_process() -> None:
    """The order of sets differs, so no decision may depend on it. Python prints nothing by itself."""
    seeds = (12, 25)
    code = f"""
from turboserve.simulation.scenario import run_scenario
from turboserve.simulation.world import World
print(*(run_scenario(seed, seconds={SHORT_S}).digest for seed in {seeds}))
"""
    # Strings have other hashes in this process, which has not chosen them.
    chosen = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": chosen},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stderr == ""
    digests = run.stdout.split()
    assert digests == [run_scenario(seed, seconds=SHORT_S).digest for seed in seeds]
    assert len(set(digests)) == len(seeds)


def test_nothing_of_a_run_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of seeds run in one process."""
    worlds: list[weakref.ref[object]] = []
    begin = World.begin

    def begins(self: World) -> None:
        worlds.extend((weakref.ref(self), weakref.ref(self.loop)))
        begin(self)

    monkeypatch.setattr(World, "begin", begins)
    counts = [run_scenario(seed, seconds=SHORT_S, faults=EVERYTHING).counts for seed in (1, 2)]
    assert all(count["kills"] > 0 for count in counts)
    gc.collect()
    assert [world() for world in worlds] == [None] * 4


def test_memory_does_not_grow_with_the_number_of_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run freezes what exists when it begins, so the collector has to find the worlds in between."""
    monkeypatch.setattr(command, "TWICE_EVERY", 3)
    worlds: list[weakref.ref[World]] = []
    alive: list[int] = []
    begin = World.begin

    def begins(self: World) -> None:
        alive.append(sum(world() is not None for world in worlds))
        worlds.append(weakref.ref(self))
        begin(self)

    monkeypatch.setattr(World, "begin", begins)
    gc.collect()
    frozen = gc.get_freeze_count()
    # An automatic collection would depend on the number of objects that exist.
    gc.disable()
    try:
        command.run(seeds=6, first=1, seconds=1.0)
    finally:
        gc.enable()
    assert len(worlds) == 8
    assert max(alive) <= 4
    assert [world() for world in worlds] == [None] * 8
    assert gc.get_freeze_count() == frozen


def test_a_failing_seed_prints_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "_check", without_fence("chunk."))
    # First a seed that finds the fault today: the code under test may change what a seed does.
    seeds = (1, *range(60))
    failed = next(o for o in (run_scenario(seed, seconds=SHORT_S) for seed in seeds) if o.violations)
    warn_if_stale(seeds[0], failed.seed)
    [found] = command.run(seed=failed.seed, seconds=SHORT_S)["failing"]
    assert found["replay"] == f"turboserve bench simulate --seed {failed.seed} --seconds 10 --trace"
    assert tuple(found["messages"]) == failed.messages


def test_a_calm_device_declares_the_latency_of_each_number_of_sessions() -> None:
    """With the latency of one session alone, the scheduler would assume several times that of several."""
    for slots in (1, 2, 4, 8):
        device = CalmScale(slots=slots).profile(load_s=1.0)
        curve, forward = LatencyCurve(device.chunk_s(), slots), LatencyProfile(device.forward_s)
        for sessions in range(1, slots + 1):
            declared = (device.denoising + 1) * forward(sessions) + device.decode_s[1]
            assert curve(sessions) == pytest.approx(declared)


def test_a_calm_deployment_plays_what_it_is_given() -> None:
    """Every session gets its video in real time, and each chunk was viewed once."""
    result = run_calm(seed=1, workers=3, slots=4, sessions=8, seconds=90.0)
    assert not any(result["violations"].values()), result["messages"]
    assert (result["mode"], result["refused"]) == ("calm", 0)
    counts = result["counts"]
    assert counts["sessions"] == 8
    # 30 s of video each at least, in chunks of 0.75 s.
    assert counts["viewed"] > 8 * 30 / 0.75
    assert counts["viewed"] >= counts["chunks"] - counts["sessions"]
    assert result["events_per_cpu_s"] > 0
    assert result["digest"] == run_calm(seed=1, workers=3, slots=4, sessions=8, seconds=90.0)["digest"]


def test_an_engine_may_take_a_step_for_each_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = VirtualEngineRunner._stepped
    steps: Counter[str] = Counter()
    chunks: dict[str, int] = {}
    for kind in ("chunk", "forward"):

        def counted(self: VirtualEngineRunner, events: list[Event], kind: str = kind) -> None:
            steps[kind] += 1
            stepped(self, events)

        monkeypatch.setattr(VirtualEngineRunner, "_stepped", counted)
        result = run_calm(
            seed=1, workers=2, slots=2, sessions=2, seconds=40.0, every_forward=kind == "forward"
        )
        assert not any(result["violations"].values()), result["messages"]
        assert result["engine_step"] == kind
        chunks[kind] = result["counts"]["chunks"]
    assert abs(chunks["forward"] - chunks["chunk"]) <= 4
    assert steps["forward"] > 2 * steps["chunk"] > 0


def test_a_deployment_runs_other_policies_and_no_invariant_is_violated() -> None:
    chosen = {"min-max": "step", "round-robin": "fcfs", "memory-aware": "chunk"}
    for placement, gather in chosen.items():
        result = command.run(seed=3, seconds=SHORT_S, placement=placement, gather=gather)
        assert result["failing"] == []
        assert result["counts"]["chunks"] > 0


def test_each_policy_decides_in_its_own_way() -> None:
    policies = [("min-max", "step"), ("round-robin", "step"), ("min-max", "fcfs"), ("min-max", "chunk")]
    digests = set()
    for placement, gather in policies:
        result = run_calm(1, 2, 4, sessions=6, seconds=30.0, placement=placement, gather=gather)
        assert not any(result["violations"].values()), result["messages"]
        assert (result["placement"], result["gather"]) == (placement, gather)
        digests.add(result["digest"])
    assert len(digests) == len(policies)


def test_an_unknown_policy_is_refused_with_the_names_that_are_installed() -> None:
    with pytest.raises(
        typer.BadParameter, match=r"placement policy 'lifo'.*: min-max, class-blind, fewest-streams, "
    ):
        command.run(placement="lifo")
    with pytest.raises(
        typer.BadParameter, match=r"gather policy 'lifo'.*: step, chunk, earliest-fluid-finish, "
    ):
        command.run(gather="lifo")


@pytest.mark.parametrize(
    "options", [["--seed", "6", "--seconds", "2"], ["--mode", "calm", "--minutes", "0.1"]]
)
def test_the_command_writes_its_results(options: list[str], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    done = CliRunner().invoke(app, ["bench", "simulate", *options, "--json", str(path)])
    assert done.exit_code == 0, done.output
    written = json.loads(path.read_text())
    result = written.get("result", written)
    assert result["mode"] == ("calm" if "calm" in options else "faults")
    assert result["events_per_cpu_s"] > 0


def test_arrivals_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "arrivals.csv"
    path.write_text("arrives_s,plays_s\n8,10\n9,5\n12,20\n")
    result = run_calm(seed=1, workers=2, slots=2, sessions=0, seconds=40.0, arrivals=path)
    assert not any(result["violations"].values()), result["messages"]
    assert result["counts"]["sessions"] == 3
    assert result["counts"]["viewed"] > 20
