"""The shipped model does what the first page promises, through the worker's engine."""

from __future__ import annotations

import numpy as np
import pytest

from turboserve.experiments.toyworld import quality, steering
from turboserve.experiments.toyworld.judge import judge
from turboserve.experiments.toyworld.quality import CHUNKS_BEFORE, Job, Played, generate, held_out_jobs
from turboserve.experiments.toyworld.world import Figure, Scene, held_out
from turboserve.worker.engine.models import Models
from turboserve.worker.model.toyworld import WEIGHTS, read_toyworld
from turboserve.worker.replicas.toyworld import load_toyworld

RED = Scene((Figure("circle", "red", "left"),))
BLUE = Scene((Figure("square", "blue", "up"),))


@pytest.fixture(scope="module")
def models() -> Models:
    return load_toyworld("cpu")


def test_the_weights_are_small_and_say_where_they_come_from() -> None:
    world = read_toyworld()
    assert WEIGHTS.stat().st_size <= 14_000_000
    assert set(world.details["provenance"]) == {"transformer", "vae", "text"}
    assert world.config.sink_size > 0
    assert world.config.local_attn_size > world.config.sink_size


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_red_circle_then_a_blue_square(models: Models, seed: int) -> None:
    job = Job(RED, "a red circle moving left", seed, BLUE, "a blue square moving up")
    (played,) = generate(models, [job], 6)
    assert [len(chunk) for chunk in played.chunks] == [9, 12, 12, 12, 12, 12]
    before = judge(np.concatenate(played.chunks[1:CHUNKS_BEFORE]))
    assert before.shapes_match(RED)
    assert before.motions_match(RED)
    assert played.applied == CHUNKS_BEFORE
    after = judge(np.concatenate(played.chunks[CHUNKS_BEFORE + 1 :]))
    assert after.shapes_match(BLUE)
    assert after.motions_match(BLUE)
    assert after.background == before.background == "black"


@pytest.mark.parametrize(
    ("model", "prompts", "steered"),
    [
        ("toyworld", 6, 1),
        pytest.param("toyworld", quality.SAMPLE_PROMPTS, quality.SAMPLE_STEERED, marks=pytest.mark.soak),
        pytest.param(
            "toyworld-small", quality.SAMPLE_PROMPTS, quality.SAMPLE_STEERED, marks=pytest.mark.soak
        ),
    ],
)
def test_held_out_prompts_are_followed_as_often_as_promised(
    model: str, prompts: int, steered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sample of `turboserve bench toyworld` meets its targets, on prompts that training never saw.

    `make test` takes a fifth of the sample. Of the time of a chunk, nothing is checked.
    """
    monkeypatch.setattr(quality, "SAMPLE_PROMPTS", prompts)
    monkeypatch.setattr(quality, "SAMPLE_STEERED", steered)
    monkeypatch.setattr(quality, "TIMED_CHUNKS", 4)
    result = quality.run(full=False, model=model)
    assert result["n_prompts"] == prompts
    assert result["colour_accuracy"] >= 0.95, result["failures"]
    assert result["motion_accuracy"] >= 0.90, result["failures"]
    assert result["switch_accuracy"] >= 0.90, result["failures"]
    assert result["baseline_other_prompts"]["colour_accuracy"] < 0.2
    for name in ("steering", "steering_live"):
        assert result[name]["draws"] == steered * steering.TURNS
        assert result[name]["direction_accuracy"] >= 0.90
    lines = quality.table(result)
    assert "steered within two chunks of one latent frame: direction" in lines


def test_a_session_is_the_same_alone_and_among_others(models: Models) -> None:
    jobs = held_out_jobs(3, 7)
    together = generate(models, jobs, 2)
    (alone,) = generate(models, jobs[1:2], 2)
    for mine, shared in zip(alone.chunks, together[1].chunks, strict=True):
        difference = np.abs(mine.astype(int) - shared.astype(int))
        assert difference.max() <= 2


def test_jobs_are_held_out_fixed_and_change_every_colour() -> None:
    jobs = held_out_jobs(40, 0)
    assert jobs == held_out_jobs(40, 0)
    assert jobs != held_out_jobs(40, 1)
    for job in jobs:
        assert job.after is not None
        assert held_out(job.scene)
        assert held_out(job.after)
        assert not {f.colour for f in job.scene.figures} & {f.colour for f in job.after.figures}


def test_a_switch_that_was_never_applied_does_not_count() -> None:
    job = Job(RED, "", 0, BLUE, "")
    assert not quality._switched(job, Played([np.zeros((12, 64, 64, 3), dtype=np.uint8)] * 6, None))
    assert not quality._switched(job, Played([np.zeros((12, 64, 64, 3), dtype=np.uint8)] * 6, 3))
