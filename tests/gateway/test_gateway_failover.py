"""A page goes from a gateway that is stopped to another one: real gateways, a real Chromium."""

from __future__ import annotations

import os
import signal
from typing import Any

import httpx

from tests.helpers.browser import NEEDS_CHROMIUM, until
from tests.helpers.pool_harness import Pool
from turboserve.free_ports import any_free

pytestmark = NEEDS_CHROMIUM

WATCH = """async () => {
  const { Client, StreamConnection } = await import("/page/client/index.js");
  window.client = new Client(new URL(".", document.baseURI));
  window.session = await client.create("a red circle");
  window.indices = [];
  window.connection = new StreamConnection(session, {
    chunk: ({ index, start_s }) => {
      indices.push(index);
      connection.report(start_s);
    },
  }, { after: -1 });
}"""


async def test_a_page_leaves_a_stopped_gateway_and_misses_no_chunk(pool: Pool, page: Any) -> None:
    ports = [any_free(), any_free()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    names = ["failover_first", "failover_second"]
    stopped: int | None = None
    try:
        for name, port in zip(names, ports, strict=True):
            pool.gateway(name, port, TURBOSERVE_GATEWAY_URLS=f"{urls[0]}, {urls[1]}/")
        # The address bar may have another name of this machine than the setting.
        await page.goto(f"http://localhost:{ports[0]}/")
        await page.evaluate(WATCH)
        await until(page, "() => indices.length > 2")
        stopped = pool.pid(names[0])
        os.kill(stopped, signal.SIGSTOP)
        await until(page, f"() => client.baseUrl === '{urls[1]}/'")
        before = await page.evaluate("indices.length")
        await until(page, f"() => indices.length > {before + 2}")
        indices = await page.evaluate("indices")
        assert indices == list(range(len(indices)))
        # A request that changes something goes there as well.
        ended = await page.evaluate("session.end()")
        assert ended["phase"] == "terminated"
        async with httpx.AsyncClient(headers={"Origin": "http://127.0.0.1:1"}, timeout=120) as other:
            foreign = await other.post(f"{urls[1]}/v1/sessions", json={})
        assert foreign.status_code == 403
    finally:
        if stopped is not None:
            os.kill(stopped, signal.SIGCONT)
        for name in names:
            pool.stop(name)
