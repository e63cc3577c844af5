"""Starts a program whose disk operations wait for `slow_disk.SlowDisk`: `python slow_disk_start.py NAME …`.

The kernel reports each operation of the program, and of all processes that it starts, to the process that
listens on the abstract socket NAME (seccomp user notification). This needs no rights and no compiler, and
works for any program, also for one without a C library. Standard library alone: servers start with it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import sys

OPERATIONS: dict[str, dict[str, tuple[int, ...]]] = {
    "x86_64": {"write": (18, 296, 328), "sync": (74, 75, 277, 306), "rename": (82, 264, 316)},
    "aarch64": {"write": (68, 70, 287), "sync": (82, 83, 84, 267), "rename": (38, 276)},
}
"""Machine → kind of operation → numbers of system calls.

write: pwrite64, pwritev, pwritev2. sync: fsync, fdatasync, sync_file_range, syncfs. A plain `write` is left
out, since sockets use it.
"""
PR_SET_NO_NEW_PRIVS = 38
SECCOMP = {"x86_64": 317, "aarch64": 277}
SET_MODE_FILTER = 1
NEW_LISTENER, WAIT_KILLABLE = 8, 32
LOAD_NUMBER, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
NOTIFY, ALLOW = 0x7FC00000, 0x7FFF0000


class _Instruction(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_ushort),
        ("jump_true", ctypes.c_ubyte),
        ("jump_false", ctypes.c_ubyte),
        ("value", ctypes.c_uint),
    ]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Instruction))]


def listener() -> int:
    """Have the kernel report this process's disk operations. Returns the descriptor. Raises OSError."""
    machine = platform.machine()
    if machine not in OPERATIONS:
        raise OSError(f"the system calls of {machine} are not known")
    numbers = [number for kind in OPERATIONS[machine].values() for number in kind]
    code = [_Instruction(LOAD_NUMBER, 0, 0, 0)]
    for place, number in enumerate(numbers):
        code.append(_Instruction(JUMP_IF_EQUAL, len(numbers) - place, 0, number))
    code += [_Instruction(RETURN, 0, 0, ALLOW), _Instruction(RETURN, 0, 0, NOTIFY)]
    program = _Program(len(code), (_Instruction * len(code))(*code))
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")
    found = library.syscall(
        SECCOMP[machine], SET_MODE_FILTER, NEW_LISTENER | WAIT_KILLABLE, ctypes.byref(program)
    )
    if found < 0:
        raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")
    return int(found)


def main() -> None:
    name, *command = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{name}")
        descriptor = listener()
        socket.send_fds(connection, [b"x"], [descriptor])
        os.close(descriptor)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
