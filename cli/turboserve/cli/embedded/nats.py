"""NATS with JetStream on disk and one user per service."""

from __future__ import annotations

import json
import secrets
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import api
from nats.js.errors import APIError, NoStreamResponseError

from turboserve import broker_accounts
from turboserve.cli.embedded import binaries
from turboserve.cli.embedded.ports import HOST
from turboserve.cli.embedded.server import (
    EmbeddedServer,
    NotReadyError,
    ServerFullError,
    ServerUnhealthyError,
    ServerUnresponsiveError,
)
from turboserve.subjects import ADMIN

MAX_PAYLOAD_BYTES = 8 * 2**20
"""Maximum size of a message. A chunk at 720p is well below it. Latents are sent raw."""
CONFIG_FILE = "nats.conf"
LIMIT_FILE = "max_file_store"
STORE_SHARE = 0.5
"""Share of the disk space that is free or already used by the log. A log with removed parts may need twice
its size on disk until the broker has compacted it."""
MAX_STORE_BYTES = 64 * 2**30
MIN_STORE_BYTES = 16 * 2**20
SYSTEM_ACCOUNT = "SYS"
HEALTH_USER = "health"
"""The supervisor's user in the system account. It may only request the server's health."""
HEALTH_SUBJECT = "$SYS.REQ.SERVER.PING.HEALTHZ"
HEALTH_INBOX = "_INBOX_health"
HEALTH_ANSWER_S = 2.0
PROBE_STREAM = api.StreamConfig(
    name="SUPERVISOR",
    description="What the supervisor appends to see that appends are stored",
    subjects=["supervisor.probe"],
    storage=api.StorageType.FILE,
    # No `max_bytes`, since the broker would reserve it, and other streams may have reserved everything.
    max_msgs=1,
)
APPEND_ANSWER_S = 2.0


class NatsServer(EmbeddedServer):
    """NATS with JetStream.

    `passwords` has one entry per user: `admin`, and services with the permissions of `broker_accounts`.

    There is no HTTP monitor, since it would show connections and subjects to every user of the machine.
    Health is requested in the system account. Its password is new in each process that prepares the server.
    """

    name = "nats"
    # On SIGTERM, nats-server notifies its clients and closes its files.
    stop_signal = signal.SIGTERM
    # The health request and the append have their own connections and limits.
    answer_s = 2 * HEALTH_ANSWER_S + 2 * APPEND_ANSWER_S

    def __init__(
        self,
        directory: Path,
        port: int,
        passwords: Mapping[str, str],
        max_store_bytes: int | None = None,
        ping_interval_s: float | None = None,
    ) -> None:
        """Set the server up.

        Args:
            max_store_bytes: Storage limit of JetStream. None: a share of the disk.
            ping_interval_s: Interval of the pings to each client. After two pings without an answer, the
                server disconnects the client. None: the server's default.
        """
        super().__init__(directory, port)
        self._max_store_bytes = max_store_bytes
        self._ping_interval_s = ping_interval_s
        self.passwords = passwords
        self._health_password = secrets.token_urlsafe(24)

    @property
    def address(self) -> str:
        """The URL without credentials. Each service adds its own user and password."""
        return f"nats://{HOST}:{self.port}"

    def url(self, user: str = ADMIN) -> str:
        return f"nats://{user}:{self.passwords[user]}@{HOST}:{self.port}"

    async def prepare(self) -> None:
        self.make_directory()
        self.write_config(CONFIG_FILE, self.config())

    def program(self) -> list[str]:
        return [str(binaries.nats_server()), "-c", f"{self.home}/{CONFIG_FILE}"]

    async def probe(self) -> None:
        """Check that the broker serves clients and that JetStream has recovered its streams.

        Only `alive` checks that appends work. On a full disk, an append may fail before the first probe, and
        the broker still serves requests that need no space.
        """
        await self.healthz(js_enabled_only=True)

    async def alive(self) -> None:
        """Request the health, then append to the supervisor's own stream.

        A stream whose file could not be written takes no appends any more, while other streams do: the health
        names it. An append reveals what the health does not, such as a store that has reached its limit.
        """
        await self.healthz()
        await append(self.url())

    async def healthz(self, *, js_enabled_only: bool = False) -> None:
        """Request the server's health on a new connection. Raises NotReadyError with the reason."""
        await server_health(
            self.address, self._health_password, {"js-enabled-only": True} if js_enabled_only else {}
        )

    def store_limit(self) -> int:
        """Return the storage limit of JetStream, bytes.

        The limit never becomes lower, since streams have reserved it. A broker with a lower limit would
        refuse every change of a stream.
        """
        if self._max_store_bytes is not None:
            return self._max_store_bytes
        known = self.directory / LIMIT_FILE
        before = int(known.read_text()) if known.exists() else 0
        held = sum(path.stat().st_size for path in (self.directory / "jetstream").rglob("*.blk"))
        share = int(STORE_SHARE * (shutil.disk_usage(self.directory).free + held))
        limit = max(before, min(MAX_STORE_BYTES, max(MIN_STORE_BYTES, share)))
        self.write_config(LIMIT_FILE, str(limit))
        return limit

    def config(self) -> str:
        """Return the server's configuration. Strings are quoted as in JSON, which NATS can read."""
        accounts = broker_accounts.accounts({user: json.dumps(word) for user, word in self.passwords.items()})
        return f"""\
server_name: "turboserve"
host: "{HOST}"
port: {self.port}
max_payload: {MAX_PAYLOAD_BYTES}
{self._pings()}jetstream {{
  store_dir: {json.dumps(self.home)}
  max_file_store: {self.store_limit()}
}}
system_account: {SYSTEM_ACCOUNT}
accounts {{
  {SYSTEM_ACCOUNT} {{
    users = [
      {self._health_user()}
    ]
  }}
{accounts}}}
"""

    def _pings(self) -> str:
        if self._ping_interval_s is None:
            return ""
        return f'ping_interval: "{round(1000 * self._ping_interval_s)}ms"\nping_max: 2\n'

    def _health_user(self) -> str:
        return (
            f"{{user: {json.dumps(HEALTH_USER)}, password: {json.dumps(self._health_password)}, "
            f"permissions: {{publish: {{allow: [{json.dumps(HEALTH_SUBJECT)}]}}, "
            f'subscribe: {{allow: ["{HEALTH_INBOX}.>"]}}}}}}'
        )


