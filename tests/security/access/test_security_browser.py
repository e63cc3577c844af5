"""A foreign page in a real Chromium on the gateway's machine, against a gateway without keys."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import httpx
import pytest

from tests.helpers.browser import NEEDS_CHROMIUM, REBOUND, new_page, until
from tests.helpers.pool_harness import Pool
from tests.helpers.waiting import eventually

KEY = "a-key-for-the-page-0123456789"

pytestmark = NEEDS_CHROMIUM

# Each attack resolves to whether it got a readable answer or, for a stream, to the close code.
ATTACKS = """
async ({url, session}) => {
  const base = `${url}/v1/sessions/${session}`;
  const send = (path, options) =>
    fetch(path, options).then((a) => a.type !== "opaque" && a.status, () => "blocked");
  const form = (action, type) => new Promise((done) => {
    const frame = document.createElement("iframe");
    frame.name = `frame-${Math.random()}`;
    frame.onload = () => done("sent");
    const made = document.createElement("form");
    Object.assign(made, {action, method: "post", enctype: type, target: frame.name});
    const input = document.createElement("input");
    input.name = '{"prompt": "theirs", "x": "';
    input.value = '"}';
    made.append(input);
    document.body.append(frame, made);
    made.submit();
  });
  const element = (tag, src) => new Promise((done) => {
    const made = document.createElement(tag);
    made.onloadeddata = made.onload = () => done("shown");
    made.onerror = () => done("blocked");
    made.src = src;
    document.body.append(made);
  });
  const socket = () => new Promise((done) => {
    const made = new WebSocket(`${base.replace("http", "ws")}/stream`);
    const seen = [];
    made.onmessage = ({data}) => seen.push(typeof data === "string" ? JSON.parse(data).type : "binary");
    made.onclose = ({code}) => done({code, seen});
    made.onopen = () => made.send('{"type": "pause"}');
  });
  const text = {method: "POST", mode: "no-cors", headers: {"Content-Type": "text/plain"}};
  return {
    read: await send(`${url}/v1/sessions`),
    json: await send(`${url}/v1/sessions`, {method: "POST", body: '{"prompt": "theirs"}',
                                            headers: {"Content-Type": "application/json"}}),
    text: await send(`${url}/v1/sessions`, {...text, body: '{"prompt": "theirs"}'}),
    pause: await send(`${base}/pause`, {method: "POST", mode: "no-cors"}),
    end: await send(base, {method: "DELETE"}),
    beacon: navigator.sendBeacon(`${base}/pause`, "x"),
    form: await form(`${base}/pause`, "text/plain"),
    encoded: await form(`${url}/v1/sessions`, "application/x-www-form-urlencoded"),
    script: await element("script", `${url}/page/player.js`),
    video: await element("video", `${base}/stream.mp4`),
    socket: await socket(),
  };
}
"""


class _Stranger(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>stranger</title><body></body>")

    def log_message(self, format: str, *args: object) -> None:
        return None


@pytest.fixture(scope="module")
def stranger_port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Stranger)
    Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.fixture
async def page(browser_address: str) -> AsyncIterator[Any]:
    """A page that may log errors: what it attacks refuses it."""
    async with new_page(browser_address) as page:
        yield page


async def test_a_strangers_page_changes_nothing_and_reads_nothing(
    keyless_url: str, stranger_port: int, client: Any, page: Any
) -> None:
    api: httpx.AsyncClient = client(keyless_url)
    session = (await api.post("/v1/sessions", json={"prompt": "a red circle"})).json()
    before = {one["id"] for one in (await api.get("/v1/sessions")).json()["sessions"]}
    # From another site, and from another port of this machine, which a browser calls the same site.
    for origin in (f"http://{REBOUND}:{stranger_port}", f"http://127.0.0.1:{stranger_port}"):
        await page.goto(origin)
        found = await page.evaluate(ATTACKS, {"url": keyless_url, "session": session["id"]})
        readable = {name: found[name] for name in ("read", "json", "end", "script", "video")}
        assert readable == dict.fromkeys(readable, "blocked"), origin
        assert found["text"] in (False, "blocked")
        assert found["pause"] in (False, "blocked")
        # Chromium itself may stop a page of another site before it reaches this machine.
        assert found["socket"]["code"] in (4403, 1006)
        assert set(found["socket"]["seen"]) <= {"error"}
    read = (await api.get(session["links"]["self"])).json()
    # No viewer watches it: it may be idle by now, but neither paused nor ended.
    assert read["activity"] in ("watching", "idle")
    assert read["phase"] in ("requested", "active", "suspended")
    assert read["prompt"] == "a red circle"
    assert {one["id"] for one in (await api.get("/v1/sessions")).json()["sessions"]} == before
    await api.delete(session["links"]["self"])


async def test_a_rebound_name_shows_no_page(keyless_url: str, page: Any) -> None:
    answer = await page.goto(f"http://{REBOUND}:{httpx.URL(keyless_url).port}/")
    assert answer.status == 421
    status = await page.evaluate(
        """() => fetch("/v1/sessions", {method: "POST", body: '{"prompt": "theirs"}',
                       headers: {"Content-Type": "application/json"}}).then((a) => a.status)"""
    )
    assert status == 421


async def refused(api: httpx.AsyncClient) -> dict[str, float]:
    """Return the number of requests without a known key, by reason."""
    found = {}
    for line in (await api.get("/metrics")).text.splitlines():
        if line.startswith("turboserve_gateway_keys_refused_total{"):
            found[line.partition('reason="')[2].partition('"')[0]] = float(line.split()[-1])
    return found


async def test_the_page_keeps_its_key_out_of_the_address_and_forgets_a_wrong_one(
    pool: Pool, client: Any, page: Any
) -> None:
    url = pool.gateway("paged", TURBOSERVE_API_KEYS=f"{KEY}=default", DRAWN_KEY=KEY)
    # A key in the address is not taken, and goes out of it.
    await page.goto(f"{url}/?access_token={KEY}")
    await page.get_by_label("API key").wait_for()
    assert KEY not in page.url
    await page.get_by_label("API key").fill(KEY)
    await page.keyboard.press("Enter")
    await page.get_by_label("API key").wait_for(state="hidden")
    await page.get_by_label("What should the video show?").fill("a red circle")
    await page.get_by_role("button", name="Start").click()
    await page.get_by_text("Placed on a worker").first.wait_for()
    assert KEY not in page.url
    assert KEY not in str(await page.evaluate("document.documentElement.outerHTML"))
    await page.get_by_role("button", name="End session").click()
    await page.locator("#phase", has_text="terminated").wait_for()
    # The operator's page in the same tab has the key. With a wrong key it asks once.
    await page.evaluate("sessionStorage.setItem('turboserve.key', 'wrong-0123456789')")
    await page.goto(f"{url}/pool")
    await page.get_by_label("API key").wait_for()
    # It asks nothing with the wrong key meanwhile, and shows the pools with the right one.
    await page.get_by_label("API key").fill(KEY)
    await page.keyboard.press("Enter")
    await page.get_by_label("API key").wait_for(state="hidden")
    await page.locator("#summary").filter(has_text=re.compile(r"\w")).wait_for()
    assert 1 <= (await refused(client(url)))["unknown"] <= 2
    pool.stop("paged")


FRAME = """([address]) => {
    const frame = document.createElement("iframe");
    frame.src = address;
    document.body.replaceChildren(frame);
}"""
PLAYS = "document.querySelector('video')?.currentTime > 0"


async def test_only_a_listed_page_frames_the_player(
    pool: Pool, stranger_port: int, client: Any, page: Any
) -> None:
    listed, other = f"http://127.0.0.1:{stranger_port}", f"http://foe.example:{stranger_port}"
    url = pool.gateway(
        "framed", TURBOSERVE_API_KEYS=f"{KEY}=default", DRAWN_KEY=KEY, TURBOSERVE_FRAME_ANCESTORS=listed
    )
    api: httpx.AsyncClient = client(url, KEY)
    session = (await api.post("/v1/sessions", json={"prompt": "a red circle"})).json()
    link = (await api.post(f"{session['links']['self']}/links", json={})).json()
    head = (await api.get(link["embed_url"])).headers
    assert f"frame-ancestors {listed};" in f"{head['content-security-policy']};"
    assert "x-frame-options" not in head
    # Every other page of the gateway is shown in no frame.
    for path in ("/", "/pool", "/docs", session["links"]["self"]):
        assert (await api.get(path)).headers["x-frame-options"] == "DENY"
    assert "frame-ancestors 'none'" in (await api.get("/")).headers["content-security-policy"]

    async def framed(origin: str, address: str) -> Any:
        await page.goto(origin)
        await page.evaluate(FRAME, [address])
        frame = page.frames[-1]
        await frame.wait_for_load_state()
        return frame

    player = await framed(listed, url + link["embed_url"])
    await until(player, PLAYS)
    assert await player.locator("button, textarea, input").count() == 0
    for origin, path in ((other, link["embed_url"]), (listed, f"/#session={session['id']}")):
        refused_frame = await framed(origin, url + path)

        def is_refused(frame: Any = refused_frame) -> bool:
            return bool(frame.url.startswith("chrome-error:"))

        # The page that shows the error may replace the empty one a little later.
        await eventually(is_refused, what=f"{origin} {path}")
    await api.delete(f"{session['links']['self']}/links/{link['id']}")
    # The player in the frame says so, and the link opens no stream again.
    ended = await framed(listed, url + link["embed_url"])
    await ended.locator("#state", has_text="was revoked").wait_for()
    await api.delete(session["links"]["self"])
    pool.stop("framed")


async def test_without_listed_origins_nothing_is_framed(keyless_url: str, client: Any) -> None:
    answer = await client(keyless_url).get("/embed/ses_1")
    assert (answer.status_code, answer.headers["x-frame-options"]) == (200, "DENY")
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
