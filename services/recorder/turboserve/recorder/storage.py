"""Object storage: a local folder, or any S3-compatible service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.exceptions import NotFoundError as ObjectNotFoundError
from obstore.store import LocalStore, ObjectStore, S3Store

from turboserve.contracts.errors import NotFoundError, UnavailableError
from turboserve.recorder.settings import Settings

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Config

T = TypeVar("T")


class StorageError(UnavailableError):
    """Object storage does not answer, or refuses. The same request may succeed later."""

    code, title = "storage_unavailable", "Object storage unavailable"


def open_store(settings: Settings) -> ObjectStore:
    """Open the storage that the settings name. Creates a local folder. Raises OSError and ValueError."""
    parts = urlsplit(settings.recordings_url)
    if parts.scheme == "file":
        folder = Path(parts.path).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return LocalStore(folder)
    config: S3Config = {"region": settings.recordings_s3_region}
    client: ClientConfig = {"timeout": timedelta(seconds=settings.recording_storage_timeout_s)}
    if settings.recordings_s3_endpoint is not None:
        config["endpoint"] = settings.recordings_s3_endpoint
        client["allow_http"] = settings.recordings_s3_endpoint.startswith("http://")
    if settings.recordings_s3_access_key_id is not None:
        config["access_key_id"] = settings.recordings_s3_access_key_id.get_secret_value()
    if settings.recordings_s3_secret_access_key is not None:
        config["secret_access_key"] = settings.recordings_s3_secret_access_key.get_secret_value()
    return S3Store(parts.netloc, prefix=parts.path.strip("/") or None, config=config, client_options=client)


class Storage:
    """Objects by path. Every method raises StorageError.

    `failing` has the reason while the last write or listing failed.
    """

    def __init__(self, store: ObjectStore, timeout_s: float) -> None:
        self._store, self._timeout_s = store, timeout_s
        self.failing: str | None = None

    async def put(self, path: str, data: bytes) -> None:
        """Store an object, wholly or not at all. An object of this path is replaced."""
        await self._watched(obstore.put_async(self._store, path, data))

    async def get(self, path: str) -> bytes:
        """Return an object. Raises NotFoundError."""
        async with self._bounded():
            try:
                answer = await obstore.get_async(self._store, path)
                return bytes(await answer.bytes_async())
            except (ObjectNotFoundError, FileNotFoundError):
                raise NotFoundError(f"there is no object {path}", field="item") from None

    async def listing(self, folder: str) -> list[tuple[str, int]]:
        """Return path below `folder` and size of every object in it, in no particular order."""
        return await self._watched(self._listing(folder))

    async def delete(self, folder: str) -> int:
        """Delete every object in `folder`. Returns how many there were. A repeat deletes the rest."""
        found = await self.listing(folder)
        if found:
            paths = [f"{folder}/{name}" for name, _ in found]
            await self._watched(obstore.delete_async(self._store, paths))
        return len(found)

    async def _listing(self, folder: str) -> list[tuple[str, int]]:
        found = []
        async for batch in obstore.list(self._store, folder):
            found += [(meta["path"].removeprefix(f"{folder}/"), meta["size"]) for meta in batch]
        return found

    async def _watched(self, work: Awaitable[T]) -> T:
        try:
            async with self._bounded():
                answer = await work
        except StorageError as error:
            self.failing = error.detail
            raise
        self.failing = None
        return answer

    @asynccontextmanager
    async def _bounded(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError:
            raise StorageError(f"no answer within {self._timeout_s:g} s", retry_after_s=1.0) from None
        except (BaseError, OSError) as error:
            reason = " ".join(str(error).split())[:300]
            raise StorageError(f"{type(error).__name__}: {reason}", retry_after_s=1.0) from None
