from __future__ import annotations

import io
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from rich.console import Console

from turboserve.bench.report import BenchError
from turboserve.bench.stream import Target, prompts, table
from turboserve.bench.streaming.measurement import Measurement, SessionMeasurement, summary
from turboserve.bench.streaming.received import PromptSwitch, Received
from turboserve.bench.streaming.rest import LIMITS
from turboserve.bench.streaming.transports import processor_time_s, ratios
from turboserve.bench.streaming.viewer import Viewer
from turboserve.gateway.serving.settings import ServerSettings


def test_summaries_interpolate() -> None:
    assert summary([]) == {"p50": None, "p95": None}
    assert summary([3.0, 1.0, 2.0], largest=True) == {"p50": 2.0, "p95": 2.9, "max": 3.0}


def test_an_idle_connection_is_dropped_before_the_gateway_closes_it() -> None:
    """Incident: a request on a connection that the gateway just closed ended the benchmark with ReadError."""
    kept_s = ServerSettings.model_fields["keep_alive_s"].default
    assert LIMITS.keepalive_expiry is not None
    assert LIMITS.keepalive_expiry < kept_s - 1.0


def shown(report: dict[str, Any]) -> str:
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(table(report))
    return console.export_text()


def watched(session: str, delays_s: list[float], greeted_at: float) -> SessionMeasurement:
    viewer = Viewer(httpx.AsyncClient(), session, greeted_at=greeted_at)
    for index, delay_s in enumerate(delays_s):
        start_s = index * 0.75
        viewer.player.arrived(index, start_s, start_s + 0.75, 10.0 + start_s)
        viewer.chunks.append(
            Received(
                index, 1, "w", 0, start_s, start_s + 0.75, 100 + start_s, 100 + start_s + delay_s, 9, b"", b""
            )
        )
    switch = PromptSwitch("event", 1, 11.0, 11.1, 2)
    return SessionMeasurement(viewer, 9.5, switch, applied_s=12.0, applied_chunk=4, visible_s=13.0)


def test_the_report_tells_the_gateways_share_from_the_brokers() -> None:
    # Chunk 0 was made before the viewer connected, so its delay does not count.
    one = watched("s", [5.0, 0.03, 0.03, 0.03], greeted_at=100.5)
    measurement = Measurement(10.0, [one], {("s", index): 100 + index * 0.75 + 0.02 for index in range(4)})
    report = measurement.report()
    assert report["gateway_overhead_s"] == {"p50": 0.03, "p95": 0.03}
    assert report["baseline"]["broker_s"]["p50"] == 0.02
    assert report["baseline"]["gateway_share_s"]["p50"] == 0.01
    assert report["baseline"]["ratio_p50"] == 1.5
    assert report["baseline"]["chunks"] == 3
    assert report["ttfc_s"]["p50"] == 0.5
    assert report["interarrival_s"] == {"p50": 0.75, "p95": 0.75, "max": 0.75}
    assert report["prompt_applied_s"]["p50"] == 1.0
    assert report["prompt_applied_chunks"]["p50"] == 2
    assert report["prompt_visible_s"]["p50"] == 2.0
    assert (report["sessions"], report["chunks"], report["chunks_lost"]) == (1, 4, 0)
    json.dumps(report, allow_nan=False)
    assert "latency added by the gateway, ms" in shown(report)


def test_a_report_of_nothing_is_still_an_object() -> None:
    report = Measurement(1.0).report()
    assert report["ttfc_s"] == {"p50": None, "p95": None}
    assert report["baseline"] is None
    json.dumps(report, allow_nan=False)
    assert "chunks_lost" in shown(report)


def test_transports_are_shown_beside_each_other() -> None:
    seen = {"p50": 0.4, "p95": 0.6, "p100": 0.7}
    found = {
        name: {"prompts": 8, "prompt_seen_s": seen, "gateway_cpu_per_viewer_us": cost}
        for name, cost in (("ws", 1500.0), ("whep", None))
    }
    text = shown({"sessions": 2, "seconds": 32.0, "lead_s": 0.75, "transports": found})
    assert "lead 0.75 s" in text
    assert re.search(r"ws +0.4 +0.6 +0.7 +1.5e\+03", text)
    assert re.search(r"whep +0.4 +0.6 +0.7 *$", text, re.MULTILINE)


def test_the_cost_of_webrtc_is_compared_with_that_of_websocket() -> None:
    found = {
        "ws": {"gateway_cpu_per_viewer_us": 8000.0, "gateway_cpu_per_added_us": 500.0},
        "whep": {"gateway_cpu_per_viewer_us": 9000.0, "gateway_cpu_per_added_us": 800.0},
    }
    assert ratios(found) == {"viewer": 1.12, "added": 1.6}
    assert ratios({"whep": found["whep"]}) == {"viewer": None, "added": None}
    # More viewers may seem to cost nothing on a busy machine.
    assert ratios({**found, "ws": {"gateway_cpu_per_added_us": -3.0}}) == {"viewer": None, "added": None}
    seen = {"p50": 0.4, "p95": 0.6, "p100": 0.7}
    shares = {name: {"prompts": 8, "prompt_seen_s": seen, **one} for name, one in found.items()}
    report = {"sessions": 1, "seconds": 8.0, "lead_s": 0.75, "added": 4, "transports": shares}
    text = shown({**report, "webrtc_to_websocket": ratios(shares)})
    assert re.search(r"whep / ws +1.12 +1.6 *$", text, re.MULTILINE)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is rounded")
def test_the_processor_time_of_a_process_is_not_rounded() -> None:
    before = time.process_time()
    used = processor_time_s(psutil.Process())
    assert before <= used <= time.process_time()


def test_neighbouring_sessions_differ_in_both_prompts() -> None:
    everything = [prompt for number in range(8) for prompt in prompts(number)]
    assert len(set(everything)) == len(everything)
    for first, second in map(prompts, range(8)):
        assert first.split()[1] != second.split()[1]


def test_the_stack_is_found_in_its_data_directory(tmp_path: Path) -> None:
    (tmp_path / "stack.json").write_text(json.dumps({"url": "http://127.0.0.1:1", "nats_url": "nats://x"}))
    assert Target.find(tmp_path) == Target("http://127.0.0.1:1", "nats://x")
    with pytest.raises(BenchError, match="turboserve up"):
        Target.find(tmp_path / "elsewhere")
