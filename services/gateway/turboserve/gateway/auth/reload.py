"""Rereads the file of keys when it changes, so that keys can be added or revoked while sessions play."""

from __future__ import annotations

import asyncio
from pathlib import Path

from turboserve import logs
from turboserve.gateway.auth import key_file
from turboserve.gateway.auth.access import Keys
from turboserve.gateway.auth.key_file import KeyFileError

log = logs.get("auth")

LOOK_EVERY_S = 1.0


async def follow(keys: Keys, path: Path) -> None:
    """Read the file again whenever it changes; never returns.

    An unusable file is logged and leaves the keys unchanged: an editing mistake must not lock all clients
    out. A file without keys admits no client.
    """
    seen = None
    while True:
        stamp = _stamp(path)
        if stamp != seen:
            seen = stamp
            try:
                keys.replace(key_file.read(path))
            except KeyFileError as error:
                log.error("api keys unchanged", reason=str(error))
            else:
                tenants = {key.tenant for key in keys.stored}
                log.info("api keys read", file=str(path), keys=len(keys.stored), tenants=len(tenants))
        await asyncio.sleep(LOOK_EVERY_S)


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode, found.st_uid)
