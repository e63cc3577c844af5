"""Keys that are silently absent, input that is read before the key, and guessing of keys."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
import websockets
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.helpers import forked_process
from tests.helpers.pool_harness import Pool
from tests.security.access.conftest import Connect, OpenSocket
from turboserve.config import SettingsError
from turboserve.gateway import exposure
from turboserve.gateway.auth.access import Keys
from turboserve.gateway.auth.throttle import FailureThrottle, network_of
from turboserve.gateway.settings import Settings
from turboserve.service import EXIT_SETTINGS

PROBLEM = "application/problem+json"
KEY = "a-key-that-nobody-may-ever-see-in-a-log"
OTHER = "another-key-0123456789"
FAILURES = 5

REFUSED = [
    ("TURBOSERVE_API_KEYS", {"TURBOSERVE_API_KEYS": ""}),
    ("TURBOSERVE_API_KEYS", {"TURBOSERVE_API_KEYS": " "}),
    ("TURBOSERVE_API_KEYS", {"TURBOSERVE_API_KEYS": ","}),
    ("TURBOSERVE_API_KEYS", {"TURBOSERVE_API_KEYS": "{}"}),
    ("TURBOSERVE_API_KEYS", {"TURBOSERVE_API_KEYS": "="}),
    ("TURBOSERVE_API_KEYS", {"TURBOSERVE_API_KEYS": "[]"}),
    ("TURBOSERVE_API_KEYS", {"TURBOSERVE_API_KEYS": "null"}),
    ("TURBOSERVE_API_KEYS", {"TURBOSERVE_API_KEYS": KEY}),
    ("TURBOSERVE_API_KEYS", {"TURBOSERVE_API_KEYS": f"{KEY}="}),
    ("TURBOSERVE_API_KEYS", {"TURBOSERVE_API_KEYS": "=acme"}),
    ("TURBOSERVE_API_KEYS", {"TURBOSERVE_API_KEYS": f"{KEY}=a tenant"}),
    ("TURBOSERVE_API_KEYS", {"TURBOSERVE_API_KEYS": f"{KEY}=acme,{KEY}=boss"}),
    ("TURBOSERVE_API_KEYS", {"TURBOSERVE_API_KEYS": f'{{"{KEY}": "acme", "{KEY}": "boss"}}'}),
    ("TURBOSERVE_API_KEYS", {"TURBOSERVE_API_KEYS": f'{{"{KEY}": ""}}'}),
    ("TURBOSERVE_API_KEYS", {"TURBOSERVE_API_KEYS": f'{{"{KEY}": null}}'}),
    ("TURBOSERVE_API_KEYS", {"TURBOSERVE_API_KEYS": f'{{"": "acme", "{KEY}": "boss"}}'}),
    ("TURBOSERVE_API_KEYS", {"TURBOSERVE_API_KEYS": "short=acme"}),
    ("TURBOSERVE_API_KEYS", {"TURBOSERVE_API_KEYS": "a key with blanks in it=acme"}),
    ("TURBOSERVE_OPERATORS", {"TURBOSERVE_API_KEYS": f"{KEY}=acme", "TURBOSERVE_OPERATORS": "boss"}),
    ("TURBOSERVE_OPERATORS", {"TURBOSERVE_API_KEYS": f"{KEY}=acme", "TURBOSERVE_OPERATORS": ","}),
    ("TURBOSERVE_OPERATORS", {"TURBOSERVE_OPERATORS": "boss"}),
    ("TURBOSERVE_GATEWAY_HOST", {"TURBOSERVE_GATEWAY_HOST": "0.0.0.0"}),
    ("TURBOSERVE_GATEWAY_HOST", {"TURBOSERVE_GATEWAY_HOST": "::"}),
    ("TURBOSERVE_GATEWAY_HOST", {"TURBOSERVE_GATEWAY_HOST": "192.0.2.1"}),
    ("TURBOSERVE_GATEWAY_HOST", {"TURBOSERVE_GATEWAY_HOST": "gateway.example"}),
    ("TURBOSERVE_API_KEYS_FILE", {"TURBOSERVE_API_KEYS_FILE": "/nowhere/keys.json"}),
    ("TURBOSERVE_API_KEYS_STORE", {"TURBOSERVE_API_KEYS_STORE": "1", "TURBOSERVE_API_KEYS": f"{KEY}=acme"}),
    ("TURBOSERVE_OPERATORS", {"TURBOSERVE_API_KEYS_STORE": "1", "TURBOSERVE_OPERATORS": "acme"}),
    ("TURBOSERVE_ALLOWED_HOSTS", {"TURBOSERVE_ALLOWED_HOSTS": "http://foe.example"}),
    ("TURBOSERVE_CORS_ORIGINS", {"TURBOSERVE_CORS_ORIGINS": "friend.example"}),
]


def environment(given: dict[str, str]) -> dict[str, str]:
    bare = {name: value for name, value in os.environ.items() if not name.startswith("TURBOSERVE_")}
    return {**bare, **given}


@pytest.mark.parametrize(("setting", "given"), REFUSED)
def test_keys_are_never_silently_absent(monkeypatch: Any, setting: str, given: dict[str, str]) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValidationError) as refused:
        Settings()
    [reason] = SettingsError.of(refused.value).reasons
    assert reason.startswith(setting)
    assert KEY not in reason
    assert KEY not in str(refused.value)


def test_a_gateway_that_refuses_says_why_and_ends() -> None:
    """As processes. Incident: both served every caller."""
    chosen = [REFUSED[number] for number in (2, 21)]

    def start(given: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return forked_process.run(["-m", "turboserve.gateway"], environment(given))

    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(start, [given for _, given in chosen]))
    for (setting, _), done in zip(chosen, ended, strict=True):
        assert done.returncode == EXIT_SETTINGS, done.stderr
        assert "setting refused" in done.stderr
        assert setting in done.stderr
        assert KEY not in done.stderr + done.stdout
        assert "Traceback" not in done.stderr


def test_turboserve_up_says_so_before_it_starts_anything(tmp_path: Path) -> None:
    command = ["-m", "turboserve.cli.main", "up", "--data", str(tmp_path / "data")]
    done = forked_process.run(command, environment({"TURBOSERVE_API_KEYS": ","}))
    assert done.returncode == 1
    assert "TURBOSERVE_API_KEYS" in done.stderr
    assert not (tmp_path / "data").exists()


def test_an_explicit_opt_out_allows_a_gateway_without_keys(monkeypatch: Any) -> None:
    monkeypatch.setenv("TURBOSERVE_ALLOW_KEYLESS", "1")
    for variables in ({"TURBOSERVE_API_KEYS": ""}, {"TURBOSERVE_GATEWAY_HOST": "0.0.0.0"}, {}):
        with monkeypatch.context() as inner:
            for name, value in variables.items():
                inner.setenv(name, value)
            settings = Settings()
            assert settings.key_set() is None
            told = " ".join(exposure.sentences(settings, Keys(None), 8080))
            assert "No API keys" in told
            assert ("0.0.0.0:8080" in told) == ("TURBOSERVE_GATEWAY_HOST" in variables)
    # A permission is no order: existing keys count, and an unreadable one is no key.
    monkeypatch.setenv("TURBOSERVE_API_KEYS", f"{KEY}=acme")
    assert Keys(Settings().key_set())
    monkeypatch.setenv("TURBOSERVE_API_KEYS", "=")
    with pytest.raises(ValidationError):
        Settings()


@pytest.fixture(scope="module")
def keyed_url(pool: Pool) -> Iterator[str]:
    yield pool.gateway(
        "guarded",
        TURBOSERVE_API_KEYS=f"{KEY}=acme,{OTHER}=boss",
        TURBOSERVE_OPERATORS="boss",
        TURBOSERVE_KEY_FAILURES_PER_MINUTE=str(FAILURES),
        DRAWN_KEY=KEY,
    )
    pool.stop("guarded")


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("none", {}),
    ("broken JSON", {"content": b"{", "headers": {"Content-Type": "application/json"}}),
    ("an unknown field", {"json": {"prompt": "x", "surprise": 1}}),
    ("another type", {"content": b"x=1", "headers": {"Content-Type": "application/x-www-form-urlencoded"}}),
    ("invalid UTF-8", {"content": b"\xff\xfe", "headers": {"Content-Type": "application/json"}}),
    ("too large", {"content": b"x" * (1 << 17), "headers": {"Content-Type": "application/json"}}),
]


async def test_who_asks_is_known_before_anything_is_read(keyed_url: str, client: Connect) -> None:
    """Every path and method of OpenAPI, and some beyond it. Incident: broken JSON was answered 422."""
    api, known = client(keyed_url), client(keyed_url, KEY)
    document = (await api.get("/openapi.json")).json()
    calls = [
        (method.upper(), path.replace("{session}", "ses_x"))
        for path, operations in document["paths"].items()
        if path.startswith("/v1")
        for method in operations
    ]
    calls += [("PATCH", "/v1/sessions"), ("GET", "/v1"), ("GET", "/v1/nothing"), ("POST", "/v1/nothing/")]
    assert len(calls) > 20

    async def ask(method: str, path: str, options: dict[str, Any]) -> tuple[int, str]:
        answer = await api.request(method, path, params={"limit": "none", "after": "?"}, **options)
        assert answer.headers["content-type"] == PROBLEM
        return answer.status_code, answer.json()["code"]

    for what, options in BODIES:
        # Concurrently, in portions: 140 sequential requests take long on a busy machine.
        found = await asyncio.gather(*(ask(method, path, options) for method, path in calls))
        assert set(found) == {(401, "unauthorized")}, what

    async def chunks() -> Any:
        for _ in range(64):
            yield b"x" * 65_536

    answer = await api.post("/v1/sessions", content=chunks())
    assert answer.status_code == 401
    # The connection and the gateway still work as before.
    assert (await known.post("/v1/sessions", content=b"{")).status_code == 415
    assert (await known.get("/v1/sessions")).status_code == 200


async def test_wrong_keys_are_counted_logged_and_slowed(pool: Pool, keyed_url: str, client: Connect) -> None:
    # From an address of its own, so that other tests and this one do not slow each other.
    guesser = client(keyed_url, transport=httpx.AsyncHTTPTransport(local_address="127.0.0.77"))

    async def guess(key: str) -> httpx.Response:
        return await guesser.get("/v1/models", headers={"Authorization": f"Bearer {key}"})

    async def refused() -> dict[str, float]:
        found = {}
        for line in (await guesser.get("/metrics")).text.splitlines():
            if line.startswith("turboserve_gateway_keys_refused_total{"):
                found[line.partition('reason="')[2].partition('"')[0]] = float(line.split()[-1])
        return found

    before = await refused()
    answers = [await guess(f"guess-{number}-0123456789") for number in range(4 * FAILURES)]
    statuses = [answer.status_code for answer in answers]
    assert statuses[:FAILURES] == [401] * FAILURES
    # The bucket may refill by one or two meanwhile.
    assert statuses.count(429) >= 2 * FAILURES
    slowed = next(answer for answer in answers if answer.status_code == 429)
    assert (slowed.json()["code"], slowed.json()["limit"]) == ("too_many_wrong_keys", FAILURES)
    assert 1 <= int(slowed.headers["retry-after"]) <= 60 / FAILURES + 1
    # The same address with a good key, and another address with a bad key.
    assert (await guess(KEY)).status_code == 200
    assert (await guesser.get("/v1/models")).status_code == 401
    elsewhere = client(keyed_url, "wrong-0123456789", transport=_from("127.0.0.78"))
    assert (await elsewhere.get("/v1/models")).status_code == 401
    after = await refused()
    assert after["unknown"] - before.get("unknown", 0) >= FAILURES
    assert after["throttled"] - before.get("throttled", 0) == statuses.count(429)
    assert after["missing"] > before.get("missing", 0)
    log = pool.log("guarded")
    lines = [line for line in log.splitlines() if "api key refused" in line]
    assert any("127.0.0.77" in line and "throttled" in line for line in lines)
    assert len(lines) < 60
    assert "guess-" not in log
    assert KEY not in log


def _from(address: str) -> httpx.AsyncHTTPTransport:
    return httpx.AsyncHTTPTransport(local_address=address)


async def test_guesses_over_a_websocket_are_slowed_too(keyed_url: str) -> None:
    there = httpx.URL(keyed_url)
    codes = []
    for number in range(3 * FAILURES):
        query = f"ticket=guess-{number}-0123456789"
        address = f"ws://127.0.0.1:{there.port}/v1/sessions/ses_x/stream?{query}"
        async with websockets.connect(address, local_addr=("127.0.0.79", 0), open_timeout=60) as opened:
            message = json.loads(await opened.recv())
            with pytest.raises(websockets.ConnectionClosed):
                await opened.recv()
            codes.append((message["code"], opened.close_code))
            # The bucket may refill by one or two meanwhile.
            assert message["code"] == "unauthorized" or message["retry_after_s"] > 0
    assert codes[:FAILURES] == [("unauthorized", 4401)] * FAILURES
    assert codes.count(("too_many_wrong_keys", 1013)) >= FAILURES


class _Collector:
    """An OTLP collector that keeps what it receives."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.bodies: list[bytes] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                # Traces and metrics arrive at the same time, each in a thread.
                collector.bodies.append(self.rfile.read(int(self.headers["content-length"])))
                collector.paths.append(self.path)
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                return None

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def sent(self) -> bytes:
        return b"".join(self.bodies)

    @contextmanager
    def running(self) -> Iterator[str]:
        Thread(target=self.server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{self.server.server_port}"
        finally:
            self.server.shutdown()
            self.server.server_close()


async def test_a_key_in_the_address_stays_out_of_logs_traces_and_metrics(
    pool: Pool, client: Connect, socket: OpenSocket
) -> None:
    """Every log line is on, and a collector gets every span."""
    collector = _Collector()
    with collector.running() as endpoint:
        url = pool.gateway(
            "traced",
            TURBOSERVE_API_KEYS=f"{KEY}=acme",
            TURBOSERVE_LOG_LEVEL="DEBUG",
            TURBOSERVE_OTLP_ENDPOINT=endpoint,
            DRAWN_KEY=KEY,
        )
        api, bare = client(url, KEY), client(url)
        session = (await api.post("/v1/sessions", json={"prompt": "a red circle"})).json()
        ticket = (await api.post(f"{session['links']['self']}/tickets")).json()["ticket"]
        async with socket(url, session["id"], ticket=ticket) as opened:
            assert json.loads(await opened.recv())["type"] == "hello"
            await opened.send("{")
            # Media of the session may come before the answer.
            while isinstance(message := await opened.recv(), bytes) or json.loads(message)["type"] != "error":
                assert isinstance(message, bytes) or KEY not in message
            assert KEY not in message
        for path in (session["links"]["events"], session["links"]["video"]):
            async with bare.stream("GET", path, params={"ticket": ticket}) as answer:
                assert answer.status_code == 200
                await anext(answer.aiter_bytes())
            answer = await bare.get(path, params={"access_token": KEY})
            assert answer.json()["code"] == "key_in_address"
        for path in ("/v1/models", "/v1/nothing", "/nothing"):
            answer = await bare.get(path, params={"access_token": KEY})
            assert KEY not in answer.text
        assert (
            await bare.get(session["links"]["events"], params={"ticket": f"{ticket}x"})
        ).status_code == 401
        metrics = (await api.get("/metrics")).text
        await api.delete(session["links"]["self"])
        # Buffered spans are sent at the stop.
        pool.stop("traced")
    assert any(path.endswith("/v1/traces") for path in collector.paths)
    assert b"turboserve-gateway" in collector.sent
    for place in (collector.sent.decode("latin-1"), metrics, pool.log("traced")):
        assert KEY not in place
        assert ticket.rpartition(".")[2] not in place


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 5)), max_size=200), st.integers(1, 20))
def test_the_throttle_lets_a_rate_through_and_forgets_within_bounds(
    steps: list[tuple[int, float]], per_minute: int
) -> None:
    throttle = FailureThrottle(per_minute, addresses_limit=4)
    one = FailureThrottle(per_minute)
    now_s, passed = 0.0, 0
    for address, pause_s in steps:
        now_s += pause_s
        throttle.failed(str(address), now_s)
        assert len(throttle) <= 4
        wait_s = one.failed("a", now_s)
        passed += wait_s is None
        assert passed <= per_minute + now_s * per_minute / 60 + 1e-6
        if wait_s is not None:
            assert 0 < wait_s <= 60 / per_minute + 1e-6


def test_a_throttled_address_may_fail_again_after_the_time_in_the_answer() -> None:
    throttle = FailureThrottle(per_minute=6)
    assert [throttle.failed("a", 0.0) for _ in range(7)] == [None] * 6 + [10.0]
    assert throttle.failed("a", 9.0) == pytest.approx(1.0)
    assert throttle.failed("a", 10.01) is None


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        (None, "unknown"),
    ],
)
def test_one_client_is_an_address_or_a_network_of_one_host(address: str | None, network: str) -> None:
    assert network_of(address) == network
