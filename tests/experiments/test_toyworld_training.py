"""Training's sequences against sessions: a noisy frame sees in training what it sees when serving."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.transformer import CausalWanTransformer

TRAINING = Path(__file__).parents[2] / "training" / "toyworld"
CONFIG = ModelConfig(
    dim=32,
    ffn_dim=32,
    num_heads=2,
    num_layers=2,
    text_dim=16,
    text_len=8,
    latent_height=8,
    latent_width=8,
    local_attn_size=9,
    sink_size=3,
    rotation="window",
    learned_positions=True,
)
CLIPS = 12
NO_CHANGE, LATEST = 0, 8


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the scripts' modules. Clean frames get no noise, which sessions do not have."""
    monkeypatch.setattr(sys, "path", [str(TRAINING), *sys.path])
    import plans  # type: ignore[import-not-found]
    import rollout  # type: ignore[import-not-found]
    import sequences  # type: ignore[import-not-found]

    monkeypatch.setattr(sequences, "CONTEXT_NOISE", 0.0)
    return SimpleNamespace(plans=plans, rollout=rollout, sequences=sequences)


@pytest.fixture
def model() -> CausalWanTransformer:
    torch.manual_seed(0)
    made = CausalWanTransformer(CONFIG)
    torch.nn.init.normal_(made.head.head.weight, std=0.3)
    torch.nn.init.normal_(made.position_embedding, std=0.3)
    return made.requires_grad_(False).eval()


def clips(starts: bool, change: int, sink_frames: int) -> dict[str, Tensor]:
    sink, main = torch.randn(CLIPS, 3, 16, 8, 8), torch.randn(CLIPS, 12, 16, 8, 8)
    if starts:
        main[:, :sink_frames] = sink[:, :sink_frames]
    return {
        "sink": sink,
        "main": main,
        "starts": torch.full((CLIPS,), starts),
        "change": torch.full((CLIPS,), change),
        "text": torch.randn(CLIPS, 2, 8, 16),
        "steer": torch.randint(-1, 9, (CLIPS, 2)),
    }


def in_sequences(
    training: Any, model: CausalWanTransformer, batch: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the flow of all frames, and the embeddings of both conditions [2, B, 8, 16]."""
    text = training.sequences.conditioned(batch, torch.randn(9, 16))
    memory = training.sequences.SequenceMemory(CONFIG, model.project_text(text), batch, torch.float32)
    flow = model(batch["latents"], batch["timesteps"], batch["frame_index"], memory)
    return flow, text.unflatten(0, (2, CLIPS))


@pytest.mark.parametrize(
    ("starts", "change"), [(True, NO_CHANGE), (True, 1), (True, 3), (True, LATEST), (False, LATEST)]
)
def test_chunks_of_one_frame(training: Any, model: CausalWanTransformer, starts: bool, change: int) -> None:
    given = clips(starts, change, 1)
    batch = training.sequences.Sequences(CONFIG, torch.device("cpu"), 1).of_one(given)
    flow, text = in_sequences(training, model, batch)
    sampler = training.rollout.Sampler(model, dataclasses.replace(CONFIG, frames_per_chunk=1, sink_size=1))
    compared = 0
    for row in range(CLIPS):
        first, last = (each[row : row + 1] for each in text)
        sees_last = bool(batch["second"][row, 0])
        recached_sink = sees_last and (not change or not starts)
        sessions = sampler.open(last if recached_sink else first, 0)
        main, begin = given["main"][row : row + 1], int(batch["frame_index"][row, 2])
        sampler.write(sessions, given["sink"][row : row + 1, :1])
        if not starts:
            if begin + change <= 9:
                continue  # The sink would be recached too.
            sessions.chunk, sessions.latents = begin, [torch.zeros_like(main[:, :1])] * begin
        sessions.text = model.project_text(first if change else last)
        for frame in range(1 if starts else 0, 12):
            if change and frame == change:
                sampler.switch(sessions, last)
            for place in range(13, 24):
                if int(batch["frame_index"][row, place]) != begin + frame:
                    continue
                noisy = batch["latents"][row : row + 1, place : place + 1]
                alone = sampler.flow(sessions, noisy, float(batch["timesteps"][row, place]))
                assert torch.allclose(alone[0, 0], flow[row, place], atol=1e-4), (row, frame, place)
                compared += 1
            sampler.write(sessions, main[:, frame : frame + 1])
    assert compared >= 11


@pytest.mark.parametrize("starts", [True, False])
def test_chunks_of_three_frames(training: Any, model: CausalWanTransformer, starts: bool) -> None:
    given = clips(starts, NO_CHANGE, 3)
    batch = training.sequences.Sequences(CONFIG, torch.device("cpu"), 1).of_three(given)
    flow, text = in_sequences(training, model, batch)
    sampler = training.rollout.Sampler(model, CONFIG)
    for row in range(CLIPS):
        first, last = (each[row : row + 1] for each in text)
        sessions = sampler.open(last if bool(batch["second"][row, 0]) else first, 0)
        main = given["main"][row : row + 1].unflatten(1, (4, 3))
        sampler.write(sessions, given["sink"][row : row + 1])
        begin = int(batch["frame_index"][row, 6]) // 3
        sessions.text = model.project_text(last)
        if not starts:
            sessions.chunk, sessions.latents = begin, [torch.zeros_like(main[:, 0])] * begin
            # Of the window, the sequence lacks what precedes the first clean chunk.
            sampler.write(sessions, main[:, 0])
            del sessions.rolling[:-1]
        for chunk in range(1, 4):
            place = 15 + 3 * (chunk - 1)
            noisy = batch["latents"][row : row + 1, place : place + 3]
            alone = sampler.flow(sessions, noisy, float(batch["timesteps"][row, place]))
            assert torch.allclose(alone[0], flow[row, place : place + 3], atol=1e-4), (row, chunk)
            sampler.write(sessions, main[:, chunk])


def test_plans_have_what_they_state(training: Any) -> None:
    import random

    rng = random.Random(0)
    for draw in (training.plans.draw_of_three, training.plans.draw_of_one):
        changes = set()
        for _ in range(200):
            plan = draw(rng)
            assert len(plan.sink.attributes) == len(plan.sink.places) == 3
            assert len(plan.main.attributes) == len(plan.main.places) == 12
            if plan.starts:
                assert plan.main.places[0] == plan.sink.places[0]
            changes.add(plan.change)
        assert changes == ({0, 1} if draw is training.plans.draw_of_three else set(range(9)))
