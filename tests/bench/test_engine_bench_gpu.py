"""The script for GPU machines works, on a tiny model, with nothing of ours installed."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_script_checks_measures_and_writes(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    golden = ROOT / "tests" / "data" / "golden" / "longlive_switch.safetensors"
    command = [sys.executable, str(ROOT / "bench" / "gpu" / "measure.py"), "--tiny", "--repeats", "3"]
    command += ["--batches", "1", "2", "--windows", "6", "--golden", str(golden), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert [each["passed"] for each in found["correctness"]] == [True, True]
    window = found["windows"]["6"]
    assert list(window["batches"]) == ["1", "2"]
    assert window["suspend"]["bit_equal"]
    assert window["memory"]["slab_bytes"] == window["memory"]["expected_bytes"]
