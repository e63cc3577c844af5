"""The proxies of a slow network do to real connections what their conditions say."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from turboserve.experiments.chaos.network_proxy import UNDISTURBED, NetworkConditions, ProxiedNetwork

LIMIT_S = 60.0


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    """Address of a server that answers with what it gets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def one(client: socket.socket) -> None:
            with client:
                try:
                    while data := client.recv(65_536):
                        client.sendall(data)
                except OSError:
                    pass

        def serve() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=one, args=(client,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def network(echo: tuple[str, int]) -> Iterator[ProxiedNetwork]:
    with ProxiedNetwork(seed=7) as network:
        network.add("a", lambda: echo)
        yield network


def opened(network: ProxiedNetwork) -> socket.socket:
    return socket.create_connection(("127.0.0.1", network["a"].port), LIMIT_S)


def received(client: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += client.recv(count - len(data))
    return data


def echoed_s(client: socket.socket, data: bytes) -> float:
    """Return how long it takes until the server's echo of `data` is back."""
    began_s = time.monotonic()
    client.sendall(data)
    assert received(client, len(data)) == data
    return time.monotonic() - began_s


def test_delay_and_bandwidth_count_in_both_directions(network: ProxiedNetwork) -> None:
    with opened(network) as client:
        network.set(NetworkConditions(delay_s=0.1))
        assert echoed_s(client, b"x") >= 0.2
        network.set(NetworkConditions(bytes_per_s=100_000))
        # The directions overlap.
        assert echoed_s(client, bytes(40_000)) >= 0.35
        network.set(UNDISTURBED)
        assert echoed_s(client, bytes(2_000_000)) > 0


@pytest.mark.parametrize("stopped", ["requests", "answers"])
def test_a_stopped_direction_loses_nothing(network: ProxiedNetwork, stopped: str) -> None:
    with opened(network) as client:
        assert echoed_s(client, b"before") > 0
        network.set(NetworkConditions(**{f"stops_{stopped}": True}))
        client.sendall(b"meanwhile")
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.settimeout(LIMIT_S)
        network.set(UNDISTURBED)
        assert received(client, 9) == b"meanwhile"


def test_a_sender_is_held_back_where_the_other_end_reads_nothing(network: ProxiedNetwork) -> None:
    with opened(network) as client:
        network.set(NetworkConditions(stops_requests=True))
        client.settimeout(0.5)
        with pytest.raises(TimeoutError):
            client.sendall(bytes(64 * 2**20))


def test_an_end_of_a_stream_arrives_after_its_data(network: ProxiedNetwork) -> None:
    with opened(network) as client:
        network.set(NetworkConditions(delay_s=0.05))
        client.sendall(b"last")
        client.shutdown(socket.SHUT_WR)
        assert received(client, 4) == b"last"
        assert client.recv(1) == b""


def test_resets_reach_the_client(network: ProxiedNetwork) -> None:
    with opened(network) as client:
        assert echoed_s(client, b"x") > 0
        network.reset("a")
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    network.set(NetworkConditions(refuses=True))
    # The reset may already arrive while the client connects.
    with pytest.raises(ConnectionResetError), opened(network) as client:
        client.recv(1)


async def lifetimes(network: ProxiedNetwork, count: int) -> list[int]:
    """Open connections one after the other until each is reset. Returns their lifetimes in ticks."""
    found: list[int] = []
    writers: list[asyncio.StreamWriter] = []

    async def read() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", network["a"].port)
        writers.append(writer)
        await reader.read(1)

    for _ in range(count):
        began_s = time.monotonic()
        # The reset may already arrive while the client connects.
        with pytest.raises(ConnectionResetError):
            await read()
        found.append(round((time.monotonic() - began_s) / 0.05))
    for writer in writers:
        writer.close()
    return found


async def test_lifetimes_depend_on_the_seed_and_on_the_connection(network: ProxiedNetwork) -> None:
    network.set(NetworkConditions(lifetime_s=0.2))
    first = await lifetimes(network, 6)
    assert network["a"].resets == 6
    assert len(set(first)) > 1
