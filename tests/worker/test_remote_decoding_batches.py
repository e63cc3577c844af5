"""A decode worker with chunks of several sessions that wait: together where that was measured to pay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
import torch
from torch import Tensor

from tests.worker.decode_scene import LIMIT_S, Place, Scene, be_patient, opened_scene
from turboserve.worker.engine.decode_jobs import DecodeJob
from turboserve.worker.remote_decoding.client import DecodeClient

PAYS = {1: 1.0, 2: 1.2, 4: 1.5}
PAYS_NOT = {1: 1.0, 2: 2.0, 4: 4.0}
SESSIONS = ("ses_a", "ses_b", "ses_c")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with opened_scene() as scene:
        yield scene


class Homes:
    """Three workers with a session each, and their decode worker."""

    def __init__(self, scene: Scene, place: Place, clients: list[DecodeClient]) -> None:
        self.scene, self.place, self.clients = scene, place, clients

    @classmethod
    async def of(cls, scene: Scene, batches: dict[int, float]) -> Homes:
        place = await scene.place(batches=batches)
        clients = [await scene.client(place, name=f"wrk_{session}") for session in SESSIONS]
        for client in clients:
            await scene.connected(client, 1)
        return cls(scene, place, clients)

    async def ask(self, *indices: int) -> list[list[Tensor | None]]:
        """Ask for a chunk of each session while the decode worker is busy, so that all wait together."""
        server = self.place.server
        assert server is not None
        async with server._turn:
            asking = [
                asyncio.create_task(self.scene.decode(client, self.scene.job(index, session)))
                for client, session, index in zip(self.clients, SESSIONS, indices, strict=True)
            ]
            async with asyncio.timeout(LIMIT_S):
                while len(server._waiting) < len(asking):
                    await asyncio.sleep(0.01)
        return await asyncio.gather(*asking)

    def batches_fail(self, monkeypatch: pytest.MonkeyPatch, error: Exception) -> list[int]:
        """Let each decode of several chunks fail. Returns a list that collects their numbers of chunks."""
        failed: list[int] = []

        def fails(jobs: Sequence[DecodeJob]) -> list[Tensor]:
            failed.append(len(jobs))
            raise error

        assert self.place.server is not None
        monkeypatch.setattr(self.place.server._decoder, "decode_together", fails)
        return failed

    @property
    def counts(self) -> tuple[int, int]:
        """Chunks, and decodes."""
        server = self.place.server
        assert server is not None
        return server.decoded, server.decodes


def near(found: list[list[Tensor | None]], expected: list[Tensor], levels: int) -> None:
    for [frames], wanted in zip(found, expected, strict=True):
        assert frames is not None
        assert (frames.int() - wanted.int()).abs().max() <= levels


async def test_chunks_that_wait_are_decoded_together_where_it_pays(scene: Scene) -> None:
    homes = await Homes.of(scene, PAYS)
    # A video's first chunk continues no cache: alone.
    near(await homes.ask(0, 0, 0), scene.expected[:1] * 3, 0)
    assert homes.counts == (3, 3)
    # Rows of one batch depend on each other by rounding only, as in an engine's decode.
    near(await homes.ask(1, 1, 1), scene.expected[1:2] * 3, 1)
    assert homes.counts == (6, 4)
    # The caches are those of the chunks before. One of three has no cache here, and is decoded alone.
    near(await homes.ask(2, 2, 4), [scene.expected[index] for index in (2, 2, 4)], 1)
    assert homes.counts == (9, 6)


async def test_where_it_does_not_pay_each_is_decoded_alone_bit_for_bit(scene: Scene) -> None:
    homes = await Homes.of(scene, PAYS_NOT)
    for index in range(3):
        near(await homes.ask(index, index, index), scene.expected[index : index + 1] * 3, 0)
    assert homes.counts == (9, 9)


async def test_a_batch_that_fails_is_decoded_one_by_one(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes = await Homes.of(scene, PAYS)
    await homes.ask(0, 0, 0)
    failed = homes.batches_fail(monkeypatch, RuntimeError("one of them is not decoded"))
    near(await homes.ask(1, 1, 1), scene.expected[1:2] * 3, 0)
    assert failed
    assert homes.counts == (6, 6)


async def test_a_batch_without_memory_is_not_tried_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes = await Homes.of(scene, PAYS)
    await homes.ask(0, 0, 0)
    failed = homes.batches_fail(monkeypatch, torch.OutOfMemoryError("no memory"))
    for index in (1, 2):
        near(await homes.ask(index, index, index), scene.expected[index : index + 1] * 3, 0)
    assert failed == [3]
    assert homes.counts == (9, 9)


async def test_a_chunk_whose_worker_has_left_is_in_no_batch(scene: Scene) -> None:
    homes = await Homes.of(scene, PAYS)
    await homes.ask(0, 0, 0)
    server = homes.place.server
    assert server is not None
    async with server._turn:
        asking = [
            asyncio.create_task(client._decode(scene.job(1, session)))
            for client, session in zip(homes.clients, SESSIONS, strict=True)
        ]
        async with asyncio.timeout(LIMIT_S):
            while len(server._waiting) < len(asking):
                await asyncio.sleep(0.01)
            asking[2].cancel()
            while not any(each.channel.left for each in server._waiting):
                await asyncio.sleep(0.01)
    found = await asyncio.gather(*asking[:2])
    assert all(isinstance(frames, Tensor) for frames in found)
    async with asyncio.timeout(LIMIT_S):
        while server._waiting:
            await asyncio.sleep(0.01)
    assert homes.counts == (5, 4)
