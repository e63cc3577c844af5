"""The limit of streams when several clients request the last place at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import httpx
import pytest
from fastapi import FastAPI

from turboserve.contracts.errors import KeyQuotaError, TenantLimitError
from turboserve.gateway.context import Streams
from turboserve.gateway.live_response import LiveResponse
from turboserve.gateway.problems.errors import TooManyStreamsError
from turboserve.gateway.problems.handlers import install


async def test_of_a_burst_as_many_are_served_as_there_are_slots_and_the_rest_is_refused() -> None:
    app, streams, burst = FastAPI(), Streams(2), asyncio.Barrier(5)
    install(app)

    refused = asyncio.Semaphore(0)

    async def video() -> AsyncGenerator[bytes, None]:
        # Wait until all others have requested a place.
        async with asyncio.timeout(60):
            for _ in range(3):
                await refused.acquire()
            for _ in range(3):
                refused.release()
        yield b"video"

    @app.get("/")
    async def stream() -> LiveResponse:
        streams.check("t")
        await burst.wait()
        return LiveResponse(video(), streams, ("t", None), "video/mp4")

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:

        async def ask() -> httpx.Response:
            answer = await client.get("/")
            if answer.status_code == 429:
                refused.release()
            return answer

        answers = await asyncio.gather(*(ask() for _ in range(5)))
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429]
    assert {answer.json()["code"] for answer in answers if answer.status_code == 429} == {"too_many_streams"}
    streams.check("t")


def test_one_tenant_has_its_share_of_the_places_and_leaves_the_others() -> None:
    streams = Streams(5, per_tenant=2)
    with streams.place("greedy"), streams.place("greedy"):
        with pytest.raises(TenantLimitError) as caught, streams.place("greedy"):
            pass
        assert (caught.value.field, caught.value.limit, caught.value.status) == ("tenant_streams", 2, 429)
        assert caught.value.retry_after_s is not None
        with (
            streams.place("modest"),
            streams.place("modest"),
            streams.place("third"),
            pytest.raises(TooManyStreamsError),
        ):
            streams.check("fourth")
        streams.check("modest")
    streams.check("greedy")


def test_one_key_has_its_share_of_the_places_and_leaves_the_others() -> None:
    streams = Streams(5, per_tenant=4, per_key={"small": 2}.get)
    with streams.place("ta", "small"), streams.place("ta", "small"):
        with pytest.raises(KeyQuotaError) as caught, streams.place("ta", "small"):
            pass
        assert (caught.value.field, caught.value.limit, caught.value.status) == ("key_streams", 2, 429)
        with streams.place("ta", "large"), streams.place("ta"), pytest.raises(TenantLimitError):
            streams.check("ta", "large")
    streams.check("ta", "small")
