"""Encrypts a viewer's packets and sends them with one system call, where the system has such.

pylibsrtp copies each packet twice, and asyncio makes a system call for each. Here packets are encrypted where
the kernel reads them: in one buffer that all viewers use in turn.

Source: sendmmsg(2). Only Linux has it.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pylibsrtp
from aioice import turn
from pylibsrtp import ffi, lib  # type: ignore[attr-defined]

AT_ONCE = 32
"""Packets that one system call sends at most."""
_SLOT_BYTES = 1_500
_LONGEST_BYTES = _SLOT_BYTES - pylibsrtp.SRTP_MAX_SRTCP_TRAILER_LEN
"""Longest packet that fits into a place with what encryption adds."""
_ADDRESS_BYTES = 28
"""Size of `struct sockaddr_in6`."""


class _Header(ctypes.Structure):
    """`struct msghdr`."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_bytes", ctypes.c_uint32),
        ("parts", ctypes.c_void_p),
        ("part_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_bytes", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class _Message(ctypes.Structure):
    """`struct mmsghdr`."""

    _fields_ = (("header", _Header), ("sent_bytes", ctypes.c_uint))


class _Batch:
    """The packets that are sent next. Only the thread of the event loop uses it."""

    def __init__(self) -> None:
        self._memory = ffi.new("char[]", AT_ONCE * _SLOT_BYTES)
        self._slots = [self._memory + place * _SLOT_BYTES for place in range(AT_ONCE)]
        self._contents = [ffi.buffer(slot, _SLOT_BYTES) for slot in self._slots]
        self._size = ffi.new("int *")
        start = int(ffi.cast("uintptr_t", self._memory))
        # `struct iovec`: address and size.
        self._parts = (ctypes.c_size_t * (2 * AT_ONCE))()
        self._address = (ctypes.c_ubyte * _ADDRESS_BYTES)()
        self._name = memoryview(self._address).cast("B")
        self._messages = (_Message * AT_ONCE)()
        for place, message in enumerate(self._messages):
            self._parts[2 * place] = start + place * _SLOT_BYTES
            message.header.name = ctypes.addressof(self._address)
            message.header.parts = ctypes.addressof(self._parts) + 2 * place * ctypes.sizeof(ctypes.c_size_t)
            message.header.part_count = 1
        self._start = ctypes.addressof(self._messages)
        self._name_bytes = 0
        call = getattr(ctypes.CDLL(None), "sendmmsg", None) if sys.platform == "linux" else None
        if call is not None:
            call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int)
        self._call: Callable[..., int] | None = call

    def encrypt(self, place: int, packets: Sequence[bytes], protect: Callable[..., int], session: Any) -> int:
        """Encrypt packets into the places from `place`. Returns the place after them.

        Raises pylibsrtp.Error, ValueError for a packet that is too long.
        """
        size, slots, contents, parts = self._size, self._slots, self._contents, self._parts
        for packet in packets:
            length = len(packet)
            if length > _LONGEST_BYTES:
                raise ValueError(f"a packet of {length} bytes is too long")
            contents[place][0:length] = packet
            size[0] = length
            if code := protect(session, slots[place], size):
                raise pylibsrtp.Error(pylibsrtp.ERRORS[code])
            parts[2 * place + 1] = size[0]
            place += 1
        return place

    def send(self, count: int, descriptor: int, address: bytes) -> int:
        """Send the first `count` packets. Returns how many the system took, or a negative number."""
        if self._call is None:
            return 0
        if self._name_bytes != len(address):
            self._name_bytes = len(address)
            for message in self._messages:
                message.header.name_bytes = len(address)
        self._name[0 : len(address)] = address
        return self._call(descriptor, self._start, count, 0)

    def content(self, place: int) -> bytes:
        """Return an encrypted packet."""
        content: bytes = self._contents[place][0 : self._parts[2 * place + 1]]
        return content


_batch = _Batch()


class PacketSender:
    """Sends the packets of one viewer to one address."""

    def __init__(self, transport: Any, address: tuple[str, int]) -> None:
        """`transport`: asyncio's, or what aioice has in its place for a TURN server."""
        self._transport, self._address = transport, address
        relayed = isinstance(transport, turn.TurnTransport)
        own: Any = None if relayed else transport.get_extra_info("socket")
        self._name = None if own is None else _name(own.family, address)
        self._socket = own

    def send(self, cipher: pylibsrtp.Session, packets: Sequence[bytes], report: bytes | None = None) -> None:
        """Encrypt and send RTP packets, and a `report`, RTCP, after them.

        Raises ConnectionError, pylibsrtp.Error, ValueError for a packet that is too long.
        """
        session, encrypt = cipher._srtp[0], _batch.encrypt
        while len(packets) >= AT_ONCE:
            self._flush(encrypt(0, packets[:AT_ONCE], lib.srtp_protect, session))
            packets = packets[AT_ONCE:]
        count = encrypt(0, packets, lib.srtp_protect, session)
        if report is not None:
            count = encrypt(count, (report,), lib.srtp_protect_rtcp, session)
        self._flush(count)

    def _flush(self, count: int) -> None:
        number = 0 if self._socket is None else self._socket.fileno()
        if number < 0:
            raise ConnectionError("the viewer's socket is closed")
        sent = 0
        # What waits in the transport goes first.
        if self._name is not None and not self._transport.get_write_buffer_size():
            sent = max(_batch.send(count, number, self._name), 0)
        for place in range(sent, count):
            # asyncio's transport waits until the socket takes more, and handles errors.
            self._transport.sendto(_batch.content(place), self._address)


def _name(family: int, address: tuple[str, int]) -> bytes | None:
    """Return an address as the kernel has it. None: it is not that of a viewer of this family."""
    host, port = address
    try:
        packed = socket.inet_pton(family, host)
    except (OSError, ValueError):
        return None
    head = struct.pack("=H", family) + struct.pack(">H", port)
    if family == socket.AF_INET:
        return head + packed + bytes(8)
    return head + bytes(4) + packed + bytes(4)
