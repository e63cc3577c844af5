"""Ports that several processes choose at the same time."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from turboserve import free_ports

CHOOSES = "from turboserve.free_ports import any_free; print(any_free(), flush=True); input()"


def test_a_port_that_another_process_has_chosen_is_not_chosen_before_its_server_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stacks start at the same time. Of two that chose one port, one could not start its server."""
    command = [sys.executable, "-c", CHOOSES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        port = int(other.stdout.readline())
        monkeypatch.setattr(free_ports, "LOWEST", port)
        monkeypatch.setattr(free_ports, "HIGHEST", port + 1)
        assert free_ports.is_free(port)
        with pytest.raises(OSError, match="no free port found") as refused:
            free_ports.any_free()
        assert refused.value.errno == errno.EADDRINUSE
        other.communicate("\n")
    assert free_ports.any_free() == port


def test_a_reservation_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_ports.any_free()
    monkeypatch.setattr(free_ports, "LOWEST", port)
    monkeypatch.setattr(free_ports, "HIGHEST", port + 1)
    with pytest.raises(OSError, match="no free port found"):
        free_ports.any_free()
    monkeypatch.setattr(free_ports, "RESERVED_S", -1.0)
    assert free_ports.any_free() == port


def test_ports_that_are_left_out_are_not_chosen() -> None:
    with pytest.raises(OSError, match="no free port found"):
        free_ports.any_free(besides=range(free_ports.LOWEST, free_ports.HIGHEST))
