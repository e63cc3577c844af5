"""Addresses at which workers serve others: an IPv6 address has brackets, so that others can parse it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from turboserve.host_port import host_port
from turboserve.worker.service import role_serving
from turboserve.worker.settings import Settings, check_addresses
from turboserve.worker.transfer.network import Serve
from turboserve.worker.transfer.target import parse_address


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("10.0.0.7", "10.0.0.7:7500"),
        ("worker-3", "worker-3:7500"),
        ("fd00::7", "[fd00::7]:7500"),
        ("[fd00::7]", "[fd00::7]:7500"),
    ],
)
def test_a_host_and_its_port_are_shown_as_in_urls(host: str, shown: str) -> None:
    assert host_port(host, 7500) == shown


async def test_the_address_of_a_decode_worker_can_be_set_for_its_homes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Incident: the log of a decode worker had `tcp://fd00::7:7500`, which a home's settings refuse."""

    async def listen(serve: object, host: str, port: int) -> tuple[asyncio.Server, int]:
        return cast(asyncio.Server, SimpleNamespace(close=lambda: None)), port

    monkeypatch.setattr(role_serving, "listen", listen)
    monkeypatch.setattr(role_serving, "find_interface", lambda host: SimpleNamespace(address=host))
    settings = Settings(transfer_host="fd00::7", transfer_port=7500)
    address, end = await role_serving.at_interface(settings)(cast(Serve, None))
    assert check_addresses(address) == "tcp://[fd00::7]:7500"
    assert parse_address(address) == ("fd00::7", 7500)
    end()
