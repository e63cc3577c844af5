"""Models that other distributions install: the example of the documentation, and models that break a rule."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from typer.testing import CliRunner

from tests.helpers.model_plugin import NAME, blocks, install
from turboserve.cli.main import app
from turboserve.contracts.base import is_id
from turboserve.gateway.prompt_guides import PROMPT_GUIDES, PromptGuide, read_prompt_guides
from turboserve.plugins import PluginLoadError
from turboserve.worker.engine.models import Models
from turboserve.worker.model.transformer import CausalWanTransformer
from turboserve.worker.replicas import models as registry
from turboserve.worker.replicas.contract import ModelContract, ModelContractError
from turboserve.worker.replicas.models import FrameSizeError, InvalidModelError, ModelOptions, load_model
from turboserve.worker.service.models import load_models
from turboserve.worker.settings import Settings

OPTIONS = ModelOptions(torch.device("cpu"), torch.float32)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield tmp_path
    sys.modules.pop("minimal_model", None)


@pytest.fixture
def load(installed: Path) -> Callable[[], Models]:
    return lambda: load_model(NAME, OPTIONS)


def test_the_documented_test_passes(installed: Path) -> None:
    (installed / "test_minimal.py").write_text(blocks("python")[1])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_minimal.py"]
    done = subprocess.run(command, cwd=installed, capture_output=True, text=True, timeout=300, check=False)
    assert f"{len(ModelContract.CHECKS)} passed" in done.stdout, done.stdout


def test_settings_name_an_installed_model_and_refuse_another(installed: Path) -> None:
    assert load_models(Settings(model=NAME)).weights == load_model(NAME, OPTIONS).weights
    assert read_prompt_guides()[NAME].examples == ["red noise"]
    assert all(is_id(name) for name in registry.MODELS.names), "a message refuses any other name"
    with pytest.raises(
        ValidationError, match=r"no model 'other' is installed; installed: toyworld, .*minimal"
    ):
        Settings(model="other")


def test_the_command_runs_every_check(installed: Path, tmp_path: Path) -> None:
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm"}
    command = ["model", "contract", NAME, "--json", str(tmp_path / "found.json")]
    result = CliRunner(env=terminal).invoke(app, command)
    assert result.exit_code == 0, result.output
    assert all(f"checking {each}" in result.stderr for each in ModelContract.CHECKS)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == {
        "model": NAME,
        "passed": True,
        "checks": dict.fromkeys(ModelContract.CHECKS),
    }
    unknown = CliRunner().invoke(app, ["model", "contract", "other"])
    assert unknown.exit_code != 0
    assert "no model 'other' is installed" in unknown.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: None, "its function returned NoneType, not Models"),
        (lambda models: dataclasses.replace(models, weights=""), "Models.weights is empty"),
    ],
)
def test_what_is_no_model_is_refused(
    change: Callable[[Models], object],
    message: str,
    load: Callable[[], Models],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = load()
    monkeypatch.setitem(registry.MODELS._built_in, "broken", lambda _: change(models))
    with pytest.raises(InvalidModelError, match=f"model broken: {message}"):
        load_model("broken", OPTIONS)


def test_the_documented_model_keeps_the_contract_at_another_size(installed: Path) -> None:
    contract = ModelContract(lambda: load_model(f"{NAME}_96x64", OPTIONS))
    for check in ModelContract.CHECKS:
        contract.run(check)
    models = load_models(Settings(model=f"{NAME}_96x64"))
    assert models.transformer.config.frame_size == (96, 64)
    assert models.fingerprint != load_model(NAME, OPTIONS).fingerprint, "states are not exchanged"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (f"{NAME}_64x64", "the model's own"),
        (f"{NAME}_100x64", "patches of 16 pixels"),
        ("toyworld_64x64", "the model's only one, 128x128"),
        ("toyworld_128x128", "the model's own"),
    ],
)
def test_a_size_that_a_model_does_not_offer_is_refused(installed: Path, name: str, reason: str) -> None:
    with pytest.raises(FrameSizeError, match=rf"TURBOSERVE_MODEL: {name}: .*{reason}"):
        load_model(name, OPTIONS)


def test_a_model_that_ignores_the_size_is_refused(
    load: Callable[[], Models], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = load()
    monkeypatch.setitem(registry.MODELS._built_in, "fixed", lambda _: models)
    with pytest.raises(FrameSizeError, match="fixed has frames of 64x64 only"):
        load_model("fixed_96x64", OPTIONS)


def test_a_size_does_not_hide_an_unknown_model() -> None:
    with pytest.raises(ValidationError, match="no model 'wan-900b' is installed"):
        Settings(model="wan-900b_64x64")


def test_a_module_that_cannot_be_imported_is_named_and_its_guide_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path)
    (tmp_path / "minimal_model.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginLoadError, match=r"distribution minimal-model: .*ZeroDivisionError"):
        load_model(NAME, OPTIONS)
    assert NAME in PROMPT_GUIDES.names
    assert NAME not in read_prompt_guides()


class Changed:
    """The text encoder or the decoder of a model, with one method or number replaced."""

    def __init__(self, original: Any, **replaced: Any) -> None:
        self._original = original
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _text(change: Callable[[Tensor, Sequence[str]], Tensor]) -> Callable[[Models], Models]:
    def broken(models: Models) -> Models:
        encode = models.text.encode
        text = Changed(models.text, encode=lambda prompts: change(encode(prompts), prompts))
        return dataclasses.replace(models, text=text)

    return broken


def _decoder(change: Callable[[Any], Any]) -> Callable[[Models], Models]:
    def broken(models: Models) -> Models:
        decode = models.decoder.decode

        def changed(latents: Tensor, caches: Any) -> Any:
            return change((decode(latents, caches), caches))

        return dataclasses.replace(models, decoder=Changed(models.decoder, decode=changed))

    return broken


def _writes_its_cache(call: Any) -> Any:
    (frames, after), before = call
    for cache in before or ():
        cache["last"].zero_()
    return frames, after


def _one_memory(call: Any) -> Any:
    (frames, after), _ = call
    return frames, [after[0] for _ in after]


def _by_batch(call: Any) -> Any:
    (frames, after), _ = call
    return frames // len(after), after


def _one_frame_less(call: Any) -> Any:
    (frames, after), _ = call
    return frames[:, 1:], after


def _new_weights() -> Callable[[Models], Models]:
    digests = iter("abcdefgh")
    return lambda models: dataclasses.replace(models, weights=next(digests))


def _random_text(rows: Tensor, _prompts: Sequence[str]) -> Tensor:
    return rows + torch.rand(1)


@pytest.mark.parametrize(
    ("check", "broken", "message"),
    [
        ("text", _text(lambda rows, _: rows[..., :-1]), "width is 11, not text_dim 12"),
        ("text", _text(lambda rows, prompts: rows * len(prompts)), "a prompt alone differs"),
        ("text", _text(lambda rows, _: rows / 0), "an embedding is not finite"),
        ("decoder", _decoder(_writes_its_cache), "decode changes the caches"),
        ("decoder", _decoder(_one_memory), "caches of two sessions share memory"),
        ("decoder", _decoder(_by_batch), "a session alone differs"),
        ("decoder", _decoder(_one_frame_less), "frames are "),
        ("weights", _new_weights(), "two loads have the digests a and b"),
        ("seeds", _text(_random_text), "two runs of one seed and prompt differ"),
        ("prompts", _text(lambda rows, _: torch.zeros_like(rows)), "the second prompt changed nothing"),
    ],
)
def test_a_model_that_breaks_a_rule_fails_its_check(
    check: str, broken: Callable[[Models], Models], message: str, load: Callable[[], Models]
) -> None:
    contract = ModelContract(lambda: broken(load()))
    with pytest.raises(ModelContractError, match=message) as raised:
        contract.run(check)
    assert raised.value.check == check


def test_a_decoder_with_a_memory_of_its_own_fails_where_its_session_moves(load: Callable[[], Models]) -> None:
    """Frames that count the decoder's calls differ after a suspension: other calls come between."""
    calls = iter(range(10_000))

    def counted(call: Any) -> Any:
        (frames, after), _ = call
        return frames.roll(next(calls), dims=2), after

    contract = ModelContract(lambda: _decoder(counted)(load()))
    for check in ("seeds", "suspension", "migration"):
        with pytest.raises(ModelContractError):
            contract.run(check)


