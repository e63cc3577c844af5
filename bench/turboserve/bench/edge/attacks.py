"""Attacks over plain sockets. Each returns what it achieved; none needs an account.

All are bounded in count, bytes and time. Callers only pass an address of this machine.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

BLOCK = b"x" * 65_536
PING = b"\x89\xfd\x00\x00\x00\x00" + bytes(125)
"""The largest possible ping, masked with zeros."""
Address = tuple[str, int]


def connect(address: Address, timeout_s: float = 5.0, source: str | None = None) -> socket.socket:
    """Open a connection; `source` is its local address."""
    return socket.create_connection(address, timeout_s, None if source is None else (source, 0))


def handshake(address: Address, path: str = "/stream", timeout_s: float = 5.0) -> socket.socket:
    """Open a WebSocket and read nothing after its handshake. Raises OSError."""
    opened = connect(address, timeout_s)
    opened.sendall(
        f"GET {path} HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\nUpgrade: websocket\r\n"
        "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
    )
    head = b""
    while b"\r\n\r\n" not in head:
        # Read one byte at a time: bytes after the head belong to the stream.
        more = opened.recv(1)
        if not more:
            raise ConnectionError(f"the handshake was refused: {head!r}")
        head += more
    if not head.startswith(b"HTTP/1.1 101"):
        raise ConnectionError(f"the handshake was refused: {head!r}")
    return opened


@contextmanager
def endless_headers(address: Address, total_bytes: int) -> Iterator[int]:
    """Send one request whose headers do not end, and leave it open.

    Yields the bytes that the server accepted.
    """
    taken = 0
    with closing(connect(address)) as opened:
        with suppress(OSError):
            opened.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n")
            while taken < total_bytes:
                opened.sendall(b"X-%d: " % taken + BLOCK[:4_000] + b"\r\n")
                taken += 4_000
        yield taken


@contextmanager
def half_open(
    address: Address, count: int, beginning: bytes, timeout_s: float = 1.0
) -> Iterator[list[socket.socket]]:
    """Open `count` connections that each send `beginning` (empty: nothing) and then wait.

    Connections that fail within `timeout_s` are missing.
    """
    opened: list[socket.socket] = []
    try:
        for _ in range(count):
            with suppress(OSError):
                one = connect(address, timeout_s)
                opened.append(one)
                one.sendall(beginning)
        yield opened
    finally:
        for one in opened:
            one.close()


def still_open(connections: list[socket.socket]) -> list[socket.socket]:
    """Return the connections that the server has not closed. Received data is discarded."""
    left = []
    for one in connections:
        one.setblocking(False)
        try:
            while data := one.recv(65_536):
                del data
        except BlockingIOError:
            left.append(one)
        except OSError:
            continue
    return left


def ping_flood(opened: socket.socket, seconds: float) -> int:
    """Send pings without a pause and read nothing.

    Returns how many the server accepted; ends if it closes.
    """
    sent, deadline = 0, time.monotonic() + seconds
    opened.settimeout(0.2)
    block = PING * 1_000
    view = memoryview(block)
    while time.monotonic() < deadline:
        try:
            while view:
                count = opened.send(view)
                view, sent = view[count:], sent + count
            view = memoryview(block)
        except TimeoutError:
            continue
        except OSError:
            break
    return sent // len(PING)


def answers(address: Address, path: str = "/healthz", timeout_s: float = 5.0) -> bool:
    """Return whether a new client is answered 200 within `timeout_s`."""
    try:
        with closing(connect(address, timeout_s)) as opened:
            opened.sendall(f"GET {path} HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n".encode())
            return b" 200 " in opened.recv(64)
    except OSError:
        return False


def rss_bytes(pid: int) -> int:
    """Return the resident memory of the process and its children."""
    status = Path(f"/proc/{pid}/status").read_text()
    own = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(rss_bytes(int(child)) for child in children)


def descriptors(pid: int) -> int:
    """Return the number of open files of the process."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def cpu_s(pid: int) -> float:
    """Return the processor time that the process and its children have used."""
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = sum(map(int, times[11:13])) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(cpu_s(int(child)) for child in children)
