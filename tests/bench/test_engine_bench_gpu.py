"""The script for GPU machines works, on a tiny model, with nothing of ours installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_script_checks_measures_and_writes(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    golden = ROOT / "tests" / "data" / "golden" / "longlive_switch.safetensors"
    command = [sys.executable, str(ROOT / "bench" / "gpu" / "measure.py"), "--tiny", "--repeats", "3"]
    command += ["--chunks", "2", "--batches", "1", "2", "--windows", "6"]
    command += ["--golden", str(golden), "--out", str(out)]
    # Several threads for tensors of a few bytes would only wait for each other on a busy machine.
    one = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=one)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert [(each["dtype"], each["passed"]) for each in found["correctness"]] == [
        ("float32", True),
        ("bfloat16", True),
        ("bfloat16", True),
    ]
    window = found["windows"]["6"]
    assert list(window["batches"]) == ["1", "2"]
    assert list(window["attention"]["varlen"]) == ["1", "2"]
    assert all(batch["chunk_s"] > 0 for batch in window["attention"]["varlen"].values())
    for decoder in ("wan", "taehv"):
        decoded = window["decoded"][decoder]
        assert list(decoded["chunk_of_each_s"]) == list(decoded["overlap_speedup"]) == ["1", "2"]
        assert decoded["moving"]["state_bit_equal"]
        assert decoded["moving"]["video_bit_equal"]
        assert decoded["moving"]["host_bytes_left"] == 0
    assert window["suspend"]["bit_equal"]
    assert window["memory"]["slab_bytes"] == window["memory"]["expected_bytes"]
