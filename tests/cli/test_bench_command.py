"""`turboserve bench` and the shared parts of all benchmarks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from turboserve.bench import registry, report
from turboserve.cli.main import app

RUNNER = CliRunner()


async def count(
    sessions: Annotated[int, typer.Option(min=1, help="How many.")] = 2, full: bool = False
) -> dict[str, Any]:
    """Counts."""
    if sessions == 13:
        raise report.BenchError("thirteen is not possible: take fewer")
    return {"counted": sessions, "full": full, "gaps_s": {"p50": 0.5}}


NAMES = (
    "agreement",
    "autoscale",
    "batching",
    "chaos",
    "edge",
    "elastic",
    "engine",
    "fanout",
    "key-press",
    "migration",
    "mixed",
    "paper",
    "placement",
    "report",
    "residency",
    "roles",
    "scale",
    "sequence-parallel",
    "simulate",
    "slack",
    "state-store",
    "stream",
    "toyworld",
    "tracing",
    "weights",
)
"""The benchmarks of this repository's distributions."""


@pytest.fixture(autouse=True)
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a distribution with the benchmarks `count` and `broken`, whose module is missing."""
    metadata = tmp_path / "installed" / "counting-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: counting\nVersion: 1.0\n")
    offered = "count = bench_count\nbroken = bench_broken"
    (metadata / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{offered}\n")
    code = '"""Numbers, counted.\n\nMore."""\nfrom tests.cli.test_bench_command import count as run\n'
    (metadata.parent / "bench_count.py").write_text(code)
    monkeypatch.syspath_prepend(str(metadata.parent))
    monkeypatch.delitem(sys.modules, "bench_count", raising=False)


def test_the_results_are_one_json_object(tmp_path: Path) -> None:
    file = tmp_path / "new" / "results.json"
    result = RUNNER.invoke(app, ["bench", "count", "--sessions", "4", "--full", "--json", str(file)])
    assert result.exit_code == 0, result.output
    written = json.loads(file.read_text())
    assert written["counted"] == 4
    assert written["bench"] == "count"
    assert written["options"] == {"sessions": 4, "full": True}
    assert written["machine"]["cores"] >= 1
    assert "gaps_s.p50" in result.output


def test_its_help_tells_its_options() -> None:
    result = RUNNER.invoke(app, ["bench", "count", "--help"])
    assert result.exit_code == 0
    assert "--sessions" in result.output
    assert "--json" in result.output


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["nope"], 1, "unknown benchmark 'nope'; installed: agreement, autoscale, "),
        (["broken"], 1, "No module named 'bench_broken'"),
        (["count", "--sessions", "0"], 2, "--sessions"),
        (["count", "--sessions", "13"], 1, "take fewer"),
        (["count", "--json", "/proc/nowhere/x.json"], 1, "--json"),
    ],
)
def test_what_cannot_be_run_says_why(arguments: list[str], status: int, said: str) -> None:
    result = RUNNER.invoke(app, ["bench", *arguments])
    assert result.exit_code == status
    assert said in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_without_a_name_all_are_listed(arguments: list[str]) -> None:
    result = RUNNER.invoke(app, ["bench", *arguments])
    assert result.exit_code == 0
    # Lines that begin with a space continue a summary.
    lines = dict(line.split(maxsplit=1) for line in result.output.splitlines() if not line.startswith(" "))
    assert lines["count"].strip() == "Numbers, counted."
    assert lines["broken"].startswith("cannot be imported: ")
    assert {*NAMES, "count", "broken", "benchmark"} == lines.keys()
    # A listing imports no benchmark.
    assert "bench_count" not in sys.modules


def test_the_installed_benchmarks_are_those_of_the_repository() -> None:
    assert {*registry.benchmarks()} == {*NAMES, "count", "broken"}


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_has_a_summary_and_can_be_loaded(name: str) -> None:
    benchmark = registry.find(name)
    assert benchmark.summary.endswith(".")
    assert callable(benchmark.load().run)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 1))
def test_percentiles_lie_within_the_values(values: list[float], share: float) -> None:
    found = report.percentile(values, share)
    assert found is not None
    assert min(values) - 1e-6 <= found <= max(values) + 1e-6


def test_percentiles_of_known_values() -> None:
    assert report.percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert report.percentile([1.0, 2.0], 0.25) == 1.25
    assert report.percentile([], 0.5) is None


WAITING = """
import asyncio, sys
from turboserve.cli import bench

async def run():
    try:
        print("started", flush=True)
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        print("stopped", flush=True)

bench.command("waiting", run, None)()
"""


def test_a_benchmark_that_is_told_to_end_cleans_up() -> None:
    """Otherwise a stack of its own would run on without it."""
    process = subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate()
    assert "stopped\n" in rest
    assert process.returncode == 128 + signal.SIGTERM
