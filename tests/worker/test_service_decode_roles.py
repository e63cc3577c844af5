"""Roles in a worker's settings and memory: as shipped, nothing is different."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from pydantic import SecretStr, ValidationError
from structlog.testing import capture_logs
from torch import Tensor

from tests.worker.started_runtime import Started
from turboserve.tasks import stop
from turboserve.worker.engine.budget import decode_bytes, plan
from turboserve.worker.engine.errors import BudgetTooSmallError
from turboserve.worker.engine.interface import Decoder
from turboserve.worker.engine.models import Models
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.remote_decoding import server
from turboserve.worker.remote_decoding.chunk_time import ChunkTime
from turboserve.worker.remote_decoding.client import DecodeClient
from turboserve.worker.service import decode_roles
from turboserve.worker.service import models as engines
from turboserve.worker.service.decode_measurement import MEASURED_CHUNKS
from turboserve.worker.service.decode_roles import (
    MOST_CACHES,
    LoadedDecoder,
    caches_that_fit,
    decoding_apart,
    key_of,
    load_decoder,
    start_decode_worker,
    without_decoding,
)
from turboserve.worker.service.host_memory import state_host_bytes
from turboserve.worker.settings import Settings, addresses_of

KEY = SecretStr("k" * 32)
ADDRESSES = "tcp://127.0.0.1:7001,tcp://127.0.0.1:7002"


def denoise(**more: Any) -> Settings:
    return Settings(roles="denoise", decode_workers=ADDRESSES, decode_key=KEY, **more)


class Counted:
    """A decoder that counts its decodes with and without caches."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.calls: list[bool] = []
        self.rows: list[int] = []
        self.waits_s = 0.0
        """Time for which each decode waits without computing, seconds."""
        self.cache_bytes, self.weight_bytes = decoder.cache_bytes, decoder.weight_bytes
        self.workspace_bytes = decoder.workspace_bytes

    def decode(self, latents: Tensor, caches: Any) -> Any:
        self.calls.append(caches is not None)
        self.rows.append(len(latents))
        time.sleep(self.waits_s)
        return self._decoder.decode(latents, caches)


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ({"roles": "denoise", "decode_workers": ADDRESSES}, "decode_key"),
        ({"roles": "decode"}, "decode_key"),
        ({"roles": "denoise", "decode_key": KEY}, "decode_workers"),
        ({"roles": "encode", "decode_key": KEY}, "roles"),
        ({"roles": "text"}, "decode_key"),
        ({"text_workers": ADDRESSES}, "decode_key"),
        ({"text_workers": "127.0.0.1:7001", "decode_key": KEY}, "text_workers"),
        (
            {"text_workers": ADDRESSES, "decode_key": KEY, "model": "toyworld,toyworld-small"},
            "text_workers",
        ),
        ({"decode_key": SecretStr("short")}, "decode_key"),
        ({"decode_workers": "127.0.0.1:7001"}, "decode_workers"),
        ({"decode_workers": "tcp://127.0.0.1"}, "decode_workers"),
        ({"decode_workers": "tcp://10..0.7:7500"}, "host name"),
        ({"decode_timeout_s": 0.0}, "decode_timeout_s"),
        ({"roles": "denoise", "decode_workers": ", ,", "decode_key": KEY}, "decode_workers"),
        ({"roles": "denoise", "decode_workers": ADDRESSES, "decode_key": KEY, "overlap": "off"}, "overlap"),
        ({"roles": "decode", "decode_key": KEY, "fast_vae": "taew2_1.pth"}, "fast_vae"),
        (
            {
                "roles": "denoise",
                "decode_workers": ADDRESSES,
                "decode_key": KEY,
                "model": "toyworld,toyworld-small",
            },
            "roles",
        ),
    ],
)
def test_settings_that_do_not_work_together_are_refused(given: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValidationError, match=wrong) as refused:
        Settings(**given)
    assert KEY.get_secret_value() not in str(refused.value)


def test_the_key_is_never_shown() -> None:
    settings = denoise()
    assert KEY.get_secret_value() not in repr(settings)
    assert KEY.get_secret_value() not in json.dumps(settings.model_dump(mode="json"))
    assert key_of(settings) == key_of(Settings(roles="decode", decode_key=KEY))
    assert len(key_of(settings)) == 32


def test_a_worker_that_does_not_decode_has_room_for_more_sessions(
    tiny_config: ModelConfig, make_models: Callable[..., Models]
) -> None:
    models = make_models(tiny_config)
    both, apart = plan(models, 1 << 26), plan(models, 1 << 26, decode_apart=True)
    assert both.session_bytes - apart.session_bytes == models.decoder.cache_bytes
    # The caches of the two sessions that it decodes itself take the place of those that are sent.
    assert both.workspace_bytes == apart.workspace_bytes
    assert state_host_bytes(models) > state_host_bytes(models, decode_apart=True)


def test_an_engine_has_the_role_of_its_settings(
    tiny_config: ModelConfig, make_models: Callable[..., Models]
) -> None:
    memory: dict[str, Any] = {"memory_bytes": 1 << 27, "host_memory_bytes": 1 << 24, "worker_max_sessions": 4}
    together = engines.make_engine(make_models(tiny_config), Settings(**memory))
    assert decoding_apart(together) is None
    assert together.options.decode_apart is False
    assert together.options.decode_batch == 1
    models = make_models(tiny_config)
    counted = Counted(models.decoder)
    alone = engines.make_engine(dataclasses.replace(models, decoder=counted), denoise(**memory))
    apart = decoding_apart(alone)
    assert apart is not None
    # As many chunks at once as there are decode workers. A thread waits for them, on one core as well.
    assert alone.options.decode_batch == 2
    assert alone.options.overlap is True
    with without_decoding(together), without_decoding(alone):
        during = apart.remote
    assert during is not None
    assert during.decode([]) == []
    assert decoding_apart(alone) is apart
    # Its own decoder is ready, for the time when no decode worker is.
    assert counted.calls == [False, True]


