"""The asynchronous client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from turboserve.client.models import Model, Phase, Quality, SessionInfo, Worker
from turboserve.client.parameters import as_json
from turboserve.client.recording import AsyncRecording, listed
from turboserve.client.session import AsyncSession
from turboserve.client.transport import Transport

DEFAULT_URL = "http://127.0.0.1:8080"


class AsyncClient:
    """A client of one deployment. It may be used by many tasks of one event loop.

    >>> async with AsyncClient("http://127.0.0.1:8080") as client:
    ...     session = await client.create("a red circle moving left")
    """

    def __init__(
        self,
        base_url: str | Sequence[str] = DEFAULT_URL,
        *,
        key: str | None = None,
        timeout_s: float = 30.0,
        attempts: int = 5,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Connects with the first call.

        Args:
            base_url: Address of the gateway, `http://…` or `https://…`, or a list of addresses of gateways
                that serve the same sessions. The client leaves one that is silent. A stream learns further
                addresses from the gateway.
            key: API key. None: the gateway has no keys.
            timeout_s: Longest time for one request, seconds.
            attempts: Attempts of a request that got no answer, or that may be repeated. At least 1.
            transport: How HTTP requests are sent, for proxies and tests. Streams do not use it.
        """
        if attempts < 1:
            raise ValueError(f"attempts: {attempts} must be at least 1")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.transport = Transport(base_url, headers, timeout_s, attempts, transport)

    @property
    def base_url(self) -> str:
        """Address of the gateway in use."""
        return self.transport.base_url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections for requests. Streams are closed by their own blocks."""
        await self.transport.http.aclose()

    async def create(
        self,
        prompt: str,
        *,
        model: str | None = None,
        width: int | None = None,
        height: int | None = None,
        seed: int | None = None,
        metadata: Mapping[str, str] | None = None,
        controls: Mapping[str, Any] | None = None,
        quality: Quality | Mapping[str, Any] | None = None,
        max_lead_s: float | None = None,
        **more: Any,
    ) -> AsyncSession:
        """Create a session. It lasts until `AsyncSession.end`.

        A repeated request creates one session. Raises NoCapacityError, ProblemError.

        Args:
            prompt: What the video shows first.
            model: One of `models`. None: the gateway's default.
            width: Width of a frame, pixels: with `height`, one of the model's `sizes`. None: its default.
            height: Height of a frame, pixels.
            seed: The same model, prompt and seed give the same video where no chunk is lowered: see
                `quality`. None: random.
            metadata: The caller's own data, stored and returned.
            controls: Values of the model's controls, by name, from the first chunk on.
            quality: Limits of the quality. None: the worker may lower it to its own floor.
            max_lead_s: Maximum seconds of video that are generated ahead of the playhead. None: the worker's
                own.
            more: Further members of the request, for a newer gateway.
        """
        given = {
            "model": model,
            "width": width,
            "height": height,
            "seed": seed,
            "metadata": dict(metadata or {}),
            "controls": None if controls is None else dict(controls),
            "quality": as_json(quality),
            "max_lead_s": max_lead_s,
            **more,
        }
        body = {"prompt": prompt} | {name: value for name, value in given.items() if value is not None}
        answer = await self.transport.request("POST", "/v1/sessions", json=body, idempotent=False)
        info = SessionInfo.model_validate(answer)
        return AsyncSession(self.transport, info.id, info)

    def session(self, session: str) -> AsyncSession:
        """Return the session of this id, without asking the gateway."""
        return AsyncSession(self.transport, session)

    async def sessions(self, phases: Iterable[Phase] = ()) -> AsyncIterator[AsyncSession]:
        """List the caller's sessions, newest first. `phases`: only these. Empty: all."""
        after: str | None = None
        while True:
            params: dict[str, Any] = {"limit": 100, "phase": list(phases)}
            if after is not None:
                params["after"] = after
            page = await self.transport.request("GET", "/v1/sessions", params=params)
            for each in page["sessions"]:
                info = SessionInfo.model_validate(each)
                yield AsyncSession(self.transport, info.id, info)
            after = page["next"]
            if after is None:
                return

    def recording(self, recording: str) -> AsyncRecording:
        """Return the recording of this id, without asking the gateway."""
        return AsyncRecording(self.transport, recording)

    def recordings(self, session: str | None = None) -> AsyncIterator[AsyncRecording]:
        """List the caller's recordings at the server, newest first. `session`: only those of this session."""
        return listed(self.transport, session)

    async def models(self) -> list[Model]:
        """List the models that ready workers serve."""
        answer = await self.transport.request("GET", "/v1/models")
        return [Model.model_validate(each) for each in answer["models"]]

    async def workers(self) -> list[Worker]:
        """List the workers."""
        answer = await self.transport.request("GET", "/v1/workers")
        return [Worker.model_validate(each) for each in answer["workers"]]
