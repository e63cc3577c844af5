"""`turboserve generate` and `turboserve model check`."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import av
import pytest
from typer.testing import CliRunner

from turboserve.cli.clip import chunks_for, fragments
from turboserve.cli.main import app
from turboserve.worker.engine.models import Models
from turboserve.worker.settings import Settings

RUNNER = CliRunner()
TESTS = Path(__file__).parents[1]
REFERENCES = sorted((TESTS / "data" / "golden").glob("*.safetensors"))


def tiny_models() -> Models:
    spec = importlib.util.spec_from_file_location("tiny_worker", TESTS / "worker" / "tiny_worker.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    models: Models = module.tiny_models(Settings())
    return models


def test_a_clip_is_one_playable_file_of_the_length_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "clip.mp4"
    file.write_bytes(b"".join(fragments(tiny_models(), ["one", "two"], 2.7, seed=3)))
    with av.open(str(file)) as container:
        times = [float(frame.time) for frame in container.decode(video=0)]
    # Four chunks have 45 frames: the first is three frames shorter than the others' twelve.
    assert len(times) == 43
    assert times == pytest.approx([n / 16 for n in range(43)])


@pytest.mark.parametrize(("seconds", "frames"), [(0.1, 2), (0.5625, 9), (0.6, 10), (1.3125, 21)])
def test_a_clip_ends_in_its_last_chunk_to_the_frame(tmp_path: Path, seconds: float, frames: int) -> None:
    """Incident: `--seconds 3` gave 3.56 s."""
    file, done = tmp_path / "clip.mp4", []
    parts = fragments(tiny_models(), ["one"], seconds, seed=3, on_frames=lambda *counts: done.append(counts))
    file.write_bytes(b"".join(parts))
    with av.open(str(file)) as container:
        assert len(list(container.decode(video=0))) == frames
    assert done[-1] == (frames, frames)


def test_the_same_seed_gives_the_same_clip() -> None:
    first, again, other = (b"".join(fragments(tiny_models(), ["one"], 1.0, seed)) for seed in (3, 3, 4))
    assert first == again != other


def test_prompts_take_turns_at_the_chunk_that_starts_at_their_second_or_after() -> None:
    def clip(*arguments: object) -> list[bytes]:
        return list(fragments(tiny_models(), *arguments))  # type: ignore[arg-type]

    plain = clip(["one"], 2.7, 3)
    timed = clip(["one", "two"], 2.7, 3, [0.0, 1.0])
    # Chunks start at 0, 0.5625, 1.3125 and 2.0625 seconds; the first part is the init segment.
    assert plain[:3] == timed[:3]
    assert plain[3] != timed[3]
    assert clip(["one", "two"], 2.7, 3, [0.0, 60.0]) == plain


def test_at_least_one_chunk_and_never_too_few() -> None:
    starts = [0.0, 0.5625, 1.3125, 2.0625].__getitem__
    assert [chunks_for(s, starts) for s in (0.1, 0.5625, 0.6, 1.4)] == [1, 1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["", "-o", "x.mp4"], "PROMPT: has 0 characters"),
        (["x" * 2001, "-o", "x.mp4"], "PROMPT: has 2001 characters"),
        (["x", "-o", "/nowhere/x.mp4"], "--output"),
        (["x", "-o", "x.mp4", "--switch", "soon:y"], "--switch: 'soon:y' is not T:PROMPT"),
        (["x", "-o", "x.mp4", "--switch", "-1:y"], "--switch"),
        (["x", "-o", "x.mp4", "--switch", "1:"], "PROMPT: has 0 characters"),
        (["x", "-o", "x.mp4", "--switch", "1:y", "--then", "z"], "--then, --switch"),
    ],
)
def test_what_cannot_be_generated_says_why(arguments: list[str], said: str) -> None:
    result = RUNNER.invoke(app, ["generate", *arguments])
    assert result.exit_code == 1
    assert said in result.output


def test_a_reference_passes_and_is_reported(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    result = RUNNER.invoke(app, ["model", "check", str(REFERENCES[0]), "--json", str(report)])
    assert result.exit_code == 0, result.output
    written = json.loads(report.read_text())
    assert written["passed"] is True
    assert written["max_abs_error"] == max(written["per_chunk"]) <= written["tolerance"]


def test_a_reference_out_of_tolerance_fails(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["model", "check", str(REFERENCES[0]), "--tolerance", "1e-12"])
    assert result.exit_code == 1
    assert "FAILED" in result.output


def test_files_that_are_no_reference_are_errors(tmp_path: Path) -> None:
    text = tmp_path / "x.safetensors"
    text.write_text("hello")
    cut = tmp_path / "cut.safetensors"
    shutil.copy(REFERENCES[0], cut)
    with cut.open("r+b") as opened:
        opened.truncate(1000)
    for file in (text, cut, tmp_path / "missing"):
        result = RUNNER.invoke(app, ["model", "check", str(file)])
        assert result.exit_code == 1
        assert str(file) in result.output.replace("\n", "")
        assert result.exception is None or isinstance(result.exception, SystemExit)
