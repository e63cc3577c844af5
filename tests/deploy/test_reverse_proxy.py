"""The nginx configuration of the how-to, on loopback in front of a real gateway, with its own certificate."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets

from tests.helpers.pool_harness import Pool
from tests.helpers.ports import free_ports
from turboserve.bench.edge import attacks

ROOT = Path(__file__).parent.parent.parent
PATIENCE_S = 60.0

pytestmark = pytest.mark.skipif(
    shutil.which("nginx") is None or shutil.which("openssl") is None,
    reason="needs nginx and openssl (on Debian: apt-get install nginx-light openssl)",
)


class Proxied:
    def __init__(self, pool: Pool, gateway: str, port: int, plain_port: int, certificate: Path) -> None:
        self.pool, self.gateway = pool, gateway
        self.port, self.plain_port = port, plain_port
        self.tls = ssl.create_default_context(cafile=str(certificate))

    def client(self) -> httpx.AsyncClient:
        """Return a client that resolves the name to loopback."""
        return httpx.AsyncClient(
            base_url=f"https://127.0.0.1:{self.port}",
            verify=self.tls,
            headers={"Host": "turboserve.example"},
            timeout=PATIENCE_S,
        )


def _certificate(folder: Path) -> tuple[Path, Path]:
    key, certificate = folder / "privkey.pem", folder / "fullchain.pem"
    subprocess.run(
        (
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-days", "1", "-subj", "/CN=turboserve.example", "-keyout", str(key)),
            *("-out", str(certificate), "-addext", "subjectAltName=DNS:turboserve.example,IP:127.0.0.1"),
        ),
        check=True,
        capture_output=True,
    )
    return key, certificate


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    folder = tmp_path_factory.mktemp("nginx")
    key, certificate = _certificate(folder)
    with Pool(tmp_path_factory.mktemp("pool")).running() as pool:
        gateway = pool.gateway(
            "proxied",
            TURBOSERVE_TRUSTED_PROXIES="127.0.0.1/32",
            TURBOSERVE_ALLOWED_HOSTS="turboserve.example",
        )
        port, plain_port = free_ports(2)
        site = (ROOT / "deploy" / "nginx" / "turboserve.conf").read_text()
        for shipped, here in (
            (r"server 127\.0\.0\.1:8080", f"server 127.0.0.1:{httpx.URL(gateway).port}"),
            (r"listen 80;", f"listen 127.0.0.1:{plain_port};"),
            (r"listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;"),
            (r"/etc/ssl/turboserve/fullchain\.pem", str(certificate)),
            (r"/etc/ssl/turboserve/privkey\.pem", str(key)),
            (r"/var/log/nginx/turboserve\.log", str(folder / "access.log")),
        ):
            site, count = re.subn(shipped, here, site)
            assert count == 1, shipped
        (folder / "site.conf").write_text(site)
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        (folder / "nginx.conf").write_text(
            ("user root;\n" if os.getuid() == 0 else "")
            + f"daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log warn;\n"
            + "worker_processes 1; events { worker_connections 512; }\nhttp {\n"
            + "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
            + f"include {folder}/site.conf;\n}}\n"
        )
        with (folder / "stderr.log").open("wb") as stderr:
            nginx = subprocess.Popen(
                ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")], stderr=stderr
            )
        try:
            deadline = time.monotonic() + PATIENCE_S
            while True:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                assert nginx.poll() is None, (folder / "stderr.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield Proxied(pool, gateway, port, plain_port, certificate)
        finally:
            nginx.terminate()
            nginx.wait(PATIENCE_S)
        assert "ticket=" not in (folder / "access.log").read_text()


async def _session(api: httpx.AsyncClient) -> dict[str, Any]:
    answer = await api.post("/v1/sessions", json={"prompt": "a red circle"})
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_a_session_plays_through_it_in_every_form(proxied: Proxied) -> None:
    async with proxied.client() as api:
        session = await _session(api)
        links = session["links"]
        url = f"wss://turboserve.example:{proxied.port}{links['stream']}"
        # As a page of the proxied site does: browsers send the origin with the port that they see.
        origin = {"Origin": f"https://turboserve.example:{proxied.port}"}
        indices: list[int] = []
        async with asyncio.timeout(2 * PATIENCE_S):
            async with websockets.connect(
                url,
                host="127.0.0.1",
                port=proxied.port,
                ssl=proxied.tls,
                additional_headers=origin,
                max_size=None,
                open_timeout=PATIENCE_S,
            ) as stream:
                while len(indices) < 6:
                    raw = await stream.recv()
                    if isinstance(raw, str) and (message := json.loads(raw))["type"] == "chunk":
                        indices.append(message["index"])
                        await stream.send(json.dumps({"type": "playhead", "playhead_s": message["start_s"]}))
            assert indices == list(range(6))
            ticket = (await api.post(f"{links['self']}/tickets")).json()["ticket"]
            async with api.stream("GET", links["video"], params={"after": -1, "ticket": ticket}) as video:
                assert video.status_code == 200
                seen = b""
                async for part in video.aiter_bytes():
                    seen += part
                    if seen.count(b"moof") >= 3:
                        break
            async with api.stream("GET", links["events"]) as events:
                async for line in events.aiter_lines():
                    if line == "event: session.placed":
                        break
        await api.delete(links["self"])


async def test_what_is_not_for_the_world_and_what_is_too_much(proxied: Proxied) -> None:
    async with proxied.client() as api:
        assert (await api.get("/healthz")).status_code == 200
        assert (await api.post("/v1/sessions", content=b"x" * 70_000)).status_code == 413
        assert (await api.get("/healthz", headers={"X-A": "b" * 20_000})).status_code in (400, 431)
        async with httpx.AsyncClient(timeout=PATIENCE_S) as unencrypted:
            plain = await unencrypted.get(f"http://127.0.0.1:{proxied.plain_port}/page")
        assert (plain.status_code, plain.headers["location"]) == (301, "https://turboserve.example/page")
    address = ("127.0.0.1", proxied.port)
    with attacks.half_open(address, 80, b"", PATIENCE_S) as held:
        deadline = time.monotonic() + PATIENCE_S
        while attacks.still_open(held):
            assert time.monotonic() < deadline, "nginx keeps half-open connections"
            await asyncio.sleep(0.2)
