"""NATS with JetStream on disk and one user per service."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from turboserve.cli.embedded import binaries
from turboserve.cli.embedded.layout import write_private
from turboserve.cli.embedded.ports import HOST
from turboserve.cli.embedded.server import EmbeddedServer, NotReady

MAX_PAYLOAD_BYTES = 8 * 2**20
"""A chunk at 720p is well below this; latents travel raw."""
MAX_STORE_BYTES = 16 * 2**30
ADMIN = "admin"
"""The user of tests and tools, which may do everything."""

Permissions = Callable[[str], Mapping[str, Sequence[str]]]
"""Service name → what it may `publish` and `subscribe` to."""


class NatsServer(EmbeddedServer):
    """`passwords` has one entry per user; every user but `admin` gets `permissions(user)`."""

    name = "nats"
    # nats-server on SIGTERM says goodbye to its clients and closes its files.
    stop_signal = signal.SIGTERM

    def __init__(
        self,
        directory: Path,
        port: int,
        monitor_port: int,
        passwords: Mapping[str, str],
        permissions: Permissions,
    ) -> None:
        super().__init__(directory, port)
        self.monitor_port = monitor_port
        self.passwords = passwords
        self.permissions = permissions

    @property
    def address(self) -> str:
        """Without credentials: each service adds its own user and password."""
        return f"nats://{HOST}:{self.port}"

    def url(self, user: str = ADMIN) -> str:
        return f"nats://{user}:{self.passwords[user]}@{HOST}:{self.port}"

    @property
    def monitor_url(self) -> str:
        return f"http://{HOST}:{self.monitor_port}"

    async def prepare(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(self._config_file, self.config())

    def program(self) -> list[str]:
        return [str(binaries.nats_server()), "-c", str(self._config_file)]

    async def probe(self) -> None:
        """Ready when JetStream is, which the server says only once it accepts clients."""
        await _get(self.port, None)
        status, body = await _get(self.monitor_port, "/healthz")
        if status != 200:
            raise NotReady(f"nats: {body.decode(errors='replace')}")

    def config(self) -> str:
        """The server's configuration file. Strings are quoted as JSON, which NATS reads as well."""
        users = ",\n    ".join(self._user(name) for name in self.passwords)
        return f"""\
server_name: "turboserve"
host: "{HOST}"
port: {self.port}
http: "{HOST}:{self.monitor_port}"
max_payload: {MAX_PAYLOAD_BYTES}
jetstream {{
  store_dir: {json.dumps(str(self.directory))}
  max_file_store: {MAX_STORE_BYTES}
}}
authorization {{
  users = [
    {users}
  ]
}}
"""

    @property
    def _config_file(self) -> Path:
        return self.directory / "nats.conf"

    def _user(self, name: str) -> str:
        entry = f"user: {json.dumps(name)}, password: {json.dumps(self.passwords[name])}"
        if name == ADMIN:
            return f"{{{entry}}}"
        allowed = self.permissions(name)
        publish, subscribe = (json.dumps(list(allowed[key])) for key in ("publish", "subscribe"))
        # allow_responses: a service may answer a request without being allowed to write to inboxes at will.
        return (
            f"{{{entry}, permissions: {{publish: {{allow: {publish}}}, subscribe: {{allow: {subscribe}}}, "
            'allow_responses: {max: 1000, expires: "60s"}}}'
        )


async def _get(port: int, path: str | None) -> tuple[int, bytes]:
    """GET `path`; with None only look whether somebody listens. Raises NotReady when nobody does."""
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(HOST, port), 2.0)
        try:
            if path is None:
                return 0, b""
            writer.write(f"GET {path} HTTP/1.0\r\nHost: {HOST}\r\n\r\n".encode())
            answer = await asyncio.wait_for(reader.read(), 2.0)
        finally:
            writer.close()
    except (OSError, TimeoutError) as error:
        raise NotReady(f"nats: {error}") from error
    head, _, body = answer.partition(b"\r\n\r\n")
    parts = head.split(b" ", 2)
    return (int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else 0), body
