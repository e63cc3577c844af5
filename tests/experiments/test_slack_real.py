"""`turboserve bench slack --real`: the paced device, its load, and what the fidelity policies make of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from turboserve.bench.paced.device import PacedBackend, PacedDevice, PacedModels, paced
from turboserve.bench.report import BenchError
from turboserve.bench.streaming.viewer import Viewer
from turboserve.experiments.slack import real
from turboserve.experiments.slack.real import LOAD, POLICIES, SESSIONS, WORKERS, PacedLoad, paced_profile
from turboserve.experiments.toyworld.quality import held_out_jobs
from turboserve.simulation.runtime.device.profile import DeviceProfile
from turboserve.simulation.streams import StreamPlan, StreamRecord, StreamScale, run_streams
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.fidelity import Fidelity, most_chunks
from turboserve.worker.engine.fidelity_ladder import FidelityLadder, Rung
from turboserve.worker.engine.interface import ChunkReady, EngineOptions, SessionSpec
from turboserve.worker.engine.memory import SlabLayout
from turboserve.worker.model.presets import preset
from turboserve.worker.service.models import load_models
from turboserve.worker.settings import Settings

TOYWORLD = preset("toyworld")
CHUNKS = 40
START_BUFFER_S = 1.5


def test_the_declared_forward_gives_the_declared_load() -> None:
    load = PacedLoad(0.75)
    chunk_s = TOYWORLD.chunk_forwards * load.forward_s
    assert SESSIONS * chunk_s / (WORKERS * 0.75) == pytest.approx(LOAD)
    assert load.multiple == pytest.approx(load.forward_s / 0.0062)


def test_the_paced_profile_has_toyworlds_qualities_and_the_paced_latencies() -> None:
    measured = {each.fidelity: each for each in paced_profile(0.1).measured}
    assert {fidelity.steps for fidelity in measured} == {1, 2, 3, 4}
    best = measured[Fidelity.best(TOYWORLD)]
    assert best.seconds == pytest.approx(0.5)
    assert best.quality == 0.9975
    ladder = FidelityLadder.of_profile(paced_profile(0.1), TOYWORLD)
    assert ladder.rungs[ladder.lowest(None, False)].forwards == pytest.approx(2.0)


def test_a_paced_forward_takes_its_time_and_changes_no_pixel(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    models = paced(load_models(Settings()), PacedDevice({1: 0.5}))

    def backend(models: PacedModels, options: EngineOptions) -> PacedBackend:
        # The clock stands, so that each sleep is the whole declared time.
        return PacedBackend(models, options, models.device, lambda: 0.0, slept.append)

    monkeypatch.setattr(PacedModels, "backend", backend)
    frames = _first_chunk(models)
    # Four denoising steps. The pass over the clean latents may follow.
    assert slept[:4] == [0.5] * 4
    assert set(slept) == {0.5}
    monkeypatch.undo()
    assert torch.equal(frames, _first_chunk(replace(models, device=PacedDevice())))


def _first_chunk(models: PacedModels) -> torch.Tensor:
    slab = SlabLayout.of(TOYWORLD, torch.float32).total_bytes
    engine = Engine(models, EngineOptions(slab_bytes=slab, max_lead_s=30.0))
    engine.admit(SessionSpec("a", "a red circle moving left", 1), 0.0)
    for _ in range(50):
        for event in engine.step(0.0):
            if isinstance(event, ChunkReady):
                return event.frames
    raise AssertionError("no chunk")


@pytest.mark.parametrize("policy", POLICIES)
def test_lower_fidelity_keeps_sessions_in_time_that_stall_without(policy: str) -> None:
    # The services' own code in virtual time, under the load of the real run.
    records = _played(policy)
    assert all(record.complete for record in records)
    stalled = [len(record.stalls) for record in records]
    if policy == "best":
        # A stream of 40 chunks lacks 30 % of 30 s.
        assert min(stalled) > 10
        assert all(6.0 < sum(record.stalls) < 9.0 for record in records)
    else:
        assert stalled == [0] * SESSIONS


def _played(policy: str) -> list[StreamRecord]:
    forward_s = PacedLoad(TOYWORLD.chunk_media_s).forward_s
    config = DeviceProfile().config
    found = FidelityLadder.of_profile(paced_profile(forward_s), TOYWORLD)
    rungs = tuple(
        Rung(Fidelity(rung.fidelity.steps, most_chunks(config)), rung.forwards, rung.quality)
        for rung in found.rungs
    )
    device = DeviceProfile(
        forward_s={size: size * forward_s for size in (1, 2, 4)},
        decode_s={1: 0.01},
        ladder=FidelityLadder(rungs, found.floor),
    )
    slots = SESSIONS // WORKERS
    scale = StreamScale(
        workers=WORKERS,
        most_workers=WORKERS,
        slots=slots,
        device=device,
        worker_settings={"fidelity": policy},
    )
    plans = [StreamPlan(0.01 * number, CHUNKS) for number in range(SESSIONS)]
    records, run = run_streams(1, scale, plans, START_BUFFER_S, 300.0)
    assert run["violations"] == {}, run["messages"]
    return records


def test_a_run_on_a_busy_machine_is_void(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: dict[str, dict[str, Any]] = {
        "best": {"stalls": 9, "void": None},
        "in-time": {"stalls": 0, "void": None},
    }
    monkeypatch.setattr(real, "_run", lambda policy, *rest: runs[policy])
    assert real.run_real(True, 0)["as_expected"] is True
    runs["in-time"]["stalls"] = 1
    assert real.run_real(True, 0)["as_expected"] is False
    runs["in-time"] = {"stalls": 0, "void": real.void_reason(0.2)}
    assert real.run_real(True, 0)["as_expected"] is None
    assert "0.20" in str(real.void_reason(0.2))
    assert real.void_reason(0.25) is None


def test_a_session_without_video_is_an_error() -> None:
    api: Any = None
    with pytest.raises(BenchError, match="session s: no chunk"):
        real.report([Viewer(api, "s")], held_out_jobs(1, 0), {"user": 1.0, "idle": 1.0})
