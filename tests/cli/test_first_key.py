"""The first key of `turboserve up --auth` is shown when every gateway accepts it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from turboserve.cli.stack import first_key

KEY = "ts_0123456789abcdef_x"


@contextmanager
def gateway(answers: Sequence[int]) -> Iterator[tuple[str, list[int]]]:
    """Serve these statuses one after the other, and then the last one. Yields the address and those sent."""
    sent: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers["Authorization"] == f"Bearer {KEY}"
            sent.append(answers[min(len(sent), len(answers) - 1)] if known else 400)
            self.send_response(sent[-1])
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", sent
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    # A busy machine is only slow.
    monkeypatch.setattr(first_key, "ACCEPTED_S", 120.0)
    monkeypatch.setattr(first_key, "LOOK_S", 0.01)
    monkeypatch.setattr(first_key, "FIRST_LOOK_S", 0.0)


def test_every_gateway_is_asked_until_it_accepts_the_key() -> None:
    # The first learns late, the second was restarted, and the third has no role for this key.
    with gateway([401, 429, 401, 200]) as one, gateway([503, 200]) as two, gateway([403]) as three:
        assert asyncio.run(first_key.wait_until_accepted([one[0], two[0], three[0]], KEY))
        assert (one[1], two[1], three[1]) == ([401, 429, 401, 200], [503, 200], [403])


def test_a_key_that_no_gateway_accepts_is_waited_for_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_key, "ACCEPTED_S", 2.0)
    with gateway([401]) as (url, sent):
        # On a busy machine, 2 s may pass before the first request is sent.
        while not sent:
            assert not asyncio.run(first_key.wait_until_accepted([url], KEY))
