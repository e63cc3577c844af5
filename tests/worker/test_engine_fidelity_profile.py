"""Files of measured configurations: the frontier, the choice within a budget, refusals."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turboserve.worker.engine.fidelity import Fidelity
from turboserve.worker.engine.fidelity_profile import (
    FidelityProfile,
    MeasuredFidelity,
    choose_within_budget,
    pareto_frontier,
)
from turboserve.worker.engine.profile_file import ForeignProfileError, InvalidProfileError
from turboserve.worker.model.config import ModelConfig

numbers = st.integers(1, 6).map(lambda n: n / 4)
measurements = st.lists(
    st.builds(
        lambda steps, seconds, quality: MeasuredFidelity(Fidelity(steps, 1), seconds, quality, (0.0, 1.0)),
        st.integers(1, 4),
        numbers,
        numbers,
    ),
    min_size=1,
    max_size=12,
)


def dominates(a: MeasuredFidelity, b: MeasuredFidelity) -> bool:
    as_good = a.seconds <= b.seconds and a.quality >= b.quality
    return as_good and (a.seconds, a.quality) != (b.seconds, b.quality)


@given(measurements)
def test_the_frontier_holds_exactly_what_nothing_dominates(measured: list[MeasuredFidelity]) -> None:
    frontier = pareto_frontier(measured)
    expected = {
        (m.seconds, m.quality) for m in measured if not any(dominates(other, m) for other in measured)
    }
    assert {(m.seconds, m.quality) for m in frontier} == expected
    assert len(frontier) == len(expected)
    assert [m.seconds for m in frontier] == sorted(m.seconds for m in frontier)


@given(measurements, numbers, numbers)
def test_the_choice_keeps_the_floor_then_the_budget_then_the_quality(
    measured: list[MeasuredFidelity], floor: float, budget_s: float
) -> None:
    chosen = choose_within_budget(pareto_frontier(measured), floor, budget_s)
    allowed = [m for m in measured if m.quality >= floor]
    if chosen is None:
        assert not allowed
        return
    assert chosen.quality >= floor
    in_time = [m for m in allowed if m.seconds <= budget_s]
    if in_time:
        assert chosen.seconds <= budget_s
        assert chosen.quality == max(m.quality for m in in_time)
    else:
        assert chosen.seconds == min(m.seconds for m in allowed)


def profile() -> FidelityProfile:
    entries = [((4, 2, 0.0), 0.4, 0.9), ((2, 2, 0.0), 0.2, 0.8), ((2, 1, 0.5), 0.3, 0.5)]
    measured = tuple(MeasuredFidelity(Fidelity(*f), s, q, (q - 0.1, q + 0.1)) for f, s, q in entries)
    return FidelityProfile("model", "cpu", 100, measured)


def test_a_file_is_read_as_it_was_written(tmp_path: Path, tiny_config: ModelConfig) -> None:
    file = tmp_path / "fidelity.json"
    profile().write(file)
    assert FidelityProfile.read(file, tiny_config, model="model", device="cpu") == profile()
    written = json.loads(file.read_text())
    assert written["floor"] == profile().floor == 0.8
    assert [row["frontier"] for row in written["configurations"]] == [True, True, False]


def changed(path: str, value: Any) -> Any:
    def change(content: dict[str, Any]) -> dict[str, Any]:
        inner: Any = content
        *parents, last = path.split(".")
        for name in parents:
            inner = inner[int(name)] if isinstance(inner, list) else inner[name]
        inner[last] = value
        return content

    return change


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("version", 2, "version is 2, must be 1"),
        ("model", "other", "model is 'other', must be 'model'"),
        ("device", "cuda", "device is 'cuda', must be 'cpu'"),
        ("attention", "fp8", "attention is 'fp8', must be 'rows'"),
        ("prompts", 0, "prompts: 0 must be a whole number from 1"),
        ("configurations", [], "configurations: must be a list"),
        ("configurations.1.steps", 5, r"configurations\[1\]: fidelity.steps: 5 must be in 1..4"),
        ("configurations.1.steps", True, r"configurations\[1\].steps: True must be a whole number"),
        ("configurations.0.window_chunks", 3, r"configurations\[0\]: fidelity.window_chunks: 3 must be in"),
        ("configurations.0.sparsity", 1, r"configurations\[0\]: fidelity.sparsity: 1.0 must be"),
        ("configurations.0.sparsity", None, r"configurations\[0\].sparsity: None must be a finite number"),
        ("configurations.0.seconds", 0, r"configurations\[0\].seconds: 0 must be a finite number above 0"),
        ("configurations.0.quality", "good", r"configurations\[0\].quality: 'good' must be a finite"),
        ("configurations.0.interval", [0.9, 0.1], r"configurations\[0\].interval: 0.9 is above 0.1"),
        ("configurations.0.interval", [1], r"configurations\[0\].interval: must be two numbers"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_field(
    tmp_path: Path, tiny_config: ModelConfig, path: str, value: Any, message: str
) -> None:
    file = tmp_path / "fidelity.json"
    profile().write(file)
    file.write_text(json.dumps(changed(path, value)(json.loads(file.read_text()))))
    with pytest.raises(InvalidProfileError, match=message):
        FidelityProfile.read(file, tiny_config, model="model", device="cpu")


def test_a_file_names_its_attention_and_one_of_an_earlier_version_was_measured_with_rows(
    tmp_path: Path, tiny_config: ModelConfig
) -> None:
    file = tmp_path / "fidelity.json"
    fp8 = dataclasses.replace(profile(), attention="fp8")
    fp8.write(file)
    assert FidelityProfile.read(file, tiny_config, model="model", device="cpu", attention="fp8") == fp8
    profile().write(file)
    content = json.loads(file.read_text())
    del content["attention"]
    file.write_text(json.dumps(content))
    assert FidelityProfile.read(file, tiny_config, model="model", device="cpu") == profile()
    assert FidelityProfile.read(file, tiny_config, model="model", device="cpu", attention="cudnn").measured
    with pytest.raises(ForeignProfileError, match="attention is 'rows', must be 'fp8'"):
        FidelityProfile.read(file, tiny_config, model="model", device="cpu", attention="fp8")


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"'])
def test_a_file_that_is_no_object_is_refused(tmp_path: Path, tiny_config: ModelConfig, text: str) -> None:
    file = tmp_path / "fidelity.json"
    file.write_text(text)
    with pytest.raises(InvalidProfileError, match=r"fidelity\.json"):
        FidelityProfile.read(file, tiny_config, model="model", device="cpu")
