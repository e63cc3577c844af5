"""A real stack serves an installed model."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from tests.helpers import patient_stack
from tests.helpers.model_plugin import NAME, install
from tests.helpers.waiting import eventually
from turboserve.bench.streaming.decode import decode
from turboserve.bench.streaming.viewer import Viewer
from turboserve.cli.main import app
from turboserve.cli.stack.background import BackgroundStack

pytestmark = pytest.mark.stack

LIMIT_S = 120.0


async def test_a_stack_serves_the_documented_model(tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    install(installed)
    environment = {
        **patient_stack.PATIENT,
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
            await begins_with_an_image(api, model)
            [pool] = (await api.get("/v1/pools")).json()["pools"]

            async def feedback_came() -> bool:
                status = (await api.get(f"/v1/pools/{pool['id']}")).json()
                return status["scaling"]["feedback_age_s"] is not None

            await eventually(feedback_came, LIMIT_S)
            await viewer.delete()


async def begins_with_an_image(api: httpx.AsyncClient, model: dict[str, Any]) -> None:
    """Check that the video begins with the image that the creation has, and that a broken one fails it."""
    [declared] = [each for each in model["controls"] if each["fixed"]]
    assert declared["name"] == "first_frame"
    assert declared["schema"]["contentMediaType"] == "image/png"
    [red] = declared["schema"]["examples"]
    viewer = await Viewer.create(api, "blue noise", keep_video=True, controls={"first_frame": red})
    async with viewer.watching():
        await viewer.more_chunks(2, LIMIT_S)
    frames = decode(viewer.video()).frames
    first, last = (frames[n].reshape(-1, 3).astype(float) for n in (0, -1))
    assert np.abs(first.mean(0) - (230, 30, 20)).max() < 16, first.mean(0)
    assert first.std(0).max() < 16 < last.std(0).max(), "then comes the model's own noise"
    row = (await api.get(f"/v1/sessions/{viewer.session}")).json()
    assert row["controls"] == {"first_frame": red}
    again = {"name": "first_frame", "value": red}
    refused = await api.post(f"/v1/sessions/{viewer.session}/controls", json=again)
    assert (refused.status_code, refused.json()["limit"]) == (422, "fixed"), refused.text
    await viewer.delete()
    broken = (
        await api.post("/v1/sessions", json={"prompt": "noise", "controls": {"first_frame": "QUJD"}})
    ).json()

    async def failed() -> bool:
        found = (await api.get(broken["links"]["self"])).json()
        return bool(found["phase"] == "failed" and found["reason"].startswith("first chunk: "))

    await eventually(failed, LIMIT_S)


async def test_a_stack_serves_the_documented_model_at_another_size(tmp_path: Path) -> None:
    """The pool of the size starts from zero: admission, placement and the autoscaler know it by its name."""
    installed = tmp_path / "installed"
    install(installed)
    sized = f"{NAME}_96x64"
    environment = {
        **patient_stack.PATIENT,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(installed), os.environ.get("PYTHONPATH")))),
        "TURBOSERVE_MODEL": sized,
        "TURBOSERVE_DEFAULT_MODEL": sized,
        "TURBOSERVE_PRICES": '{"*": 2.5}',
    }
    with BackgroundStack(tmp_path / "data", "--workers", "0..1", environment=environment) as stack:
        async with httpx.AsyncClient(base_url=stack.url, timeout=60.0) as api:
            other = {"prompt": "red noise", "model": NAME, "width": 64, "height": 64}
            refused = await api.post("/v1/sessions", json=other)
            assert refused.status_code == 422, refused.text
            size = {"model": NAME, "width": 96, "height": 64}
            viewer = await Viewer.create(api, "red noise", keep_video=True, **size)
            async with viewer.watching():
                await viewer.more_chunks(3, LIMIT_S)
            [model] = (await api.get("/v1/models")).json()["models"]
            [offered] = model["sizes"]
            assert (model["id"], offered["width"], offered["height"]) == (NAME, 96, 64)
            [kind] = offered["kinds"]
            assert (kind["price_per_worker_hour"], kind["currency"]) == (2.5, "USD")
            assert kind["price_per_session_hour"] == pytest.approx(2.5 / offered["capacity"])
            refused = await api.post("/v1/sessions", json=other)
            assert (refused.json()["field"], refused.json()["limit"]) == ("width", "96x64"), refused.text
            await viewer.delete()
            # The command uses the Python client, which has a loop of its own.
            command = [
                "session",
                "create",
                "red noise",
                "--model",
                NAME,
                "--url",
                stack.url,
                "--json",
                "--size",
            ]
            made = await asyncio.to_thread(CliRunner().invoke, app, [*command, "96x64"])
            session = json.loads(made.stdout)
            assert (session["model"], session["width"], session["height"]) == (NAME, 96, 64), made.output
            wide = CliRunner(env={"COLUMNS": "200"})
            malformed = await asyncio.to_thread(wide.invoke, app, [*command, "96"])
            assert malformed.exit_code != 0
            assert "is not WIDTHxHEIGHT" in malformed.output
            await api.delete(f"/v1/sessions/{session['id']}")
