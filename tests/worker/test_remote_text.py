"""A worker and text workers over real connections: the same embedding, and none that a broken one delays."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import torch
from pydantic import SecretStr
from structlog.testing import capture_logs
from torch import Tensor

from tests.helpers.ports import free_ports
from tests.worker.conftest import HashedText
from tests.worker.started_runtime import Started
from turboserve.tasks import stop
from turboserve.worker.engine.interface import TextEncoder
from turboserve.worker.engine.models import Models
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.remote_decoding import role_server, text_client, text_server
from turboserve.worker.remote_decoding.role_server import DeviceHangsError
from turboserve.worker.remote_decoding.text_client import TextClient
from turboserve.worker.remote_decoding.text_server import TextServer, encode_one
from turboserve.worker.service.decode_roles import key_of
from turboserve.worker.service.text_roles import start_text_worker
from turboserve.worker.settings import Settings
from turboserve.worker.transfer.network import listen

KEY, MODEL, HOST, LIMIT_S = b"k" * 32, "m" * 32, "127.0.0.1", 60.0
PROMPT = "a red circle"
FLOAT = "float32"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a busy machine may take seconds."""
    monkeypatch.setattr(role_server, "ADMIT_S", LIMIT_S)
    monkeypatch.setattr(text_server, "ANSWER_S", LIMIT_S)


@asynccontextmanager
async def text_worker(encoder: TextEncoder, port: int = 0) -> AsyncIterator[tuple[TextServer, int]]:
    """Serve at `port`, by default a free one that no outgoing connection takes before the next server."""
    server = TextServer("txt_1", MODEL, encoder, KEY, time.monotonic)
    running = asyncio.create_task(server.run())
    listener, port = await listen(server.serve, HOST, port or free_ports(1)[0])
    try:
        yield server, port
    finally:
        listener.close()
        if not running.done():
            await stop(running)


@asynccontextmanager
async def home(
    config: ModelConfig, *ports: int, key: bytes = KEY, timeout_s: float = LIMIT_S, dtype: str = FLOAT
) -> AsyncIterator[TextClient]:
    addresses = [f"tcp://{HOST}:{port}" for port in ports]
    # Of two text workers, one of this name asks the first one first.
    client = TextClient("wrk_4", MODEL, config, addresses, key, timeout_s, dtype)
    try:
        yield client
    finally:
        await client.close()


async def encoded(client: TextClient, prompt: str = PROMPT) -> Tensor | None:
    """As the engine's thread asks."""
    answer = await asyncio.to_thread(client.ask, prompt)
    return await asyncio.wrap_future(answer)


async def test_embeddings_are_those_of_the_worker_s_own_encoder(tiny_config: ModelConfig) -> None:
    own = HashedText(tiny_config)
    async with text_worker(HashedText(tiny_config)) as (server, port), home(tiny_config, port) as client:
        prompts = [PROMPT, "a blue square", "ein grüner Kreis 🟢", ""]
        found = await asyncio.gather(*(encoded(client, prompt) for prompt in prompts))
        for prompt, embedding in zip(prompts, found, strict=True):
            assert embedding is not None
            assert torch.equal(embedding, encode_one(own, prompt))
        assert server.encoded == len(prompts)


async def test_a_text_worker_that_ends_costs_no_prompt(
    tiny_config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_client, "REST_S", 0.0)
    encoder = HashedText(tiny_config)
    async with text_worker(encoder) as (second, other):
        async with text_worker(encoder) as (first, port), home(tiny_config, port, other) as client:
            assert await encoded(client) is not None
            assert (first.encoded, second.encoded) == (1, 0)
        # It is gone, with its connection.
        async with home(tiny_config, port, other) as client:
            assert await encoded(client) is not None
            assert second.encoded == 1
            # It is back at its address.
            async with text_worker(encoder, port) as (again, _):
                assert await encoded(client) is not None
                assert again.encoded == 1
            # With its connection: the next prompt asks the other one.
            assert await encoded(client) is not None
            assert second.encoded == 2
    async with home(tiny_config, port, other) as client:
        assert await encoded(client) is None


