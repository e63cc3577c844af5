"""The script for GPU machines works on a tiny model, without TurboServe's packages installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

GENERATOR_BYTES = 5056
"""Bytes of a generator's state on a CPU, which a budget of gigabytes ignores."""
ROOT = Path(__file__).parent.parent.parent


def test_the_script_checks_measures_and_writes(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    golden = ROOT / "tests" / "data" / "golden" / "longlive_switch.safetensors"
    command = [sys.executable, str(ROOT / "bench" / "gpu" / "measure.py"), "--tiny", "--repeats", "1"]
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
    assert all(batch["chunk_s"] > 0 for batch in window["batches"].values())
    # An option that a CPU lacks is reported, and the rest is measured: the fastest option with every batch.
    assert list(window["options"])[:4] == ["rows", "flash", "cudnn", "varlen"]
    assert "unavailable" in window["options"]["cudnn"]
    for refused in (window["options"]["fp8"], window["attention_kernels"]["fp8"], found["shipped_fp8"]):
        assert refused["unavailable"].startswith("AttentionUnavailableError: attention fp8: cpu")
    assert found["digest"]["same_on_the_host"]
    assert window["options"][window["fastest"]]["chunk_s"] > 0
    assert [name for name in window["options"] if name.endswith("compiled")]
    assert window["attention_kernels"]["varlen"]["max_abs_error"] < 1e-5
    for key in ("over_floor", "ring_vs_copy_speedup", "ring_vs_clone_speedup", "floor_s"):
        assert window[key] > 0
    assert window["sessions_at_16_fps"] == 2
    for decoder in ("wan", "taehv"):
        assert list(window["decode_s"][decoder]) == ["1", "2"]
        decoded = window["decoded"][decoder]
        assert list(decoded["chunk_of_each_decoded_one_by_one_s"]) == ["2"]
        assert list(decoded["chunk_of_each_s"]) == list(decoded["overlap_speedup"]) == ["1", "2"]
        assert decoded["moving"]["bytes"] <= decoded["moving"]["expected_bytes"] + 2 * GENERATOR_BYTES
        assert decoded["moving"]["state_bit_equal"]
        assert decoded["moving"]["video_bit_equal"]
        assert decoded["moving"]["host_bytes_left"] == 0
    assert window["suspend"]["bit_equal"]
    assert window["memory"]["slab_bytes"] == window["memory"]["expected_bytes"]


def test_a_call_that_may_not_last_says_what_it_left_out(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    command = [sys.executable, str(ROOT / "bench" / "gpu" / "measure.py"), "--tiny", "--out", str(out)]
    command += ["--parts", "kernels", "speed", "--windows", "6", "--batches", "1", "--limit-s", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    window = json.loads(out.read_text())["windows"]["6"]
    for left_out in (window["attention_kernels"], window["options"]["rows"], window["batches"]["1"]):
        assert left_out == {"not_measured": "out of time"}
    assert "over_floor" not in window
