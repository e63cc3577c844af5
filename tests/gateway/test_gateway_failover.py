"""A page leaves a gateway that is cut off from its broker or stopped: real gateways, a real Chromium."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.helpers.browser import NEEDS_CHROMIUM, PATIENT_WEBRTC, until
from tests.helpers.pool_harness import Pool
from tests.helpers.waiting import eventually
from turboserve.experiments.chaos.network_proxy import UNDISTURBED, NetworkConditions, ProxiedNetwork
from turboserve.free_ports import any_free

pytestmark = NEEDS_CHROMIUM

WATCH = """async () => {
  const { Client, StreamConnection } = await import("/page/client/index.js");
  const { WebRtcConnection } = await import("/page/client/webrtc_connection.js");
  window.client = new Client(new URL(".", document.baseURI));
  window.session = await client.create("a red circle");
  window.indices = [];
  window.connection = new StreamConnection(session, {
    chunk: ({ index, start_s }) => {
      indices.push(index);
      connection.report(start_s);
    },
  }, { after: -1 });
  // It has gateways of its own to leave. Two of its three addresses are those of one gateway.
  const other = new Client(new URL(".", document.baseURI));
  window.live = { greeted: [] };
  window.webrtc = new WebRtcConnection(other.session(session.id), {
    hello: () => live.greeted.push(other.baseUrl),
    unavailable: (error) => live.error = String(error),
  });
}"""


NAMES = ["failover_first", "failover_second"]


@pytest.fixture
def network(pool: Pool) -> Iterator[ProxiedNetwork]:
    """A proxy between each gateway and the broker."""
    parts = urlsplit(pool.nats.address)
    with ProxiedNetwork() as network:
        for name in NAMES:
            network.add(name, lambda: (parts.hostname or "", parts.port or 0))
        yield network


async def test_a_page_leaves_a_gateway_that_cannot_deliver_and_a_stopped_one_and_misses_no_chunk(
    pool: Pool, page: Any, network: ProxiedNetwork
) -> None:
    """Viewers stalled for 13 s at a gateway that did not hear the broker, although there was another one.

    While no gateway hears the broker, viewers stay.
    """
    ports = [any_free(), any_free()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    stopped: int | None = None

    async def arrived_at(port: int) -> None:
        # The address bar has another name of this machine than the setting.
        await until(page, f"() => client.baseUrl.endsWith(':{port}/')")
        before = await page.evaluate("indices.length")
        await until(page, f"() => indices.length > {before + 2}")
        await until(page, f"() => live.greeted.at(-1).endsWith(':{port}/') || live.error")
        assert await page.evaluate("live.error ?? null") is None

    try:
        for name, port in zip(NAMES, ports, strict=True):
            broker = f"nats://{urlsplit(pool.nats.address).hostname}:{network[name].port}"
            gateways = f"{urls[0]}, {urls[1]}/"
            pool.gateway(name, port, TURBOSERVE_GATEWAY_URLS=gateways, TURBOSERVE_NATS_URL=broker)
        await page.add_init_script(PATIENT_WEBRTC)
        await page.goto(f"http://localhost:{ports[0]}/")
        await page.evaluate(WATCH)
        await until(page, "() => indices.length > 2 && live.greeted.length")
        async with httpx.AsyncClient(timeout=120) as plain:
            silent = NetworkConditions(stops_answers=True)

            async def delivery(url: str) -> tuple[bool, str]:
                answer = (await plain.get(f"{url}/readyz")).json()
                return answer["checks"]["delivery"], answer["warnings"].get("delivery", "")

            async def second_is_cut_off() -> bool:
                return not (await delivery(urls[1]))[0]

            async def viewers_wait() -> bool:
                return "viewers wait" in (await delivery(urls[0]))[1]

            # One after the other: on a busy machine, the second may know seconds later that it is cut off.
            network.set(silent, NAMES[1])
            await eventually(second_is_cut_off)
            network.set(silent, NAMES[0])
            await eventually(viewers_wait)
            assert (await delivery(urls[0]))[0]
            assert "cut off from the broker" not in pool.log(NAMES[0])
            network.set(UNDISTURBED, NAMES[1])
            await arrived_at(ports[1])
            delivers, warning = await delivery(urls[0])
            assert not delivers
            assert warning.endswith("viewers go to another gateway")
            network.set(UNDISTURBED)

            async def ready_again() -> bool:
                return (await plain.get(f"{urls[0]}/readyz")).status_code == 200

            await eventually(ready_again)
        stopped = pool.pid(NAMES[1])
        os.kill(stopped, signal.SIGSTOP)
        await arrived_at(ports[0])
        indices = await page.evaluate("indices")
        assert indices == list(range(len(indices)))
        # A request that changes something goes there as well.
        ended = await page.evaluate("session.end()")
        assert ended["phase"] == "terminated"
        async with httpx.AsyncClient(headers={"Origin": "http://127.0.0.1:1"}, timeout=120) as other:
            foreign = await other.post(f"{urls[0]}/v1/sessions", json={})
        assert foreign.status_code == 403
    finally:
        network.set(UNDISTURBED)
        if stopped is not None:
            os.kill(stopped, signal.SIGCONT)
        for name in NAMES:
            pool.stop(name)
