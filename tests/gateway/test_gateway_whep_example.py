"""The documented WebRTC viewer, from the page's own text, in a real Chromium."""

from __future__ import annotations

import json
from typing import Any

from tests.browser.test_player_page import SEES
from tests.gateway.conftest import StartSession
from tests.helpers.browser import NEEDS_CHROMIUM, until
from tests.helpers.document_examples import examples
from tests.helpers.waiting import eventually

pytestmark = NEEDS_CHROMIUM

LOGGED = "console.log(JSON.parse(event.data))"


async def test_the_documented_viewer_watches_and_prompts(
    gateway_url: str, page: Any, start: StartSession
) -> None:
    """Incident: the example sent its prompt before the data channel was open."""
    [code] = [each.text for each in examples("docs/how-to/low-latency.md") if each.kind == "js"]
    assert LOGGED in code
    lines: list[str] = []
    page.on("console", lambda line: lines.append(line.text))
    session = (await start("a red circle"))["id"]
    await page.goto(gateway_url)
    # Its variables are not the page's.
    video = "const video = document.getElementById('video'); video.autoplay = true;"
    script = code.replace(LOGGED, "console.log(event.data)")
    await page.evaluate(f"async (session) => {{ {video} {script} }}", session)
    await until(page, SEES, arg="blue")

    def kinds() -> set[str]:
        return {json.loads(line)["type"] for line in lines if line.startswith("{")}

    # The event may come after the frames of its chunk.
    await eventually(lambda: {"hello", "receipt", "chunk", "prompt.applied"} <= kinds(), what=lines.__str__)
