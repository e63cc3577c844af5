"""`turboserve bench key-press` on a real stack, in a real Chromium."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.browser import NEEDS_CHROMIUM, PATIENT_WEBRTC, SLOW_FRAMES, WAIT_MS, connected
from turboserve.cli.stack.background import BackgroundStack
from turboserve.experiments.key_press import page
from turboserve.experiments.key_press.command import PARTS, measure

pytestmark = NEEDS_CHROMIUM


class PatientBrowser:
    """A browser whose pages do not give WebRTC up on a busy machine, and save its time."""

    def __init__(self, chromium: Any) -> None:
        self._chromium = chromium

    async def new_context(self) -> Any:
        context = await self._chromium.new_context(reduced_motion="reduce")
        await context.add_init_script(PATIENT_WEBRTC)
        await context.add_init_script(SLOW_FRAMES)
        return context


async def test_presses_are_answered_over_both_transports(
    stack: BackgroundStack, browser_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LIMIT_S", "ANSWER_S"):
        monkeypatch.setattr(page, name, WAIT_MS / 1000)
    async with connected(browser_address) as chromium:
        found = await measure(stack.url, ["websocket", "webrtc"], 2, 0, PatientBrowser(chromium))
    json.dumps(found, allow_nan=False)
    assert found["presses"] == 2
    assert found["transports"].keys() == {"websocket", "webrtc"}
    for each in found["transports"].values():
        assert each["shown"] >= 1, each
        assert each["key_to_pixel_s"]["p50"] > 0.0
        assert each["parts_s"].keys() == PARTS.keys()
        parts = {name: figures["p50"] for name, figures in each["parts_s"].items()}
        assert parts["request"] is not None
        assert parts["request"] >= 0.0
        assert parts["chunk"] is not None
        assert parts["chunk"] > 0.0
