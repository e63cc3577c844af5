"""The decode workers of a stack: processes of the supervisor, which decode what the workers denoise."""

from __future__ import annotations

from collections.abc import Sequence

from turboserve.broker_accounts import worker_user
from turboserve.cli.embedded import Ports
from turboserve.cli.embedded.ports import HOST

DECODE_WORKER = "decode-worker"
DECODE = {DECODE_WORKER: "turboserve.worker"}
"""The module that `python -m` runs for it."""
KEY = "TURBOSERVE_DECODE_KEY"


class DecodePool:
    """Their names, users at the broker, and settings."""

    def __init__(self, names: Sequence[str], ports: Ports) -> None:
        """`names`: of the processes. Empty: each worker decodes its own chunks."""
        self.names = names
        self._ports = ports

    @property
    def identities(self) -> list[str]:
        """Their broker identities. A pool's workers have others."""
        return [name.replace("-", "") for name in self.names]

    @property
    def users(self) -> dict[str, str]:
        """Process → its broker user."""
        return dict(zip(self.names, map(worker_user, self.identities), strict=True))

    def worker_settings(self, key: str) -> dict[str, str]:
        """Return the settings of the workers whose chunks they decode."""
        addresses = (f"tcp://{HOST}:{self._port(name)}" for name in self.names)
        return {
            "TURBOSERVE_ROLES": "denoise",
            "TURBOSERVE_DECODE_WORKERS": ",".join(addresses),
            KEY: key,
        }

    def settings(self, name: str, key: str) -> dict[str, str]:
        """Return the settings of one of them."""
        return {
            "TURBOSERVE_ROLES": "decode",
            "TURBOSERVE_TRANSFER_HOST": HOST,
            "TURBOSERVE_TRANSFER_PORT": str(self._port(name)),
            KEY: key,
        }

    def _port(self, name: str) -> int:
        return self._ports.get(f"decode.{name}")
