"""A real stack serves an installed model."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest

from tests.helpers.model_plugin import NAME, install
from tests.helpers.waiting import eventually
from turboserve.bench.streaming.viewer import Viewer
from turboserve.cli.stack.background import BackgroundStack

pytestmark = pytest.mark.stack

LIMIT_S = 120.0


async def test_a_stack_serves_the_documented_model(tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    install(installed)
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(installed), os.environ.get("PYTHONPATH")))),
        "TURBOSERVE_MODEL": NAME,
        "TURBOSERVE_DEFAULT_MODEL": NAME,
    }
    with BackgroundStack(tmp_path / "data", "--workers", "1..2", environment=environment) as stack:
        async with httpx.AsyncClient(base_url=stack.url, timeout=60.0) as api:
            [model] = (await api.get("/v1/models")).json()["models"]
            assert (model["id"], model["default"]) == (NAME, True)
            assert model["prompt_guide"]["examples"] == ["red noise"]
            viewer = await Viewer.create(api, "red noise", keep_video=True)
            async with viewer.watching():
                await viewer.more_chunks(4, LIMIT_S)
            [pool] = (await api.get("/v1/pools")).json()["pools"]

            async def feedback_came() -> bool:
                status = (await api.get(f"/v1/pools/{pool['id']}")).json()
                return status["scaling"]["feedback_age_s"] is not None

            await eventually(feedback_came, LIMIT_S)
            await viewer.delete()