def test_too_small_a_cache_size_fails(load: Callable[[], Models]) -> None:
    def smaller(models: Models) -> Models:
        return dataclasses.replace(models, decoder=Changed(models.decoder, cache_bytes=8))

    with pytest.raises(ModelContractError, match="more than cache_bytes 8"):
        ModelContract(lambda: smaller(load())).run("decoder")


def test_a_model_with_short_sessions_passes(load: Callable[[], Models]) -> None:
    def shorter() -> Models:
        models = load()
        config = dataclasses.replace(models.transformer.config, local_attn_size=-1, sink_size=0, max_frames=9)
        torch.manual_seed(5)
        transformer = CausalWanTransformer(config).requires_grad_(False).eval()
        torch.nn.init.normal_(transformer.head.head.weight, std=0.2)
        return dataclasses.replace(models, transformer=transformer)

    contract = ModelContract(shorter)
    for check in ModelContract.CHECKS:
        contract.run(check)


def test_any_error_of_a_model_is_its_check_s_failure(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("minimal_model")
    monkeypatch.setattr(module.ColorDecoder, "decode", lambda *_: 1 / 0)
    result = CliRunner().invoke(app, ["model", "contract", NAME])
    assert result.exit_code == 1
    assert "text: passed" in result.output
    assert "decoder: ZeroDivisionError" in result.output


@pytest.mark.parametrize("field", ["pattern", "subjects"])
def test_a_guide_that_names_a_missing_kind_is_refused(field: str) -> None:
    guide = PROMPT_GUIDES.load("toyworld")
    assert isinstance(guide, PromptGuide)
    named = {"pattern": "a {texture}", "subjects": ["texture"]}
    with pytest.raises(ValidationError, match=f"{field}: no kind is named texture"):
        PromptGuide.model_validate({**guide.model_dump(), field: named[field]})
