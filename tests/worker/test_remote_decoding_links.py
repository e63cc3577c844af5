"""Payloads of decode workers over links of the transfer's backends: what a link that fails costs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worker.decode_scene import LIMIT_S, Scene, be_patient, links_for_all, opened_scene
from turboserve.bench.roles_paths import MODELS, clients_of, config_of, worker_process
from turboserve.tasks import stop
from turboserve.worker.engine.decode_jobs import DecodeJob, digest_of_latents
from turboserve.worker.remote_decoding import connection
from turboserve.worker.remote_decoding.client import DecodeClient
from turboserve.worker.remote_decoding.payload_links import REST_S, BackendRests, PayloadLinks
from turboserve.worker.transfer import pair
from turboserve.worker.transfer.errors import TransferBackendError
from turboserve.worker.transfer.shm import ShmLink

CHUNKS = range(1, 4)
LARGE = MODELS[1]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)
    links_for_all(monkeypatch)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with opened_scene() as scene:
        yield scene


def links_at(home: DecodeClient) -> PayloadLinks:
    [only] = home._connections.values()
    found = only._channel.links
    assert found is not None
    return found


async def until_decoded(scene: Scene, home: DecodeClient, index: int) -> Tensor:
    """Ask until the decode worker, which is connected again, decodes the chunk."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            [frames] = await scene.decode(home, scene.job(index))
            if frames is not None:
                return frames
            await asyncio.sleep(0.05)


