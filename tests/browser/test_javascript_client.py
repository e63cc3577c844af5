"""The documented examples of the JavaScript client, on pages of another origin, against the whole stack."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.browser import NEEDS_CHROMIUM, until
from tests.helpers.web_server import WebServer
from turboserve.cli.stack.background import BackgroundStack

pytestmark = NEEDS_CHROMIUM

ROOT = Path(__file__).parents[2]
HOW_TO = (ROOT / "docs/how-to/javascript-client.md").read_text()
README = (ROOT / "sdk/js/README.md").read_text()
GATEWAY = "http://127.0.0.1:8080"
[EXAMPLE_PAGE] = re.findall(r"```html\n(.*?)```", HOW_TO, re.DOTALL)
SCRIPT = re.compile(r"^#+ ([^\n]*)\n(?:(?!^#).)*?```js\n(.*?)```", re.DOTALL | re.MULTILINE)
SCRIPTS = {title: code for document in (HOW_TO, README) for title, code in SCRIPT.findall(document)}
SCRIPT_PAGE = """<!doctype html>
<html lang="en"><title>script</title>
<script type="importmap">{"imports": {"turboserve-client": "GATEWAY/page/client/index.js"}}</script>
<script type="module">
CODE
document.title = "done";
</script></html>"""
RED = """() => {
  const { video } = document.querySelector("turboserve-player");
  if (!video?.videoWidth) return 0;
  const canvas = new OffscreenCanvas(video.videoWidth, video.videoHeight);
  const pen = canvas.getContext("2d");
  pen.drawImage(video, 0, 0);
  const { data } = pen.getImageData(0, 0, canvas.width, canvas.height);
  let red = 0;
  for (let n = 0; n < data.length; n += 4) red += data[n] > 140 && data[n + 1] < 100 && data[n + 2] < 100;
  return red / (data.length / 4);
}"""
REPORTED = "(text) => document.querySelector('output').textContent.includes(text)"


async def test_the_example_page_plays_a_session_from_another_origin(
    stack: BackgroundStack, other_site: WebServer, page: Any
) -> None:
    assert EXAMPLE_PAGE.count(GATEWAY) == 2
    text = textwrap.dedent(EXAMPLE_PAGE).replace(GATEWAY, stack.url)
    await page.goto(other_site.page("index.html", text))
    await page.get_by_role("button", name="Pause").click()
    await until(page, REPORTED, arg="the player has no session")
    await page.get_by_role("button", name="Show").click()
    await until(page, f"() => ({RED})() > 0.02")
    await until(page, REPORTED, arg=": a red circle moving left")
    await until(page, REPORTED, arg="tier: ")
    await page.get_by_label("Prompt").fill("a blue square moving up")
    await page.get_by_role("button", name="Show").click()
    await until(page, REPORTED, arg="applied at chunk ")
    await until(page, REPORTED, arg=": a blue square moving up")
    await until(page, f"() => ({RED})() < 0.02")
    await page.get_by_label("Prompt").fill("x" * 3000)
    await page.get_by_role("button", name="Show").click()
    await until(page, REPORTED, arg="(field: prompt, limit: 2000)")
    await page.get_by_role("button", name="Pause").click()
    await until(page, REPORTED, arg=", paused")
    await page.get_by_role("button", name="Resume").click()
    at_s = await page.evaluate("document.querySelector('turboserve-player').playhead")
    await until(page, "(s) => document.querySelector('turboserve-player').playhead > s", arg=at_s + 1)
    await page.get_by_role("button", name="End").click()
    await until(page, REPORTED, arg="ended: terminated")
    await page.get_by_label("Prompt").fill("a green triangle")
    await page.get_by_role("button", name="Show").click()
    await until(page, REPORTED, arg=": a green triangle")
    await page.get_by_role("button", name="End").click()
    assert "undefined" not in await page.locator("output").inner_text()


@pytest.mark.parametrize("title", SCRIPTS)
async def test_a_script_of_the_documents_runs(
    stack: BackgroundStack, other_site: WebServer, page: Any, title: str
) -> None:
    lines: list[str] = []
    page.on("console", lambda line: lines.append(line.text))
    text = SCRIPT_PAGE.replace("CODE", SCRIPTS[title]).replace("GATEWAY", stack.url)
    await page.goto(other_site.page("script.html", text.replace(GATEWAY, stack.url)))
    await until(page, "() => document.title === 'done'")
    assert lines


def test_all_scripts_were_found() -> None:
    assert set(SCRIPTS) == {"Chunks without the element", "Errors", "Recordings", "turboserve-client"}
