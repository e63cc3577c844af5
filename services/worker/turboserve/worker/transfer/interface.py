"""Find the network interface of the transfer, and confine the libraries to it.

The control channel and the listeners of gloo, NIXL and NCCL all use one address of one interface. gloo takes
the address itself. Environment variables name the interface to NIXL and NCCL.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

HOSTNAME = "hostname"
"""Value of `transfer_host` for the address of the machine's own name, such as a container's."""
ADDRESSES_LIMIT = 16
INFINIBAND = Path("/sys/class/infiniband")


class InterfaceError(ValueError):
    """The setting `transfer_host` names no single address of this machine."""


@dataclass(frozen=True)
class Interface:
    """One address of this machine, and its interface."""

    address: str = "127.0.0.1"
    name: str = "lo"
    addresses: tuple[str, ...] = ("127.0.0.1",)
    """All addresses of the interface. Connections that leave by it may come from any of them."""


def find_interface(host: str) -> Interface:
    """What `transfer_host` means on this machine.

    Args:
        host: An address, the name of an interface, a network such as `10.0.0.0/8` (the machine's first
            address in it), `hostname` (the address of the machine's own name), or a name that resolves to an
            address of this machine.

    Raises:
        InterfaceError: It means every address, or none of this machine's.
    """
    if host == HOSTNAME:
        return _named(socket.gethostname(), host)
    own = _own_addresses()
    if host in own:
        return _interface(own[host][0], host, own)
    try:
        wanted = ipaddress.ip_network(host)
    except ValueError:
        return _named(host, host)
    if wanted.network_address.is_unspecified:
        raise InterfaceError(
            f"transfer_host: {host} is every interface; name one address, an interface, a network "
            f"such as 10.0.0.0/8, or `{HOSTNAME}`"
        )
    for name, addresses in own.items():
        for address in addresses:
            if ipaddress.ip_address(address) in wanted:
                return _interface(address, name, own)
    if wanted.num_addresses == 1 and wanted.is_loopback:
        # Every address of 127.0.0.0/8 belongs to the machine, though only one is listed.
        return Interface(host, _loopback(own), (host, *own.get(_loopback(own), ())))
    raise InterfaceError(f"transfer_host: this machine has no address in {host}")


def confine_libraries(interface: Interface) -> None:
    """Restrict the TCP use of UCX (below NIXL) and NCCL to this interface.

    Both libraries read environment variables when they start; a variable that is already set stays. UCX's
    list names this interface and the InfiniBand ports. A list of exclusions would let UCX listen on every
    interface that appears later.
    """
    devices = [interface.name, *_infiniband_ports()]
    os.environ.setdefault("UCX_NET_DEVICES", ",".join(devices))
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface.name}")


def _infiniband_ports() -> list[str]:
    """InfiniBand ports as UCX names them, such as `mlx5_0:1`. They listen on no IP address."""
    ports = INFINIBAND.glob("*/ports/*")
    return sorted(f"{port.parent.parent.name}:{port.name}" for port in ports)


def _named(name: str, host: str) -> Interface:
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError as error:
        raise InterfaceError(
            f"transfer_host: {host}: {name!r} is no interface and no name: {error}"
        ) from None
    own = _own_addresses()
    for address in found:
        for interface, addresses in own.items():
            if address in addresses:
                return _interface(address, interface, own)
    raise InterfaceError(f"transfer_host: {host}: {name!r} is {', '.join(found)}, not this machine")


def _own_addresses() -> dict[str, list[str]]:
    """Addresses by interface, without link-local ones, which need a scope."""
    own: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        internet = [one.address for one in entries if one.family in (socket.AF_INET, socket.AF_INET6)]
        usable = [address for address in internet if "%" not in address]
        if usable:
            own[name] = usable
    return own


def _interface(address: str, name: str, own: dict[str, list[str]]) -> Interface:
    others = [other for other in own[name] if other != address]
    return Interface(address, name, (address, *others)[:ADDRESSES_LIMIT])


def _loopback(own: dict[str, list[str]]) -> str:
    return next((name for name, addresses in own.items() if "127.0.0.1" in addresses), "lo")