def test_addresses_may_have_spaces_between_them() -> None:
    settings = Settings(roles="denoise", decode_workers="tcp://h:1, tcp://h:2,", decode_key=KEY)
    assert addresses_of(settings.decode_workers) == ["tcp://h:1", "tcp://h:2"]


def test_a_decode_worker_has_decoded_before_it_is_asked(
    tiny_config: ModelConfig, make_models: Callable[..., Models]
) -> None:
    models = make_models(tiny_config)
    counted = Counted(models.decoder)
    load_decoder(
        Settings(roles="decode", decode_key=KEY), lambda _: dataclasses.replace(models, decoder=counted)
    )
    # What comes after measures its time.
    assert counted.calls == [False, True, *[True] * MEASURED_CHUNKS]


def test_a_decode_worker_measures_as_many_rows_as_it_may_decode_at_once(
    tiny_config: ModelConfig, make_models: Callable[..., Models]
) -> None:
    models = make_models(tiny_config)
    counted = Counted(models.decoder)
    given = dataclasses.replace(models, decoder=counted)
    # Rows round differently. So on a CPU, one is the default.
    assert list(load_decoder(Settings(roles="decode", decode_key=KEY), lambda _: given).by_rows) == [1]
    assert set(counted.rows) == {1}
    two = Settings(roles="decode", decode_key=KEY, decode_batch=3)
    assert list(load_decoder(two, lambda _: given).by_rows) == [1, 2]
    assert set(counted.rows) == {1, 2}
    # The memory of all rows is set aside.
    decoder, working = models.decoder, decode_bytes(models)
    less = decoder.weight_bytes + 2 * working + 4 * decoder.cache_bytes
    memory: dict[str, Any] = {"roles": "decode", "decode_key": KEY, "memory_bytes": less, "decode_batch": 2}
    assert load_decoder(Settings(**memory), lambda _: models).room == 4


@pytest.mark.parametrize(
    ("seconds", "room", "sessions"), [(0.1, 64, 4), (0.1, 3, 3), (0.15, 64, 3), (1.0, 64, 0)]
)
def test_a_decode_worker_carries_what_its_time_and_memory_allow(
    tiny_config: ModelConfig,
    make_models: Callable[..., Models],
    seconds: float,
    room: int,
    sessions: int,
) -> None:
    """g = b / (L(b) k), with one chunk at a time and one decode for each chunk."""
    decoder = make_models(tiny_config).decoder
    loaded = LoadedDecoder(decoder, tiny_config, "f", torch.device("cpu"), room, {1: seconds})
    assert loaded.sessions(0.45 / tiny_config.chunk_media_s, seconds) == sessions


def test_a_decode_worker_keeps_the_decoder_and_as_many_caches_as_fit(
    tiny_config: ModelConfig, make_models: Callable[..., Models]
) -> None:
    models = make_models(tiny_config)
    decoder, working = models.decoder, decode_bytes(models)
    taken = decoder.weight_bytes + working
    assert caches_that_fit(decoder, working, taken + 5 * decoder.cache_bytes) == 5
    assert caches_that_fit(decoder, working, 1 << 40) == MOST_CACHES
    with pytest.raises(BudgetTooSmallError):
        caches_that_fit(decoder, working, taken)
    settings = Settings(roles="decode", decode_key=KEY, memory_bytes=taken + 3 * decoder.cache_bytes)
    loaded = load_decoder(settings, lambda _: models)
    assert loaded.decoder is decoder
    assert (loaded.room, loaded.fingerprint) == (3, models.fingerprint)
    assert loaded.seconds > 0
    assert loaded.device == torch.device("cpu")


async def test_a_decode_worker_serves_what_it_measured_and_measures_again(
    tiny_config: ModelConfig, make_models: Callable[..., Models], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "IDLE_S", 0.01)
    # It sets variables of the process.
    monkeypatch.setattr(decode_roles, "confine_libraries", lambda _: None)
    models = make_models(tiny_config)
    counted = Counted(models.decoder)
    # On a CPU, all times of a chunk are processor seconds, at the start and later: other processes of the
    # machine change no allotment.
    counted.waits_s = 0.2
    changes: list[float] = []
    monkeypatch.setattr(ChunkTime, "probed", lambda _, seconds: changes.append(seconds))
    given = dataclasses.replace(models, decoder=counted)
    runtime = Started()
    settings = Settings(roles="decode", decode_key=KEY, transfer_host="127.0.0.1")
    with capture_logs() as lines:
        await start_decode_worker(cast(Any, runtime), settings, lambda _: given, "dec_1")
    [line] = [line for line in lines if line["event"] == "decode worker serves"]
    assert 0 < line["sessions"] <= line["caches"]
    began = len(counted.calls)
    arguments = models.fingerprint, tiny_config, [line["address"]], key_of(settings), 60.0, 4
    home = DecodeClient("wrk_1", *arguments)
    running = asyncio.create_task(home.run())
    try:
        async with asyncio.timeout(60.0):
            await home.wait_until_known(60.0)
            while not changes:
                await asyncio.sleep(0.01)
        assert len(counted.calls) >= began + 2 * MEASURED_CHUNKS
        assert 0 < changes[0] < counted.waits_s
        assert home.limited(1) == 1
        capacity = home.capacity(9)
        assert capacity is not None
        assert (capacity.workers, capacity.denoised) == (1, 9)
    finally:
        await stop(running)
        await runtime.stop()
