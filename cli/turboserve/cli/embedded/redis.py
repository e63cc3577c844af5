"""Redis in memory for frequently changing data, with a password and an append-only file for restarts."""

from __future__ import annotations

from pathlib import Path

import redis.asyncio
import redis.exceptions

from turboserve.cli.embedded import binaries
from turboserve.cli.embedded.ports import HOST
from turboserve.cli.embedded.server import (
    EmbeddedServer,
    NotReadyError,
    ServerUnhealthyError,
    ServerUnresponsiveError,
)

CONFIG_FILE = "redis.conf"
MAX_MEMORY_BYTES = 2**30
PROBE_KEY = "turboserve:supervisor"
PROBE_TTL_S = 60
REWRITE_BYTES = 64 << 20
"""A smaller append-only file is not rewritten."""
DISK_ERROR = "MISCONF"
"""Prefix of Redis's error to writes and pings while it cannot write its file. Redis recovers by itself."""


class RedisServer(EmbeddedServer):
    """Redis with an append-only file.

    Sessions continue even if all data is lost. The data is stored all the same, since sessions' visual
    context is rebuilt from it. A loss of power costs the writes of the last second, and a killed process
    costs nothing. Redis rewrites the file when it has doubled in size.
    """

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
        # A file instead of arguments, since every user can read a password on a command line.
        self.write_config(
            CONFIG_FILE,
            f"""\
bind {HOST}
port {self.port}
requirepass {self.password}
dir "{self.home}"
save ""
appendonly yes
appendfsync everysec
# While the file is rewritten the disk is busy enough; what a loss of power may cost then is visual context.
no-appendfsync-on-rewrite yes
auto-aof-rewrite-percentage 100
auto-aof-rewrite-min-size {REWRITE_BYTES}
# A server that was killed leaves half a command behind.
aof-load-truncated yes
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
        except redis.exceptions.ResponseError as error:
            # A restart would lose the data that Redis could not write, and would not free disk space.
            if not str(error).startswith(DISK_ERROR):
                raise NotReadyError(f"redis: {error}") from error
        except redis.exceptions.TimeoutError as error:
            raise ServerUnresponsiveError(f"redis: {error}") from error
        except (redis.exceptions.RedisError, OSError) as error:
            raise NotReadyError(f"redis: {error}") from error
        finally:
            await client.aclose()

    async def alive(self) -> None:
        """Set a key that expires. Raises ServerUnhealthyError if Redis refuses it, or NotReadyError."""
        client = self._client()
        try:
            await client.set(PROBE_KEY, 1, ex=PROBE_TTL_S)
        except redis.exceptions.ResponseError as error:
            raise ServerUnhealthyError(f"redis: {error}") from error
        except (redis.exceptions.RedisError, OSError) as error:
            raise NotReadyError(f"redis: {error}") from error
        finally:
            await client.aclose()

    def _client(self) -> redis.asyncio.Redis:
        return redis.asyncio.Redis.from_url(self.url, socket_timeout=2.0, socket_connect_timeout=2.0)