async def test_without_a_link_that_works_payloads_pass_over_the_connection(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where two workers of one machine are of different users. It costs no chunk."""

    def not_opened(link: ShmLink, *_: Any) -> None:
        raise TransferBackendError("shm: memory cannot be opened")

    monkeypatch.setattr(ShmLink, "_open", not_opened)
    place = await scene.place(path="shm")
    home = await scene.client(place, path="shm")
    await scene.connected(home, 1)
    assert home.link_kinds == ""
    for index in CHUNKS:
        await scene.plays(home, index)


@pytest.mark.parametrize(("ours", "theirs"), [("", "gloo"), ("shm", ""), ("shm", "gloo")])
async def test_workers_without_a_common_backend_need_no_link(scene: Scene, ours: str, theirs: str) -> None:
    """An earlier version has none."""
    place = await scene.place(path=theirs)
    home = await scene.client(place, path=ours)
    await scene.connected(home, 1)
    assert home.link_kinds == ""
    await scene.plays(home, 0)


async def test_a_link_that_fails_costs_one_answer_and_then_the_connection_serves(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = await scene.place(path="shm")
    home = await scene.client(place, path="shm")
    await scene.connected(home, 1)
    await scene.plays(home, 0)

    def fails(*_: Any) -> int:
        raise TransferBackendError("shm: broken")

    monkeypatch.setattr(links_at(home).receiving, "transfer", fails)
    # Its worker decodes the chunk.
    assert await scene.decode(home, scene.job(1)) == [None]
    assert (await until_decoded(scene, home, 1)).equal(scene.expected[1])
    assert home.link_kinds == ""
    await scene.plays(home, 2)


@pytest.mark.parametrize(
    ("path", "end", "call"),
    [("shm", "receiving", "transfer"), ("shm", "sending", "offer"), ("gloo", "sending", "transfer")],
)
async def test_a_link_that_fails_at_the_decode_worker_is_not_used_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, path: str, end: str, call: str
) -> None:
    """The home notices no fault of its own link, or only that the link is closed."""
    place = await scene.place(path=path)
    home = await scene.client(place, path=path)
    await scene.connected(home, 1)
    await scene.plays(home, 0)
    assert place.server is not None
    [channel] = place.server._serving.values()

    def fails(*_: Any) -> int:
        raise OSError("no memory")

    monkeypatch.setattr(connection, "REASON_S", LIMIT_S)
    monkeypatch.setattr(getattr(channel.links, end), call, fails)
    assert await scene.decode(home, scene.job(1)) == [None]
    assert (await until_decoded(scene, home, 1)).equal(scene.expected[1])
    assert home.link_kinds == ""


async def test_a_home_whose_system_shares_no_memory_has_the_connection(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = await scene.place(path="shm")
    home = await scene.client(place, path="shm")
    links = home._links
    assert links is not None
    give = links.give

    def forbidden(*_: Any) -> int:
        raise PermissionError("memfd_create")

    async def gives(*arguments: Any) -> Any:
        link = await give(*arguments)
        monkeypatch.setattr(link, "offer", forbidden)
        return link

    monkeypatch.setattr(links, "give", gives)
    await scene.connected(home, 1)
    assert home.link_kinds == ""
    await scene.plays(home, 0)


@pytest.mark.parametrize("path", ["gloo", "shm"])
async def test_a_peer_that_stops_amid_a_payload_costs_one_answer(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    place = await scene.place(path=path)
    home = await scene.client(place, path=path)
    await scene.connected(home, 1)
    # Frames are announced, and never come. Shared memory would have them before.
    monkeypatch.setattr(ShmLink, "holds", lambda *_: False)
    receiving, ends = asyncio.Event(), asyncio.Event()
    receive = links_at(home).receive

    async def receives(*arguments: Any) -> None:
        receiving.set()
        await receive(*arguments)

    monkeypatch.setattr(links_at(home), "receive", receives)
    assert place.server is not None
    [channel] = place.server._serving.values()
    assert channel.links is not None
    announce = channel.links.announce

    async def last(*arguments: Any) -> Any:
        found = await announce(*arguments)
        monkeypatch.setattr(pair, "PROGRESS_S", 0.5)
        return found

    async def stops(*_: Any) -> None:
        await ends.wait()
        monkeypatch.setattr(pair, "PROGRESS_S", LIMIT_S)

    monkeypatch.setattr(channel.links, "announce", last)
    monkeypatch.setattr(channel.links, "send", stops)
    if path == "gloo":
        # Its own limit ends it.
        assert await scene.decode(home, scene.job(1)) == [None]
    else:
        # The end of the chunk's time does.
        asking = asyncio.create_task(home._decode(scene.job(1)))
        async with asyncio.timeout(LIMIT_S):
            await receiving.wait()
            await stop(asking)
    assert home.router.jobs == 0
    ends.set()
    # As far as the home can tell, the link was at fault.
    assert (await until_decoded(scene, home, 1)).equal(scene.expected[1])
    assert home.link_kinds == ""


def test_a_decode_worker_that_freezes_or_dies_costs_one_answer_on_every_path() -> None:
    """A process of its own, and frames of a public model's size."""
    config, latents = config_of(LARGE), torch.zeros(config_of(LARGE).latent_shape)
    digests = [digest_of_latents(index, latents) for index in range(3)]

    async def played(pid: int, port: int) -> None:
        async with clients_of(config, port) as clients:
            await answered(clients, 0)
            os.kill(pid, signal.SIGSTOP)
            for client in clients.values():
                client._timeout_s = 0.5
            assert not any(await asked(clients, 1))
            assert not any(client.router.jobs for client in clients.values())
            os.kill(pid, signal.SIGCONT)
            for client in clients.values():
                client._timeout_s = LIMIT_S
            await answered(clients, 1)
            os.kill(pid, signal.SIGKILL)
            assert not any(await asked(clients, 2))

    async def answered(clients: dict[str, DecodeClient], index: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not all(await asked(clients, index)):
                await asyncio.sleep(0.05)

    async def asked(clients: dict[str, DecodeClient], index: int) -> list[bool]:
        base, context = (digests[index - 1], (latents,) * index) if index else (None, ())
        jobs = [DecodeJob(path, index, latents, base, digests[index], context) for path in clients]
        asking = [
            asyncio.to_thread(client.decode, [job])
            for client, job in zip(clients.values(), jobs, strict=True)
        ]
        return [frames is not None for [frames] in await asyncio.gather(*asking)]

    with worker_process(LARGE) as (process, _, port):
        asyncio.run(played(process.pid or 0, port))


async def test_a_payload_that_was_changed_on_the_way_is_not_decoded(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = await scene.place(path="gloo")
    home = await scene.client(place, path="gloo")
    await scene.connected(home, 1)
    links = links_at(home)
    announce = links.announce

    async def of_others(*arguments: Any) -> Any:
        return replace(await announce(*arguments), digest="0" * 64)

    monkeypatch.setattr(links, "announce", of_others)
    assert await scene.decode(home, scene.job(1)) == [None]
    assert place.server is not None
    assert place.server.decoded == 0
    assert (await until_decoded(scene, home, 1)).equal(scene.expected[1])
    assert home.link_kinds == ""


def test_a_backend_that_failed_rests() -> None:
    now = [10.0]
    rests = BackendRests(lambda: now[0])
    assert rests.usable(("shm", "gloo")) == ("shm", "gloo")
    rests.failed("shm")
    assert rests.usable(("shm", "gloo")) == ("gloo",)
    now[0] += REST_S
    assert rests.usable(("shm", "gloo")) == ("shm", "gloo")
