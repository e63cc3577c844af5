"""Redis for what is hot: in memory only, behind a password."""

from __future__ import annotations

from pathlib import Path

import redis.asyncio
import redis.exceptions

from turboserve.cli.embedded import binaries
from turboserve.cli.embedded.ports import HOST
from turboserve.cli.embedded.server import EmbeddedServer, NotReady, UnhealthyError

CONFIG_FILE = "redis.conf"
MAX_MEMORY_BYTES = 2**30
PROBE_KEY = "turboserve:supervisor"
PROBE_TTL_S = 60


class RedisServer(EmbeddedServer):
    """Everything in it may be lost (the design: "hot and may be lost"), so nothing is written to disk."""

    name = "redis"
    stop_grace_s = 3.0

    def __init__(self, directory: Path, port: int, password: str) -> None:
        super().__init__(directory, port)
        self.password = password

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@{HOST}:{self.port}/0"

    async def prepare(self) -> None:
        self.make_directory()
        # A file and not arguments: a password on a command line is everybody's.
        self.write_config(
            CONFIG_FILE,
            f"""\
bind {HOST}
port {self.port}
requirepass {self.password}
dir "{self.home}"
save ""
appendonly no
maxmemory {MAX_MEMORY_BYTES}
maxmemory-policy volatile-ttl
""",
        )

    def program(self) -> list[str]:
        return [str(binaries.redis_server()), f"{self.home}/{CONFIG_FILE}"]

    async def probe(self) -> None:
        client = self._client()
        try:
            await client.ping()
        except (redis.exceptions.RedisError, OSError) as error:
            raise NotReady(f"redis: {error}") from error
        finally:
            await client.aclose()

    async def alive(self) -> None:
        """Sets a key that expires."""
        client = self._client()
        try:
            await client.set(PROBE_KEY, 1, ex=PROBE_TTL_S)
        except redis.exceptions.ResponseError as error:
            raise UnhealthyError(f"redis: {error}") from error
        except (redis.exceptions.RedisError, OSError) as error:
            raise NotReady(f"redis: {error}") from error
        finally:
            await client.aclose()

    def _client(self) -> redis.asyncio.Redis:
        return redis.asyncio.Redis.from_url(self.url, socket_timeout=2.0, socket_connect_timeout=2.0)
