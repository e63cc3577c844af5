"""A real stack serves the other models that ship: chunks of one latent frame, and the small one."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.helpers import patient_stack
from turboserve.bench.streaming.viewer import Viewer
from turboserve.cli.stack.background import BackgroundStack

pytestmark = pytest.mark.stack

LIMIT_S = 120.0


@pytest.mark.parametrize(
    ("name", "first_s", "chunk_s", "chunks"),
    [
        ("toyworld-live", 1 / 16, 0.25, 20),
        # Two other stacks serve it in every run: those with decode workers, and those with two models.
        pytest.param("toyworld-small", 9 / 16, 0.75, 4, marks=pytest.mark.soak),
    ],
)
async def test_a_stack_serves_the_model_that_its_option_names(
    tmp_path: Path, name: str, first_s: float, chunk_s: float, chunks: int
) -> None:
    options = ("--workers", "1", "--model", name)
    # A worker that can have more sessions also warms up batches.
    environment = {**patient_stack.PATIENT, "TURBOSERVE_WORKER_MAX_SESSIONS": "1"}
    with BackgroundStack(tmp_path / "data", *options, environment=environment) as stack:
        async with httpx.AsyncClient(base_url=stack.url, timeout=60.0) as api:
            [model] = (await api.get("/v1/models")).json()["models"]
            assert model["id"] == name
            assert "triangle" in str(model["prompt_guide"])
            viewer = await Viewer.create(api, "a red circle moving left")
            async with viewer.watching():
                await viewer.more_chunks(chunks, LIMIT_S)
                switch = await viewer.submit("a blue square moving up")
                await viewer.until(
                    lambda: viewer.chunks[-1].control_seq >= switch.control_seq, LIMIT_S, "the prompt"
                )
            await viewer.delete()
    first, *others = viewer.chunks
    assert first.end_s - first.start_s == pytest.approx(first_s, abs=1e-3)
    assert all(chunk.end_s - chunk.start_s == pytest.approx(chunk_s, abs=1e-3) for chunk in others)
