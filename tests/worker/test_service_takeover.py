"""The latents from which a session is rebuilt: those of chunks in the log, and no others."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from turboserve.clock import SystemClock
from turboserve.contracts.chunks import LatentsHeader
from turboserve.contracts.fidelity import ChunkFidelity
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.service.quality import fidelity_from
from turboserve.worker.service.takeover import Takeover
from turboserve.worker.service.wire import Wire

SESSION = "ses_1"


@dataclass
class Kept:
    """The hot store and the log. Each chunk's latents are all of one number: 100 * epoch + index."""

    headers: dict[int, LatentsHeader] = field(default_factory=dict)
    first: int | None = 1
    """Epoch of chunk 0 in the log; None if it was dropped."""

    def keep(self, index: int, epoch: int, began: int, before: int = 0) -> None:
        self.headers[index] = LatentsHeader(
            session=SESSION,
            index=index,
            epoch=epoch,
            began=began,
            before=before,
            dtype="float32",
            shape=(3, 16, 4, 4),
            first_latent=3 * index,
            fidelity=None if index % 2 else ChunkFidelity(steps=1 + index % 4, window_chunks=1),
        )

    async def latents(self, session: str, index: int) -> tuple[LatentsHeader, Tensor] | None:
        header = self.headers.get(index)
        if header is None:
            return None
        return header, torch.full((3, 16, 4, 4), float(100 * header.epoch + index))

    async def first_epoch(self, session: str) -> int | None:
        return self.first


async def found(kept: Kept, config: ModelConfig, next_chunk: int, epoch: int) -> tuple[list[int], int | None]:
    """Return the numbers of the context's chunks, and that of the sink."""
    takeover = Takeover(kept, config, SystemClock())  # type: ignore[arg-type]
    context = await takeover.latents(SESSION, next_chunk, epoch, lambda: True)
    latents, sink = context.latents, context.sink
    chunks = [] if latents is None else [int(chunk[0, 0, 0, 0]) for chunk in torch.split(latents, 3)]
    names = [kept.headers[number % 100].fidelity for number in chunks]
    assert list(context.fidelities) == [fidelity_from(each) for each in names]
    of_sink = None if sink is None else kept.headers[0].fidelity
    assert context.sink_fidelity == fidelity_from(of_sink)
    return chunks, None if sink is None else int(sink[0, 0, 0, 0])


@pytest.fixture
def kept() -> Kept:
    """Chunks 0 to 5 of epoch 1, 6 and 7 of epoch 3."""
    kept = Kept()
    for index in range(6):
        kept.keep(index, 1, 0)
    for index in (6, 7):
        kept.keep(index, 3, 6, before=1)
    return kept


async def test_the_window_is_whole_over_a_change_of_owner(kept: Kept, tiny_config: ModelConfig) -> None:
    assert await found(kept, tiny_config, 8, 3) == ([105, 306, 307], 100)


async def test_the_latents_of_a_chunk_that_was_refused_are_not_the_context_of_the_next(
    kept: Kept, tiny_config: ModelConfig
) -> None:
    """The owner of epoch 4 made chunk 8 and died. Its latents were lost, those of epoch 3 stayed."""
    kept.keep(8, 3, 6, before=1)
    assert await found(kept, tiny_config, 9, 4) == ([], None)


async def test_what_is_known_ends_where_an_earlier_owners_latents_are_not_those_of_the_log(
    kept: Kept, tiny_config: ModelConfig
) -> None:
    """Chunks 7 and 8 are of epoch 5; 6 was of epoch 4, whose latents were lost."""
    for index in (7, 8):
        kept.keep(index, 5, 7, before=4)
    assert await found(kept, tiny_config, 9, 5) == ([507, 508], 100)


async def test_a_sink_that_was_refused_is_left_out(kept: Kept, tiny_config: ModelConfig) -> None:
    kept.first = 2
    assert await found(kept, tiny_config, 8, 3) == ([105, 306, 307], None)


async def test_a_sink_whose_chunk_the_log_has_dropped_is_used(kept: Kept, tiny_config: ModelConfig) -> None:
    kept.first = None
    assert await found(kept, tiny_config, 8, 3) == ([105, 306, 307], 100)


async def test_where_the_log_is_lost_the_newest_latents_are_the_context(
    kept: Kept, tiny_config: ModelConfig
) -> None:
    """Nothing is left that could show that they are wrong, and an empty context certainly is."""
    kept.first = None
    assert await found(kept, tiny_config, 8, 0) == ([105, 306, 307], 100)
    assert await found(kept, tiny_config, 7, 0) == ([104, 105, 306], 100)
    assert await found(kept, tiny_config, 9, 0) == ([], None)


async def test_behind_the_newest_they_are_those_that_it_names_also_then(
    kept: Kept, tiny_config: ModelConfig
) -> None:
    kept.keep(7, 4, 7, before=0)
    assert await found(kept, tiny_config, 8, 0) == ([407], 100)


async def test_latents_are_numbered_by_the_class_of_their_chunk(tiny_config: ModelConfig) -> None:
    """Its session may have left the worker meanwhile, which then knows its class no more."""
    sent: list[LatentsHeader] = []

    class FakeBus:
        async def publish(self, subject: object, worker: str, header: LatentsHeader, data: bytes) -> None:
            sent.append(header)

    one_frame = replace(tiny_config, frames_per_chunk=1)
    configs = {"": tiny_config, "live": one_frame}
    bus: Any = FakeBus()
    wire = Wire(bus, SystemClock(), "wrk_1", tiny_config, 60, lambda _: tiny_config, configs.__getitem__)
    for model in configs:
        chunk: Any = SimpleNamespace(
            session=SESSION,
            index=5,
            model=model,
            latents=b"",
            latents_dtype="float32",
            latents_shape=(1,),
            fidelity=None,
        )
        await wire.send_latents(chunk, 1, 0, 0)
    assert [header.first_latent for header in sent] == [5 * tiny_config.frames_per_chunk, 5]


async def test_latents_of_a_configuration_that_the_model_lacks_are_not_used(
    kept: Kept, tiny_config: ModelConfig
) -> None:
    class FakeBus:
        async def call_raw(self, operation: object, request: object) -> tuple[LatentsHeader, bytes]:
            return header, bytes(4 * 3 * 16 * 4 * 4)

    wire = Wire(FakeBus(), SystemClock(), "wrk_1", tiny_config, 60)  # type: ignore[arg-type]
    header = kept.headers[5]
    assert await wire.latents(SESSION, 5) is not None
    header = header.model_copy(update={"fidelity": ChunkFidelity(steps=99, window_chunks=1)})
    assert await wire.latents(SESSION, 5) is None
