"""The worker `paced`: declared latencies and states, and video that is encoded once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from turboserve.bench.paced.device import PacedBackend, PacedDevice, PacedModels, paced
from turboserve.bench.paced.fragments import shifted
from turboserve.bench.paced.model import CONFIG, load
from turboserve.contracts.errors import InvalidInputError
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.interface import ChunkReady, EngineOptions, SessionSpec
from turboserve.worker.engine.memory import SlabLayout
from turboserve.worker.media import FragmentEncoder
from turboserve.worker.replicas.models import MODELS, ModelOptions

STATE = 1 << 20
DEVICE = PacedDevice({1: 0.2, 2: 0.3}, computes=False, state_bytes=STATE, encodes=False)


def models(device: PacedDevice = DEVICE) -> PacedModels:
    return paced(load(ModelOptions(torch.device("cpu"), torch.float32)), device)


def chunks(monkeypatch: pytest.MonkeyPatch, sessions: int, slept: list[float]) -> list[ChunkReady]:
    def backend(self: PacedModels, options: EngineOptions) -> PacedBackend:
        # The clock stands, so that each sleep is the whole declared time.
        return PacedBackend(self, options, self.device, lambda: 0.0, slept.append)

    monkeypatch.setattr(PacedModels, "backend", backend)
    slab = SlabLayout.of(CONFIG, torch.float32).total_bytes
    engine = Engine(models(), EngineOptions(slab_bytes=sessions * slab, max_lead_s=30.0, overlap=False))
    for number in range(sessions):
        engine.admit(SessionSpec(f"s{number}", "anything", number), 0.0)
    found: list[ChunkReady] = []
    for _ in range(40):
        found += [event for event in engine.step(0.0) if isinstance(event, ChunkReady)]
    return found


def test_the_model_is_installed_by_its_name() -> None:
    assert MODELS.check("paced") == "paced"


def test_forwards_of_a_batch_take_the_declared_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    found = chunks(monkeypatch, 2, slept)
    assert {ready.session for ready in found} == {"s0", "s1"}
    assert set(slept) == {0.3}
    lengths = {ready.index: len(ready.frames) for ready in found}
    assert lengths[0] == 9
    assert lengths[1] == 12


def test_a_state_has_the_declared_bytes() -> None:
    plain, padded = models(PacedDevice()).decoder, models().decoder
    assert padded.cache_bytes - plain.cache_bytes == STATE
    latents = torch.zeros(1, *CONFIG.latent_shape)
    _, first = padded.decode(latents, None)
    _, second = padded.decode(latents, first)
    held = sum(tensor.numel() * tensor.element_size() for tensor in second[0].values())
    assert STATE <= held <= STATE + 8
    assert torch.equal(first[0]["padding"], second[0]["padding"])


def test_a_shifted_fragment_is_what_the_encoder_makes_there() -> None:
    frames = np.full((12, 16, 16, 3), 128, np.uint8)
    encoder = FragmentEncoder()
    at_zero = encoder.encode(frames, index=0, first_frame=0, fps=8).fragment
    for index, first_frame in ((1, 9), (70_000, 840_009)):
        wanted = encoder.encode(frames, index=index, first_frame=first_frame, fps=8).fragment
        assert shifted(at_zero, index, first_frame, 8) == wanted
    assert shifted(wanted, 0, 0, 8) == at_zero


def test_a_device_survives_its_command() -> None:
    assert PacedDevice.from_json(DEVICE.to_json()) == DEVICE


@pytest.mark.parametrize(
    "text", ["", "[]", '{"speed": 1}', '{"forward_s": {"0": 1}}', '{"forward_s": {"1": -1}}']
)
def test_an_unreadable_device_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        PacedDevice.from_json(text)
    error: Any = refused.value
    assert error.field in ("device", "forward_s")
