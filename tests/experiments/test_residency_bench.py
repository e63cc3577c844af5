"""`turboserve bench residency` on small runs of the simulator."""

from __future__ import annotations

import pytest

from turboserve.bench.report import BenchError
from turboserve.experiments.residency import command, virtual
from turboserve.experiments.residency.engine import player
from turboserve.experiments.residency.virtual import SLABS, ResidencyRun, simulate
from turboserve.worker.engine.gather import LatencyProfile


def test_a_worker_serves_more_sessions_than_slabs_without_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "CHUNKS", 24)
    run = ResidencyRun(SLABS + 2, offloads=True, copy_s=0.07, lead_s=3.0, seed=1)
    offloaded = simulate(run)
    assert offloaded.smooth
    assert offloaded.returns > 10
    waiting = simulate(ResidencyRun(SLABS + 2, offloads=False, copy_s=0.07, lead_s=3.0, seed=1))
    assert not waiting.smooth
    assert waiting.returns == 0
    assert waiting.metrics.ttfc_p95_s > 5.0 > offloaded.metrics.ttfc_p95_s
    assert offloaded.violations == waiting.violations == 0


def test_the_device_computes_three_times_as_many_sessions_as_it_has_slabs() -> None:
    device = virtual.device(0.07)
    full_s = (device.denoising + 1) * LatencyProfile(device.forward_s)(SLABS)
    media_s = device.config.chunk_media_s
    assert virtual.CARRIES * full_s / SLABS == pytest.approx(virtual.LOAD * media_s)


def test_the_largest_number_is_the_one_before_the_first_that_stalls() -> None:
    rows = {"4": {"smooth": True}, "5": {"smooth": True}, "6": {"smooth": False}, "7": {"smooth": True}}
    assert command.smooth(rows) == 5
    assert command.smooth({"4": {"smooth": False}}) == 0


def test_a_viewer_stalls_once_for_each_gap() -> None:
    viewer = player()
    viewer.tick(0.0)
    viewer.tick(1.0)
    assert (viewer.stalls, viewer.stall_s) == (0, 0.0)
    viewer.arrived(0, 0.0, 0.75, 1.0)
    for now_s in (1.5, 2.0, 2.25):
        viewer.tick(now_s)
    assert (viewer.stalls, viewer.stall_s, viewer.position_s) == (1, 0.5, 0.75)
    viewer.arrived(1, 0.75, 1.5, 2.25)
    viewer.tick(2.75)
    viewer.tick(3.25)
    assert (viewer.stalls, viewer.stall_s, viewer.position_s) == (2, 0.75, 1.5)


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(BenchError, match="--only: 'fast' is not known; known: virtual, engine"):
        command.run(only="fast")
