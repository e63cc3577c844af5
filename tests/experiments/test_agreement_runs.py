"""Runs that are kept in a folder: a void run is repeated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turboserve.experiments.agreement.command import _KeptRuns


def busy_machine() -> dict[str, Any]:
    return {"void": "0.90 of the CPU busy", "chunks": 1}


def idle_machine() -> dict[str, Any]:
    return {"void": None, "chunks": 2}


def test_void_runs_are_repeated_and_others_kept(tmp_path: Path) -> None:
    folder = _KeptRuns(tmp_path)
    assert folder.get("a run", busy_machine)["chunks"] == 1
    assert folder.get("a run", idle_machine)["chunks"] == 2
    assert len(list(tmp_path.glob("*.void"))) == 1
    [kept] = tmp_path.glob("*.json")
    kept.write_text(kept.read_text().replace('"chunks": 2', '"chunks": 3'))
    assert _KeptRuns(tmp_path).get("a run", idle_machine)["chunks"] == 3
    assert _KeptRuns(tmp_path).get("a run", busy_machine)["chunks"] == 1
