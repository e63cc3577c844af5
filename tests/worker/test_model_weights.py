"""The digest that distinguishes checkpoints of the same configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from tests.worker.state_page_helpers import FAR, SPEC, copy, frozen
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.errors import SnapshotRejectedError
from turboserve.worker.engine.interface import EngineOptions, Suspended
from turboserve.worker.engine.models import Models
from turboserve.worker.engine.snapshot import state_fingerprint
from turboserve.worker.model import weights
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.toyworld import WEIGHTS
from turboserve.worker.model.weights import weights_digest
from turboserve.worker.replicas.toyworld import load_toyworld


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5))
    made.register_buffer("kept", torch.arange(3))
    made.register_buffer("computed", torch.rand(2), persistent=False)
    return made


def test_equal_weights_have_one_digest_and_any_other_has_another() -> None:
    whole = weights_digest({"a": network(), "b": network(1)})
    assert whole == weights_digest({"b": network(1), "a": network()})
    assert len(whole) == 32
    touched = network()
    with torch.no_grad():
        touched.get_parameter("1.bias")[4] += 1e-7
    others = [
        {"a": touched, "b": network(1)},
        {"a": network(), "b": network(2)},
        {"a": network(1), "b": network()},
        {"a": network(), "c": network(1)},
        {"a": network()},
        {"a": network().bfloat16(), "b": network(1)},
    ]
    found = [weights_digest(one) for one in others] + [weights_digest(others[0] | others[1], "details")]
    assert len({whole, *found}) == 1 + len(found)


def test_large_tensors_are_hashed_in_pieces_of_which_each_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "PIECE_BYTES", 16)
    whole = weights_digest({"a": network()})
    assert whole == weights_digest({"a": network()})
    for index in range(35):
        touched = network()
        with torch.no_grad():
            touched.get_parameter("0.weight").view(-1)[index] += 1.0
        assert weights_digest({"a": touched}) != whole


def test_what_two_names_share_counts_once_and_layout_does_not_matter() -> None:
    tied = nn.ModuleDict({"x": nn.Linear(3, 4, bias=False), "y": nn.Linear(3, 4, bias=False)})
    tied["y"].weight = tied["x"].weight
    alone = nn.ModuleDict({"x": nn.Linear(3, 4, bias=False)})
    alone["x"].weight = nn.Parameter(tied.get_parameter("x.weight").detach().t().contiguous().t())
    assert not alone.get_parameter("x.weight").is_contiguous()
    assert weights_digest({"t": tied}) == weights_digest({"t": alone})


@pytest.mark.parametrize("part", ["transformer", "vae", "text"])
def test_each_network_of_toyworld_counts(part: str, tmp_path: Path) -> None:
    with safe_open(WEIGHTS, framework="pt") as file:
        metadata = file.metadata()
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    name = min(name for name in state if name.startswith(f"{part}.") and state[name].dim() > 1)
    state[name] = state[name].clone()
    state[name].view(-1)[0] += 0.25
    save_file(state, tmp_path / "other.safetensors", metadata)
    shipped, again, other = (
        load_toyworld(),
        load_toyworld(),
        load_toyworld(path=tmp_path / "other.safetensors"),
    )
    assert shipped.weights == again.weights
    assert shipped.fingerprint == again.fingerprint != other.fingerprint
    assert shipped.transformer.config == other.transformer.config


def test_the_fingerprint_covers_the_configuration_too(tiny_config: ModelConfig) -> None:
    other = replace(tiny_config, sink_size=0)
    assert state_fingerprint(tiny_config, "w") != state_fingerprint(other, "w")
    assert state_fingerprint(tiny_config, "w") != state_fingerprint(tiny_config, "v")


@pytest.fixture
def two_checkpoints(make_driver: Callable[..., Any]) -> tuple[Any, Any]:
    """Return two engines with different weights; the first has made two chunks of a session."""
    source, target = make_driver(max_lead_s=FAR), make_driver(max_lead_s=FAR)
    for driver, name in ((source, "one"), (target, "other")):
        models: Models = replace(driver.engine.models, weights=name)
        options: EngineOptions = driver.engine.options
        driver.engine = Engine(models, options, clock=partial(attrgetter("now"), driver))
    source.engine.admit(SPEC, source.now)
    source.chunks("a", 2)
    return source, target


def test_a_running_session_cannot_be_adopted_by_other_weights(two_checkpoints: tuple[Any, Any]) -> None:
    source, target = two_checkpoints
    frozen(source)
    header, pages = source.engine.export_session("a")
    buffer = target.engine.reserve(on_host=False)
    copy(pages, buffer)
    with pytest.raises(SnapshotRejectedError, match="snapshot model"):
        target.engine.import_session(buffer, header, [page.name for page in pages], target.now)
    assert not target.engine.knows("a")


def test_a_suspended_session_cannot_be_adopted_by_other_weights(two_checkpoints: tuple[Any, Any]) -> None:
    source, target = two_checkpoints
    source.engine.suspend("a")
    source.run(lambda events: any(isinstance(event, Suspended) for event in events))
    snapshot = source.engine.snapshot("a")
    with pytest.raises(SnapshotRejectedError, match="snapshot model"):
        target.engine.admit(SPEC, target.now, snapshot)
    source.engine.resume("a", source.now)
