"""Server-side request forgery: what is called, by name, by address, and after the name has changed."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.webhooks.receiver import Receiver, Reply, receiving
from turboserve.contracts.errors import InvalidInputError
from turboserve.webhooks.client import BlockedAddressError, SendError, WebhookClient
from turboserve.webhooks.core.addresses import AddressRules, Target, is_public

PATIENCE_S = 60.0
STRICT = AddressRules()
LOCAL = AddressRules(http_to_loopback=True)
LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"),)
SPECIAL = (
    *("0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "127.0.0.1", "127.255.255.254", "169.254.169.254"),
    *(
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.1",
        "192.0.0.255",
        "192.88.99.1",
        "192.0.2.1",
        "192.168.1.1",
        "198.18.0.1",
        "198.51.100.1",
    ),
    *("203.0.113.1", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255"),
    *("::", "::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1"),
    *("64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "100::1", "2001::1", "2001:db8::1", "2002:7f00:1::1"),
    *("2002:a00:1::1", "fc00::1", "fd12:3456::1", "fe80::1", "fec0::1", "ff02::1", "3fff::1", "5f00::1"),
)
PUBLIC = ("8.8.8.8", "1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "64:ff9b::808:808")


@pytest.mark.parametrize("address", SPECIAL)
def test_special_addresses_are_not_called(address: str) -> None:
    found = ipaddress.ip_address(address)
    target = Target("https", "a.example", 443, "/")
    assert not is_public(found)
    assert not STRICT.allows(found, target)
    assert not LOCAL.allows(found, target)
    with pytest.raises(InvalidInputError):
        STRICT.parse(f"https://{f'[{address}]' if ':' in address else address}/")


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_called(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))
    STRICT.parse(f"https://{f'[{address}]' if ':' in address else address}/x")


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_in_an_ipv6_one_is_no_way_around(address: ipaddress.IPv4Address) -> None:
    for text in (f"::ffff:{address}", f"64:ff9b::{address}"):
        assert is_public(ipaddress.ip_address(text)) == is_public(address)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://a.example/", "https"),
        ("http://localhost/", "https"),
        ("ftp://a.example/", "https"),
        ("file:///etc/passwd", "https"),
        ("https:///x", "host"),
        ("https://", "host"),
        ("a.example/x", "https"),
        ("https://user@a.example/", "user"),
        ("https://user:pass@a.example/", "user"),
        ("https://a.example@127.0.0.1/", "public|user"),
        ("https://a.example/#x", "fragment"),
        ("https://a.example:0/", "port"),
        ("https://a.example:99999/", "Port|port"),
        ("https://a..example/", "host"),
        ("https://a.example/\r\nx: y", "ASCII"),
        ("https://a.example/ x", "ASCII"),
        ("https://ä.example/", "ASCII"),
        ("https://[::1/", "IPv6"),
        ("https://[fe80::1%25eth0]/", "host|public"),
        ("https://a\\example/", "host"),
    ],
)
def test_other_urls_are_refused(url: str, reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason) as refused:
        STRICT.parse(url)
    assert refused.value.field == "url"


def test_urls_are_parsed() -> None:
    found = STRICT.parse("https://A.Example.:8443/x?y=1")
    assert found == Target("https", "a.example", 8443, "/x?y=1")
    assert found.authority == "a.example:8443"
    assert STRICT.parse("https://a.example").path == "/"
    assert LOCAL.parse("http://localhost:9000/").port == 9000
    assert LOCAL.parse("http://[::1]:9000/").authority == "[::1]:9000"
    with pytest.raises(InvalidInputError):
        LOCAL.parse("http://10.0.0.1/")


def test_an_operator_may_name_hosts_and_networks() -> None:
    rules = AddressRules(hosts=("a.example", "*.b.example"), networks=(ipaddress.ip_network("10.1.0.0/16"),))
    for url in ("https://a.example/", "https://x.b.example/"):
        rules.parse(url)
    for url in ("https://b.example/", "https://xb.example/", "https://a.example.c/", "https://8.8.8.8/"):
        with pytest.raises(InvalidInputError):
            rules.parse(url)
    target = Target("https", "a.example", 443, "/")
    assert rules.allows(ipaddress.ip_address("10.1.2.3"), target)
    assert rules.allows(ipaddress.ip_address("::ffff:10.1.2.3"), target)
    assert not rules.allows(ipaddress.ip_address("10.2.0.1"), target)


# With real sockets


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


Client = Callable[..., WebhookClient]


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    made: list[WebhookClient] = []

    def make(
        rules: AddressRules, timeout_s: float = PATIENCE_S, ca_file: Path | None = None
    ) -> WebhookClient:
        made.append(WebhookClient(rules, timeout_s, 4, ca_file))
        return made[-1]

    yield make
    for one in made:
        await one.close()


async def test_names_of_this_machine_are_not_called(receiver: Receiver, client: Client) -> None:
    """Names and odd spellings resolve first; what counts is the address."""
    sender = client(STRICT)
    for host in ("localhost", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "ip6-localhost"):
        with pytest.raises((BlockedAddressError, InvalidInputError, SendError)):
            await sender.post(receiver.url(host=host, scheme="https"), {}, b"{}")
    assert receiver.got == []


async def test_a_name_that_changes_its_address_is_connected_where_it_was_checked(
    receiver: Receiver, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS rebinding: a second look-up would get this machine. There is none."""
    asked: list[str] = []
    real = socket.getaddrinfo

    def rebinding(host: Any, port: Any, *rest: Any, **options: Any) -> Any:
        if host == "rebind.example":
            asked.append(host)
            # No server listens at the first one.
            address = "127.0.0.2" if len(asked) == 1 else "127.0.0.1"
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]
        return real(host, port, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    rules = AddressRules(networks=(ipaddress.ip_network("127.0.0.2/32"),))
    with pytest.raises(SendError):
        await client(rules).post(receiver.url(host="rebind.example", scheme="https"), {}, b"{}")
    assert asked == ["rebind.example"]
    # The next attempt resolves again, and is blocked.
    with pytest.raises(BlockedAddressError):
        await client(rules).post(receiver.url(host="rebind.example", scheme="https"), {}, b"{}")
    assert receiver.got == []


async def test_redirects_are_not_followed(receiver: Receiver, client: Client) -> None:
    receiver.reply = lambda _: Reply(302, f"location: {receiver.url('/secret')}\r\n")
    answer = await client(LOCAL).post(receiver.url("/x?y=1"), {"webhook-id": "a"}, b"{}")
    assert answer.status == 302
    assert [one.path for one in receiver.got] == ["/x?y=1"]


async def test_answers_are_bounded_in_size_and_time(receiver: Receiver, client: Client) -> None:
    never = asyncio.Event()
    receiver.reply = lambda one: Reply(
        200,
        "retry-after: 17\r\n",
        b"x" * 10_000_000 if one.path == "/big" else b"",
        never if one.path == "/slow" else None,
    )
    sender = client(LOCAL)
    answer = await sender.post(receiver.url("/big"), {}, b"{}")
    assert (answer.status, answer.retry_after_s) == (200, 17.0)
    with pytest.raises(SendError, match="within 1 s"):
        await client(LOCAL, timeout_s=1.0).post(receiver.url("/slow"), {}, b"{}")
    # The connection of the large answer was not kept with its rest.
    assert (await sender.post(receiver.url("/small"), {}, b"{}")).status == 200
    never.set()


async def test_failures_tell_nothing_of_this_network(client: Client) -> None:
    with socket.socket() as held:
        # No other process gets the port, and nothing listens at it.
        held.bind(("127.0.0.1", 0))
        unused = f"http://127.0.0.1:{held.getsockname()[1]}/"
        with pytest.raises(SendError, match=r"^the connection was refused$"):
            await client(LOCAL).post(unused, {}, b"{}")
    with pytest.raises(SendError, match="does not resolve"):
        await client(STRICT).post("https://no-such-name.invalid/", {}, b"{}")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate for hooks.example that signs itself."""
    folder = tmp_path_factory.mktemp("certificate")
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
            ),
            *("-keyout", folder / "key.pem", "-out", folder / "cert.pem", "-days", "2"),
            *("-subj", "/CN=hooks.example", "-addext", "subjectAltName=DNS:hooks.example"),
        ],
        check=True,
        capture_output=True,
    )
    return folder


async def test_certificates_are_checked_for_the_name_of_the_url(
    certificate: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.getaddrinfo

    def resolve(host: Any, port: Any, *rest: Any, **options: Any) -> Any:
        name = "127.0.0.1" if str(host).endswith(".example") else host
        return real(name, port, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    rules = AddressRules(networks=LOOPBACK)
    async with receiving(context) as receiver:
        url = receiver.url("/x", "hooks.example", "https")
        with pytest.raises(SendError, match="certificate is refused"):
            await client(rules).post(url, {}, b"{}")
        trusting = client(rules, ca_file=certificate / "cert.pem")
        assert (await trusting.post(url, {}, b"{}")).status == 204
        with pytest.raises(SendError, match="certificate is refused"):
            await trusting.post(receiver.url("/x", "other.example", "https"), {}, b"{}")
    assert [one.headers["host"] for one in receiver.got] == [f"hooks.example:{receiver.port}"]
