"""A real stack serves chunks of one latent frame."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from turboserve.bench.streaming.viewer import Viewer
from turboserve.cli.stack.background import BackgroundStack

pytestmark = pytest.mark.stack

LIMIT_S = 120.0
MODEL = "toyworld-live"


async def test_a_live_session_has_chunks_of_a_quarter_of_a_second(tmp_path: Path) -> None:
    environment = {"TURBOSERVE_MODEL": MODEL, "TURBOSERVE_DEFAULT_MODEL": MODEL}
    with BackgroundStack(tmp_path / "data", "--workers", "1", environment=environment) as stack:
        async with httpx.AsyncClient(base_url=stack.url, timeout=60.0) as api:
            [model] = (await api.get("/v1/models")).json()["models"]
            assert model["id"] == MODEL
            assert "triangle" in str(model["prompt_guide"])
            viewer = await Viewer.create(api, "a red circle moving left")
            async with viewer.watching():
                await viewer.more_chunks(20, LIMIT_S)
                switch = await viewer.submit("a blue square moving up")
                await viewer.until(
                    lambda: viewer.chunks[-1].control_seq >= switch.control_seq, LIMIT_S, "the prompt"
                )
            await viewer.delete()
    first, *others = viewer.chunks
    assert first.end_s - first.start_s == pytest.approx(1 / 16, abs=1e-3)
    assert all(chunk.end_s - chunk.start_s == pytest.approx(0.25, abs=1e-3) for chunk in others)