async def server_health(url: str, password: str, options: Mapping[str, Any]) -> None:
    """Request the health of the broker at `url` as the health user.

    `options` are those of nats-server's `/healthz`, such as `{"js-enabled-only": True}`.

    Raises ServerUnhealthyError with the broker's reason, ServerUnresponsiveError if the broker does not
    answer, and NotReadyError if there is no connection.
    """

    async def ignore(_: Exception) -> None:
        """Errors are raised to the caller as well."""

    try:
        client = await nats.connect(
            url,
            name=HEALTH_USER,
            user=HEALTH_USER,
            password=password,
            inbox_prefix=HEALTH_INBOX.encode(),
            allow_reconnect=False,
            connect_timeout=HEALTH_ANSWER_S,
            error_cb=ignore,
        )
        try:
            answer = await _request(client, HEALTH_SUBJECT, json.dumps(dict(options)).encode())
        finally:
            await client.close()
        health = json.loads(answer.data)
    except (TimeoutError, nats.errors.TimeoutError) as error:
        raise ServerUnresponsiveError(f"nats: {error!r}") from error
    except (OSError, nats.errors.Error, ValueError) as error:
        raise NotReadyError(f"nats: {error!r}") from error
    data = health.get("data", {})
    if data.get("status") != "ok":
        raise ServerUnhealthyError(f"nats: {data.get('error') or health.get('error') or data.get('status')}")


async def _request(client: Client, subject: str, data: bytes) -> Msg:
    """Send a request, and repeat it until an answer arrives.

    A server that has just started accepts clients before it subscribes to its own subjects. Raises
    TimeoutError after HEALTH_ANSWER_S.
    """
    timeout_s, left_s = 0.1, HEALTH_ANSWER_S
    while True:
        try:
            return await client.request(subject, data, timeout=min(timeout_s, left_s))
        except TimeoutError:
            left_s -= timeout_s
            timeout_s *= 2
            if left_s <= 0:
                raise


async def append(url: str) -> None:
    """Append to the supervisor's stream at the broker `url`.

    The user in `url` must be allowed to create the stream.

    Raises ServerUnhealthyError if the append is not acknowledged, ServerFullError if the broker refuses it,
    and NotReadyError if the broker does not answer at all.
    """

    async def ignore(_: Exception) -> None:
        """Errors are raised to the caller as well."""

    try:
        client = await nats.connect(
            url, name="supervisor", allow_reconnect=False, connect_timeout=APPEND_ANSWER_S, error_cb=ignore
        )
    except (OSError, TimeoutError, nats.errors.Error) as error:
        raise NotReadyError(f"nats: {error!r}") from error
    try:
        jetstream = client.jetstream(timeout=APPEND_ANSWER_S)
        subject = PROBE_STREAM.subjects[0] if PROBE_STREAM.subjects else ""
        try:
            await jetstream.publish(subject)
        except NoStreamResponseError:
            await jetstream.add_stream(PROBE_STREAM)
            await jetstream.publish(subject)
    except APIError as error:
        raise ServerFullError(f"nats: append refused: {error.description}") from error
    except (TimeoutError, nats.errors.TimeoutError) as error:
        raise ServerUnhealthyError(
            f"nats: an append was not acknowledged in {APPEND_ANSWER_S:.0f} s"
        ) from error
    except (OSError, nats.errors.Error) as error:
        raise NotReadyError(f"nats: {error!r}") from error
    finally:
        await client.close()
