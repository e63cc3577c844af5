"""A second socket at the address of a viewer's first, for what can wait until the process is awake anyway.

A viewer acknowledges each message and reports its reception every second. To wake up for such a datagram
costs several times as much as to handle it. So the kernel puts them into another socket, which nothing waits
for. Requests, lost packets and goodbyes still wake the process up.

Source: socket(7), `SO_REUSEPORT` and `SO_ATTACH_REUSEPORT_CBPF`. Only Linux has it.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
from contextlib import suppress
from typing import Any

SO_ATTACH_REUSEPORT_CBPF = 51
"""Source: asm-generic/socket.h. The module `socket` does not name it."""
ACKNOWLEDGMENT_BYTES = 65
"""Largest datagram that waits. An acknowledgment without gaps has 28 bytes, and its encryption adds 37 at
most. The shortest request, `{"type":"ping"}`, comes in 73."""
HANDSHAKE_BYTES = 53
"""Size of the shortest SCTP packets at most, which end a handshake or a connection. They do not wait."""
REPORT_MORE_BYTES = 20
"""What encryption adds to a report of reception at most. Another packet has 12 or more."""
_APPLICATION_DATA, _RECEIVER_REPORT = 23, 201
_LATER, _AT_ONCE = 1, 0
"""What the program returns: the sockets of an address are numbered in the order in which they were bound."""

_LOAD_SIZE, _LOAD_8, _LOAD_16 = 0x80, 0x30, 0x28
_EQUAL, _GREATER = 0x15, 0x25
_AND, _ADD, _SHIFT_LEFT, _SUBTRACT_X, _TO_X = 0x54, 0x04, 0x64, 0x1C, 0x07
_RETURN = 0x06
_PROGRAM = (
    # Each row: code, how many rows to skip if the comparison holds, and if it does not, operand.
    (_LOAD_SIZE, 0, 0, 0),
    (_GREATER, 16, 0, ACKNOWLEDGMENT_BYTES),
    (_LOAD_8, 0, 0, 0),
    (_EQUAL, 11, 0, _APPLICATION_DATA),
    (_AND, 0, 0, 0xC0),
    (_EQUAL, 0, 12, 0x80),
    (_LOAD_8, 0, 0, 1),
    (_EQUAL, 0, 10, _RECEIVER_REPORT),
    # The report's own size is not encrypted: words, less one.
    (_LOAD_16, 0, 0, 2),
    (_ADD, 0, 0, 1),
    (_SHIFT_LEFT, 0, 0, 2),
    (_TO_X, 0, 0, 0),
    (_LOAD_SIZE, 0, 0, 0),
    (_SUBTRACT_X, 0, 0, 0),
    (_GREATER, 3, 2, REPORT_MORE_BYTES),
    # Application data.
    (_LOAD_SIZE, 0, 0, 0),
    (_GREATER, 0, 1, HANDSHAKE_BYTES),
    (_RETURN, 0, 0, _LATER),
    (_RETURN, 0, 0, _AT_ONCE),
)


def second_socket(first: Any) -> socket.socket | None:
    """Return a socket that gets from now on what can wait, instead of `first`. None: the system has no such.

    `first` is a bound UDP socket.
    """
    if sys.platform != "linux":
        return None
    rows = b"".join(struct.pack("=HBBI", *row) for row in _PROGRAM)
    program = ctypes.create_string_buffer(rows, len(rows))
    second = None
    try:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        second = socket.socket(first.family, socket.SOCK_DGRAM)
        second.setblocking(False)
        second.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        second.bind(first.getsockname())
        described = struct.pack("@HP", len(_PROGRAM), ctypes.addressof(program))
        second.setsockopt(socket.SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, described)
    except OSError:
        # Without the program, either socket might get a request.
        if second is not None:
            second.close()
        # Nor may another process bind beside the first.
        with suppress(OSError):
            first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)
        return None
    return second
