"""Restrict the listening sockets that a library opens and gives no handle to.

A library's listener authenticates no peer. A socket filter in the kernel therefore accepts packets from the
one peer's addresses only, and none at all once the link is ready. Linux only: elsewhere, and where the kernel
refuses, the sockets stay as the library created them.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from turboserve import logs

DESCRIPTORS = Path("/proc/self/fd")
_SO_ATTACH_FILTER = 26
_SO_ACCEPTCONN = getattr(socket, "SO_ACCEPTCONN", 30)
_NETWORK_HEADER = 0xFFF00000
"""Offset from which a filter reads the IP header (`SKF_NET_OFF`)."""
_LOAD, _EQUALS, _RETURN = 0x20, 0x15, 0x06
_ACCEPT, _DROP = 0xFFFFFFFF, 0
_SOURCE = {socket.AF_INET: 12, socket.AF_INET6: 8}
"""Offset of the source address in the header, by address family."""

Instruction = tuple[int, int, int, int]
"""(code, jump if true, jump if false, operand) of classic BPF."""

log = logs.get("transfer")
T = TypeVar("T")
_opening = threading.Lock()


class Listeners:
    """The listening sockets of one link."""

    def __init__(self, sockets: list[socket.socket]) -> None:
        """`sockets` are duplicates; the library keeps its own."""
        self._sockets = sockets

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """The addresses and ports on which the sockets listen."""
        return [one.getsockname()[:2] for one in self._sockets]

    def only_from(self, addresses: Iterable[str]) -> None:
        """Drop packets from all other addresses."""
        for one in self._sockets:
            _attach(one, _filter(one.family, addresses))

    def refuse_all(self) -> None:
        """Drop every packet to the sockets. Connections that were accepted before continue."""
        self.only_from(())

    def close(self) -> None:
        """Close the duplicates, so that the library's own close ends the socket."""
        while self._sockets:
            self._sockets.pop().close()


def opened_by(call: Callable[[], T]) -> tuple[T, Listeners]:
    """Run `call`. Returns its result and the sockets that it left listening."""
    # Calls run one at a time: otherwise the sockets of one call would be attributed to another.
    with _opening:
        before = _listening()
        result = call()
        new = {inode: descriptor for inode, descriptor in _listening().items() if inode not in before}
        return result, Listeners([one for one in map(_duplicate, new.values()) if one is not None])


def _listening() -> dict[int, int]:
    """Inode and descriptor of each listening TCP socket of this process."""
    found: dict[int, int] = {}
    try:
        descriptors = [int(entry.name) for entry in DESCRIPTORS.iterdir()]
    except OSError:
        return found
    for descriptor in descriptors:
        one = _duplicate(descriptor)
        if one is not None:
            with one:
                found[os.fstat(one.fileno()).st_ino] = descriptor
    return found


def _duplicate(descriptor: int) -> socket.socket | None:
    """Duplicate a listening TCP socket; `None` for any other descriptor."""
    try:
        # Other threads open and close descriptors meanwhile: a duplicate keeps its socket.
        copy = os.dup(descriptor)
    except OSError:
        return None
    try:
        one = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None
    try:
        listens = (
            one.family in _SOURCE
            and one.type == socket.SOCK_STREAM
            and one.getsockopt(socket.SOL_SOCKET, _SO_ACCEPTCONN)
        )
    except OSError:
        listens = False
    if listens:
        return one
    one.close()
    return None


def _filter(family: int, addresses: Iterable[str]) -> list[Instruction]:
    """A filter that accepts packets from these addresses only."""
    at = _NETWORK_HEADER + _SOURCE[socket.AddressFamily(family)]
    program: list[Instruction] = []
    for address in addresses:
        packed = ipaddress.ip_address(address).packed
        if len(packed) != (4 if family == socket.AF_INET else 16):
            continue
        words = struct.unpack(f">{len(packed) // 4}I", packed)
        for number, word in enumerate(words):
            program.append((_LOAD, 0, 0, at + 4 * number))
            # On a mismatch, jump over the rest of this address to the next one.
            program.append((_EQUALS, 0, 2 * (len(words) - number - 1) + 1, word))
        program.append((_RETURN, 0, 0, _ACCEPT))
    return [*program, (_RETURN, 0, 0, _DROP)]


def _attach(one: socket.socket, program: list[Instruction]) -> None:
    data = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    try:
        one.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", len(program), ctypes.addressof(data))
        )
    except OSError as error:
        log.warning("library listener accepts any address", address=one.getsockname(), error=repr(error))
