"""The health server under attack: probes are answered, and no client holds a connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from tests.helpers.waiting import eventually
from turboserve import health, telemetry
from turboserve.connections import Admission
from turboserve.health import CONNECTIONS, HealthServer

PATIENCE_S = 60.0


@pytest.fixture
async def server() -> AsyncIterator[HealthServer]:
    server = HealthServer("127.0.0.1", 0, lambda: {"good": True}, lambda: "leader")
    await server.start()
    yield server
    await server.stop()


async def ask(server: HealthServer, path: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
    writer.close()
    return answer


async def closed(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), PATIENCE_S)


async def test_probes_are_answered(server: HealthServer) -> None:
    assert b"200 OK" in await ask(server, "/healthz")
    assert b"ready, leader" in await ask(server, "/readyz?verbose")
    assert b"404" in await ask(server, "/elsewhere")


@pytest.mark.parametrize("beginning", [b"", b"GET /healthz HTTP/1.1\r\nX-A: "])
async def test_half_open_connections_make_room_for_probes(
    server: HealthServer, monkeypatch: pytest.MonkeyPatch, beginning: bytes
) -> None:
    monkeypatch.setattr(health, "HEADER_S", 2.0)
    opened, admitted = [], 0
    admit = server._table.admit

    def counted(address: str) -> Admission:
        nonlocal admitted
        admitted += 1
        return admit(address)

    monkeypatch.setattr(server._table, "admit", counted)
    for _ in range(6 * CONNECTIONS):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(beginning)
        opened.append((reader, writer))
    await eventually(lambda: admitted == len(opened))
    await asyncio.sleep(0)  # Each has its time limit now. A probe may be slow on a busy machine.
    monkeypatch.setattr(health, "HEADER_S", PATIENCE_S)
    assert b"200 OK" in await ask(server, "/healthz")
    assert len(server._open) <= CONNECTIONS
    # No later connection makes them leave: they are closed after their time limit.
    await asyncio.gather(*(closed(reader) for reader, _ in opened))
    for _, writer in opened:
        writer.close()


async def test_headers_without_an_end_are_refused(server: HealthServer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    answer = b""
    with suppress(ConnectionError):
        writer.write(b"GET / HTTP/1.1\r\n" + b"X-A: b\r\n" * 2_000)
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        assert answer.startswith(b"HTTP/1.1 431 ")
    writer.close()


async def test_who_does_not_read_its_answer_is_cut_off(
    server: HealthServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer exceeds the kernel's buffers. Incident: the server waited without an end."""
    monkeypatch.setattr(health, "ANSWER_S", 0.5)
    answered = asyncio.Event()

    def huge() -> bytes:
        answered.set()
        return bytes(64 << 20)

    monkeypatch.setattr(telemetry, "prometheus_text", huge)
    _reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1)
    assert isinstance(writer.transport, asyncio.Transport)
    writer.transport.pause_reading()
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        await answered.wait()
        await eventually(lambda: not server._open)
    writer.transport.abort()
