"""`turboserve bench roles`: what a session's state takes with and without its decoder's cache."""

from __future__ import annotations

import json
import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from turboserve.bench import roles, roles_paths
from turboserve.bench.report import BenchError
from turboserve.bench.roles_plant import Plant, compared, most_sessions, share_in_time
from turboserve.worker.engine.gather import LatencyProfile
from turboserve.worker.engine.profile_file import ProfileFile
from turboserve.worker.engine.snapshot import fingerprint
from turboserve.worker.model.presets import preset

MODEL = "self-forcing-1-3b"


def test_the_parts_of_a_session_and_how_many_fit(tmp_path: Path) -> None:
    result = roles.run()
    assert json.loads(json.dumps(result)) == result
    for one in result["models"].values():
        session, state = one["session"], one["state"]
        parts = ("slab", "decoder_cache", "latents", "row")
        assert sum(session[part] for part in parts) == session["all"]
        assert session["without_cache"] == session["all"] - session["decoder_cache"]
        assert state["both"] - state["denoise"] == session["decoder_cache"]
        assert one["sessions"]["denoise"] > one["sessions"]["both"] > 0
        # The decoder's cache is a large part of a state of a 1.3 B model.
        assert session["decoder_cache"] > 0.2 * state["both"]
    assert "without it" in [column.header for column in roles.sizes_table(result).columns]


def test_a_profile_gives_the_split(tmp_path: Path) -> None:
    config, file = preset(MODEL), tmp_path / "profile.json"
    stages = {"forward": {1: 0.01, 4: 0.02}, "decode": {1: 0.01}}
    ProfileFile(fingerprint(config), "cuda", stages).write(file)
    split = roles.run(profile=file, memory_gb=30.0)["split"]
    best = split["best"]
    assert best["denoise"] + best["decode"] == split["workers"]
    assert best["sessions"] >= split["all_do_both"]
    assert split["chunks_per_s"]["denoise"] == pytest.approx(4 / 0.02 / config.chunk_forwards)
    theirs = split["neustream"]
    assert theirs["denoise"] + theirs["decode"] == split["workers"]
    # Each batch counts with the whole of its partial SLO.
    assert theirs["chunks_per_s"]["denoise"] < split["chunks_per_s"]["denoise"]
    assert theirs["sessions"] <= best["sessions"]
    assert "NeuStream" in str(roles.sizes_table(roles.run(profile=file, memory_gb=30.0)).caption)


def test_what_cannot_be_computed_says_why(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="--model"):
        roles.run(model="toyworld")
    with pytest.raises(BenchError, match="--decoder"):
        roles.run(decoder="none")
    with pytest.raises(BenchError, match="--profile"):
        roles.run(profile=tmp_path / "none.json")


def test_in_virtual_time_a_split_of_equal_workers_carries_no_more() -> None:
    forward_s = LatencyProfile({1: 0.06, 2: 0.12})
    plant = Plant(forward_s, 5, 0.25, 0.75)
    # A worker has time for one chunk of both stages, for two of the first, for three of the second.
    assert share_in_time(plant, 1, 0, 1) == 1.0
    assert share_in_time(plant, 1, 0, 2) < 0.9
    assert most_sessions(plant, 2, 0, 9) == 2
    assert most_sessions(plant, 1, 1, 9) == 2
    assert most_sessions(plant, 1, 1, 1) == 1
    # Two of three homes' sessions must not meet on one decode worker while the other has none.
    assert most_sessions(plant, 3, 2, 9) == 6
    found = compared(plant, 3, {"both": 9, "denoise": 9, "decode": 9})
    assert found["both"] == 3
    assert [split["sessions"] for split in found["splits"]] == [3, 2]


def test_in_virtual_time_memory_is_what_makes_a_split_carry_more() -> None:
    plant = Plant(LatencyProfile({1: 0.002, 4: 0.008}), 5, 0.01, 0.75)
    found = compared(plant, 3, {"both": 2, "denoise": 4, "decode": 12})
    assert found["both"] == 6
    assert max(split["sessions"] for split in found["splits"]) == 8
    result = roles.run(workers=2, plant=True, decode_s=0.3)
    assert result["plant"]["both"] == 2
    assert "in virtual time: 1.00" in str(roles.sizes_table(result).title)


@contextmanager
def on_a_thread(model: str) -> Iterator[tuple[object, Connection, int]]:
    """A decode worker without the start of another process."""
    ours, theirs = multiprocessing.Pipe()
    running = threading.Thread(target=roles_paths.decode_worker, args=(theirs, model), daemon=True)
    running.start()
    yield running, ours, ours.recv()
    ours.send(False)
    running.join()


def test_a_chunk_s_way_is_measured_on_each_path() -> None:
    found = roles_paths.measured("toyworld", 8, on_a_thread)
    assert list(found["paths"]) == ["tcp", "gloo", "shm"]
    for one in found["paths"].values():
        assert 0 < one["median_s"] <= one["p95_s"]
        assert one["processor_s"] > 0
    assert set(found["to_tcp"]) == {"gloo", "shm"}
    batches = roles_paths.batches(2, rounds=1)
    assert batches["gain"]["1"] == 1
    assert batches["chosen"] in (1, 2)
    shown = roles.table({**roles.run(), "paths": {"toyworld": found}, "batches": batches})
    assert len(shown.renderables) == 3