class Waits(HashedText):
    """A frozen device."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.begun, self.released = threading.Event(), threading.Event()

    def encode(self, prompts: Sequence[str]) -> Tensor:
        self.begun.set()
        self.released.wait()
        return super().encode(prompts)


async def test_a_frozen_text_worker_is_not_asked_again_at_once(
    tiny_config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its rest does not end within the test, however slow the machine is.
    monkeypatch.setattr(text_client, "REST_S", 3_600.0)
    frozen = Waits(tiny_config)
    async with text_worker(frozen) as (server, port), home(tiny_config, port, timeout_s=0.2) as client:
        try:
            assert await encoded(client) is None
            [asked] = client._workers
            before = asked.rests_until_s
            assert before > asyncio.get_running_loop().time()
            assert await encoded(client) is None
            # It was not tried, or its rest would have begun again.
            assert asked.rests_until_s == before
        finally:
            frozen.released.set()
    assert server.encoded <= 1


async def test_a_prompt_that_waits_for_its_turn_ends_no_other_s(tiny_config: ModelConfig) -> None:
    slow = Waits(tiny_config)
    async with (
        text_worker(slow) as (server, port),
        text_worker(HashedText(tiny_config)) as (second, other),
        home(tiny_config, port) as client,
        home(tiny_config, port, other) as both,
    ):
        asking = [asyncio.create_task(encoded(each)) for each in (client, both)]
        try:
            await asyncio.to_thread(slow.begun.wait)
            async with asyncio.timeout(LIMIT_S):
                while not all(worker.prompts for each in (client, both) for worker in each._workers[:1]):
                    await asyncio.sleep(0.01)
            # The first worker has a prompt of this one: the second one is asked.
            assert await encoded(both, "a blue square") is not None
            assert second.encoded == 1
            # There is no other one. The prompt before goes on, and the worker does not rest.
            patience_s, client._timeout_s = client._timeout_s, 0.05
            assert await encoded(client, "a blue square") is None
            # The answer to the prompt before may take its time.
            client._timeout_s = patience_s
            assert client._workers[0].rests_until_s == 0.0
        finally:
            slow.released.set()
        assert None not in await asyncio.gather(*asking)
    assert server.encoded == 2


async def test_a_text_worker_that_was_restarted_is_asked_at_once(tiny_config: ModelConfig) -> None:
    encoder = HashedText(tiny_config)
    async with text_worker(encoder) as (_, port):
        pass
    async with home(tiny_config, port) as client:
        async with text_worker(encoder, port):
            assert await encoded(client) is not None
        channel = client._workers[0].channel
        assert channel is not None
        async with asyncio.timeout(LIMIT_S):
            while not channel.left:
                await asyncio.sleep(0.01)
        async with text_worker(encoder, port) as (again, _):
            assert await encoded(client) is not None
            assert again.encoded == 1


async def test_an_unexpected_error_fails_no_session(tiny_config: ModelConfig) -> None:
    async with home(tiny_config, 9) as client:

        async def broken(host: str, port: int) -> Any:
            raise UnicodeError(f"{host}:{port}")

        client._connect = broken
        assert await encoded(client) is None


def test_workers_begin_with_different_text_workers(tiny_config: ModelConfig) -> None:
    async def first(name: str) -> str:
        addresses = ["tcp://h:1", "tcp://h:2"]
        return TextClient(name, MODEL, tiny_config, addresses, KEY, 1.0, FLOAT)._workers[0].address

    assert len({asyncio.run(first(f"wrk_{number}")) for number in range(8)}) == 2


@pytest.mark.parametrize("wrong", ["key", "model", "dtype", "sizes", "error"])
async def test_an_answer_that_does_not_fit_is_not_taken(tiny_config: ModelConfig, wrong: str) -> None:
    class Longer(HashedText):
        def _one(self, prompt: str) -> Tensor:
            return torch.zeros(tiny_config.text_len + 1, tiny_config.text_dim)

    encoder = Longer(tiny_config) if wrong == "sizes" else HashedText(tiny_config)
    key = b"o" * 32 if wrong == "key" else KEY
    dtype = "bfloat16" if wrong == "dtype" else FLOAT
    async with text_worker(encoder) as (_, port), home(tiny_config, port, key=key, dtype=dtype) as client:
        if wrong == "model":
            client._model = "x" * 32
        assert await encoded(client, "raise" if wrong == "error" else PROMPT) is None


async def test_an_encoding_that_hangs_ends_the_text_worker(
    tiny_config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role_server, "HANGS_S", 0.1)
    monkeypatch.setattr(role_server, "END_S", 0.1)
    frozen = Waits(tiny_config)
    server = TextServer("txt_1", MODEL, frozen, KEY, time.monotonic)
    listener, port = await listen(server.serve, HOST, 0)
    async with home(tiny_config, port) as client:
        asking = asyncio.create_task(encoded(client))
        try:
            async with asyncio.timeout(LIMIT_S):
                with pytest.raises(DeviceHangsError):
                    await server.run()
            assert await asking is None
        finally:
            frozen.released.set()
            listener.close()


async def test_after_its_end_a_client_answers_nothing(tiny_config: ModelConfig) -> None:
    async with text_worker(HashedText(tiny_config)) as (_, port), home(tiny_config, port) as client:
        assert await encoded(client) is not None
    assert client.ask(PROMPT).result() is None


async def test_a_text_worker_starts_with_the_encoder_alone(
    tiny_config: ModelConfig, make_models: Callable[..., Models]
) -> None:
    key = SecretStr("k" * 32)
    models = make_models(tiny_config)
    settings = Settings(roles="text", decode_key=key, transfer_host=HOST)
    runtime = Started()
    with capture_logs() as lines:
        await start_text_worker(cast(Any, runtime), settings, lambda _: models, "txt_1")
    [address] = [line["address"] for line in lines if line["event"] == "text worker serves"]
    sample = encode_one(models.text, PROMPT)
    arguments = models.fingerprint, tiny_config, [address], key_of(settings), LIMIT_S, FLOAT
    client = TextClient("wrk_1", *arguments)
    try:
        assert torch.equal(cast(Tensor, await encoded(client)), sample)
    finally:
        await client.close()
        await runtime.stop()
