"""Properties of every device: the one with tensors and threads, and the virtual one of simulations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from tests.worker.device_harness import LED, SLABS, DeviceHarness, Kind, Tensors, Virtual
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.errors import (
    DuplicateSessionError,
    SlabsExhaustedError,
    SnapshotRejectedError,
    UnknownSessionError,
)
from turboserve.worker.engine.models import Models
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.service import commands, events
from turboserve.worker.service.packager import PackagedChunk

Make = Callable[[], Awaitable[DeviceHarness]]
Scenario = Callable[[Make], Coroutine[Any, Any, None]]


@pytest.fixture(params=["tensors", "virtual", "virtual, a chunk at once"])
def kind(
    request: pytest.FixtureRequest, make_models: Callable[..., Models], tiny_config: ModelConfig
) -> Kind:
    if request.param == "tensors":
        return Tensors(make_models, tiny_config)
    return Virtual(chunk_at_once="at once" in request.param)


def test_chunks_come_in_order_with_their_run_up_to_the_lead(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        harness = await make()
        harness.admit(run=4)
        harness.generate()
        chunks = await harness.received_so_far(PackagedChunk)
        assert [(chunk.run, chunk.index) for chunk in chunks] == [(4, index) for index in range(LED)]
        assert [chunk.packaged.frames for chunk in chunks] == [9, 12, 12]
        assert [chunk.first_frame for chunk in chunks] == [0, 9, 21]
        for chunk in chunks:
            elements = 1
            for size in chunk.latents_shape:
                elements *= size
            assert len(chunk.latents) % elements == 0
            assert chunk.packaged.fragment
        harness.submit(commands.SetPlayhead("a", 4, 1.5, False))
        assert [chunk.index for chunk in await harness.received_so_far(PackagedChunk)] == [3, 4]

    kind.play(scenario)


def test_one_chunk_is_made_on_request_wherever_the_viewer_is(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        harness = await make()
        harness.admit(run=4)
        harness.generate()
        assert len(await harness.received_so_far(PackagedChunk)) == LED
        harness.submit(commands.GenerateNext("a", 4))
        assert [chunk.index for chunk in await harness.received_so_far(PackagedChunk)] == [LED]
        harness.submit(commands.SetPlayhead("a", 4, 0.0, False))
        assert await harness.received_so_far(PackagedChunk) == []

    kind.play(scenario)


def test_nothing_is_made_before_or_after_it_may_be(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        harness = await make()
        harness.admit(run=1)
        assert await harness.received_so_far(PackagedChunk) == []
        harness.generate()
        assert len(await harness.received_so_far(PackagedChunk)) == LED
        harness.submit(commands.StopGenerating(), commands.SetPlayhead("a", 1, 3.0, False))
        assert await harness.received_so_far(PackagedChunk) == []
        harness.submit(commands.GenerateUntil(0.0))
        assert await harness.received_so_far(PackagedChunk) == []
        harness.generate()
        assert (await harness.chunk()).index == LED

    kind.play(scenario)


def test_a_session_for_which_no_slab_is_free_is_refused(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        harness = await make()
        for number, session in enumerate("abc"):
            harness.admit(run=number, session=session)
        refused = await harness.next(events.AdmissionRefused)
        assert (refused.session, refused.run, refused.on_host) == ("c", SLABS, False)
        harness.submit(commands.Evict("a", 0))
        harness.admit(run=9, session="c")
        harness.generate()
        assert (await harness.chunk("c")).run == 9

    kind.play(scenario)


def test_a_session_that_is_here_already_is_no_other(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        harness = await make()
        harness.generate()
        harness.admit(run=1)
        harness.admit(run=2)
        failed = await harness.next(events.RunFailed)
        assert (failed.session, failed.run) == ("a", 2)
        harness.submit(commands.SetPlayhead("a", 1, 3.0, False))
        while (await harness.chunk()).index < LED:
            pass

    kind.play(scenario)


def test_a_suspended_session_goes_on_where_it_was(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        harness = await make()
        harness.generate()
        harness.admit(run=1)
        await harness.chunk()
        harness.submit(commands.Suspend("a", 1))
        moved = await harness.next(events.MovedToHost)
        assert await harness.call(lambda engine: engine.free_slabs) == SLABS
        assert await harness.call(lambda engine: engine.host_bytes_used) > 0
        harness.submit(commands.Resume("a", 1, 60.0))
        assert (await harness.chunk()).index == moved.next_chunk
        assert await harness.call(lambda engine: engine.host_bytes_used) == 0

    kind.play(scenario)


def test_a_resumption_for_which_no_slab_is_free_leaves_it_on_the_host(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        harness = await make()
        harness.generate()
        harness.admit(run=1)
        await harness.chunk()
        harness.submit(commands.Suspend("a", 1))
        moved = await harness.next(events.MovedToHost)
        harness.admit(run=2, session="b")
        harness.admit(run=3, session="c")
        harness.submit(commands.Resume("a", 1, 0.0))
        refused = await harness.next(events.AdmissionRefused)
        assert (refused.session, refused.on_host) == ("a", True)
        harness.submit(commands.Evict("b", 2), commands.Resume("a", 1, 60.0))
        assert (await harness.chunk()).index == moved.next_chunk

    kind.play(scenario)


def test_a_state_that_does_not_fit_on_the_host_stays_and_goes_on(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        harness = await make()
        harness.generate()
        harness.admit(run=1)
        harness.admit(run=2, session="b")
        buffer = await harness.reserve(on_host=True)
        harness.submit(commands.Suspend("b", 2))
        refused = await harness.next(events.SuspendFailed)
        assert refused.session == "b"
        harness.submit(commands.SetPlayhead("b", 2, 60.0, False))
        while (await harness.chunk("b")).index < LED:
            pass
        await harness.call(lambda engine: engine.release(buffer))
        harness.submit(commands.Suspend("b", 2))
        assert (await harness.next(events.MovedToHost)).session == "b"

    kind.play(scenario)


def test_a_halted_session_makes_nothing_until_it_is_not(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        harness = await make()
        harness.generate()
        harness.admit(run=1)
        await harness.received_so_far(PackagedChunk)
        harness.submit(commands.PauseGeneration("a", 1, 0), commands.SetPlayhead("a", 1, 60.0, True))
        assert await harness.received_so_far(PackagedChunk) == []
        harness.submit(commands.ResumeGeneration("a", 1, 0))
        assert (await harness.chunk()).index == LED

    kind.play(scenario)


def test_a_prompt_takes_effect_between_two_chunks(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        harness = await make()
        harness.generate()
        harness.admit(run=1)
        await harness.received_so_far(PackagedChunk)
        harness.submit(
            commands.SetConditions("a", 1, 3, "a blue square"), commands.SetPlayhead("a", 1, 60.0, False)
        )
        said = [await harness.next(PackagedChunk, events.ControlTookEffect) for _ in range(4)]
        assert isinstance(said[0], events.ControlTookEffect)
        assert said[0].control_seq == 3
        chunks = [item for item in said[1:] if isinstance(item, PackagedChunk)]
        assert [(chunk.index, chunk.control_seq) for chunk in chunks] == [(LED + n, 3) for n in range(3)]

    kind.play(scenario)


def test_of_several_prompts_the_last_is_what_is_shown_and_each_is_acknowledged(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        harness = await make()
        harness.generate()
        harness.admit(run=1)
        await harness.received_so_far(PackagedChunk)
        for number in (1, 2, 3):
            harness.submit(commands.SetConditions("a", 1, number, f"a blue {number}"))
        taken = await harness.received_so_far(events.ControlTookEffect)
        assert [each.control_seq for each in taken] == [1, 2, 3]
        harness.submit(commands.SetPlayhead("a", 1, 3.0, False))
        assert (await harness.chunk()).control_seq == 3

    kind.play(scenario)


def test_a_session_stands_still_whole_until_it_is_thawed(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        harness = await make()
        harness.generate()
        harness.admit(run=1)
        await harness.chunk()
        # So far away that there is always a chunk to make, however fast the device is.
        harness.submit(commands.SetPlayhead("a", 1, 10_000.0, False), commands.Quiesce("a", 1, 11))
        frozen = await harness.next(events.Quiesced)
        assert frozen.number == 11
        assert await harness.received_so_far(PackagedChunk) == []
        header, _ = await harness.quiesced("a")
        assert header["next_chunk"] == frozen.next_chunk
        harness.submit(commands.Unquiesce("a", 1))
        assert (await harness.chunk()).index == frozen.next_chunk

    kind.play(scenario)


def test_a_wish_to_stand_still_can_be_taken_back(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        harness = await make()
        harness.admit(run=1)
        harness.submit(commands.Quiesce("a", 1, 1), commands.Unquiesce("a", 1))
        harness.generate()
        while (await harness.chunk()).index < LED - 1:
            pass
        assert await harness.received_so_far(events.Quiesced) == []

    kind.play(scenario)


def test_an_evicted_session_leaves_nothing_and_its_commands_mean_nothing(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        harness = await make()
        harness.generate()
        harness.admit(run=1)
        await harness.chunk()
        harness.submit(
            commands.Evict("a", 1),
            commands.SetPlayhead("a", 1, 9.0, True),
            commands.PauseGeneration("a", 1, 0),
        )
        await harness.settled()
        assert await harness.call(lambda engine: (engine.free_slabs, engine.host_bytes_used)) == (
            SLABS,
            0,
        )
        harness.submit(commands.Evict("a", 1), commands.Resume("a", 1, 0.0), commands.Evict("nobody", 7))
        assert await harness.received_so_far(events.RunFailed) == []
        harness.admit(run=2)
        chunk = await harness.chunk()
        assert (chunk.run, chunk.index) == (2, 0)

    kind.play(scenario)


def test_commands_of_an_earlier_run_mean_nothing(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        harness = await make()
        harness.generate()
        harness.admit(run=4)
        harness.submit(
            commands.Evict("a", 3),
            commands.Suspend("a", 3),
            commands.PauseGeneration("a", 3, 0),
            commands.Quiesce("a", 3, 1),
        )
        harness.submit(commands.SetPlayhead("a", 4, 60.0, False))
        assert [(await harness.chunk()).index for _ in range(6)] == list(range(6))

    kind.play(scenario)


def test_commands_that_a_suspension_overtook_harm_no_session(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        harness = await make()
        harness.generate()
        harness.admit(run=1)
        await harness.chunk()
        harness.submit(commands.Suspend("a", 1))
        moved = await harness.next(events.MovedToHost)
        harness.submit(
            commands.SetPlayhead("a", 1, 0.5, True),
            commands.PauseGeneration("a", 1, 0),
            commands.Resume("a", 1, 60.0),
        )
        assert (await harness.chunk()).index == moved.next_chunk

    kind.play(scenario)


def test_a_session_without_latents_goes_on_at_its_chunk(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        harness = await make()
        harness.generate()
        harness.admit(run=1, next_chunk=5)
        # Commands that arrive meanwhile take effect once the session is there.
        harness.submit(commands.SetConditions("a", 1, 3, "a blue square"))
        first = await harness.chunk()
        assert (first.index, first.packaged.frames) == (5, 12)
        harness.submit(commands.SetPlayhead("a", 1, 60.0, False))
        while (chunk := await harness.chunk()).control_seq < 3:
            assert chunk.index < 9

    kind.play(scenario)


def test_a_session_goes_on_from_its_latents(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        harness, other = await make(), await make()
        for each in (harness, other):
            each.generate()
        harness.admit(run=1)
        shown = [await harness.chunk() for _ in range(2)]
        other.admit(run=5, next_chunk=2, latents=await latents_of(harness, shown))
        chunk = await other.chunk()
        assert (chunk.run, chunk.index, chunk.first_frame) == (5, 2, 21)

    kind.play(scenario)


def test_latents_of_a_wrong_shape_end_the_run(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        harness = await make()
        harness.generate()
        harness.admit(run=1)
        latents = await latents_of(harness, [await harness.chunk(), await harness.chunk()])
        harness.admit(run=2, next_chunk=1, session="b", latents=latents)
        failed = await harness.next(events.RunFailed)
        assert (failed.session, failed.run) == ("b", 2)
        assert "before chunk 1" in failed.reason

    kind.play(scenario)


def test_a_session_that_cannot_be_computed_ends_alone(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        harness = await make()
        harness.generate()
        harness.admit(run=1)
        harness.admit(run=2, session="fails", prompt="raise")
        failed = await harness.next(events.RunFailed)
        assert (failed.session, failed.run) == ("fails", 2)
        harness.submit(commands.SetPlayhead("a", 1, 60.0, False))
        assert isinstance(await harness.chunk(), PackagedChunk)
        assert await harness.call(lambda engine: engine.free_slabs) == SLABS - 1

    kind.play(scenario)


@pytest.mark.parametrize("on_host", [False, True])
def test_a_state_goes_on_elsewhere_as_it_would_have_here(kind: Kind, on_host: bool) -> None:
    async def scenario(make: Make) -> None:
        here, there = await make(), await make()
        for each in (here, there):
            each.generate()
        here.admit(run=1)
        await here.received_so_far(PackagedChunk)
        if on_host:
            here.submit(commands.Suspend("a", 1))
            await here.next(events.MovedToHost)
        else:
            here.submit(commands.Quiesce("a", 1, 1))
            await here.next(events.Quiesced)
        header, pages = await here.quiesced("a")
        buffer = await there.reserve(on_host=on_host)
        await there.adopt(buffer, header, pages, run=8)
        assert await there.received_so_far(PackagedChunk) == []
        for harness, run in ((here, 1), (there, 8)):
            harness.submit(commands.Resume("a", run, 1.5) if on_host else commands.Unquiesce("a", run))
            harness.submit(commands.SetPlayhead("a", run, 1.5, False))
        as_here, as_there = await here.chunk(), await there.chunk()
        assert (as_here.run, as_there.run) == (1, 8)
        assert as_here.index == as_there.index == LED
        assert as_here.latents == as_there.latents
        assert as_here.packaged == as_there.packaged

    kind.play(scenario)


def test_a_state_is_not_taken_where_it_is_no_state_of_the_model_or_one_too_many(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        here, there = await make(), await make()
        for each in (here, there):
            each.generate()
        here.admit(run=1)
        await here.chunk()
        here.submit(commands.Quiesce("a", 1, 1))
        await here.next(events.Quiesced)
        header, pages = await here.quiesced("a")
        buffer = await there.reserve(on_host=False)
        with pytest.raises(SnapshotRejectedError, match="model"):
            await there.adopt(buffer, {**header, "model": "another"}, pages, run=8)
        missing = dict(list(pages.items())[:-1])
        with pytest.raises(SnapshotRejectedError):
            await there.adopt(buffer, header, missing, run=8)
        with pytest.raises(SnapshotRejectedError):
            buffer.place("no page of a state", 4)
        await there.adopt(buffer, header, pages, run=8)
        second = await there.reserve(on_host=False)
        with pytest.raises(DuplicateSessionError):
            await there.adopt(second, header, pages, run=9)
        with pytest.raises(SlabsExhaustedError):
            await there.reserve(on_host=False)
        await there.call(lambda engine: engine.release(second))
        assert await there.call(lambda engine: engine.free_slabs) == SLABS - 1

    kind.play(scenario)


def test_pages_that_a_chunk_changed_are_known_by_their_stamps(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        harness = await make()
        harness.generate()
        harness.admit(run=1)
        await harness.received_so_far(PackagedChunk)
        before = await harness.call(lambda engine: engine.pages("a"))
        sent = {page.name: page.stamp for page in before}
        copied = {page.name: [part.clone() for part in page.parts] for page in before}
        harness.submit(commands.SetPlayhead("a", 1, 0.6, False))
        assert len(await harness.received_so_far(PackagedChunk)) == 1
        after = await harness.call(lambda engine: engine.pages("a"))
        same = [page for page in after if sent.get(page.name) == page.stamp]
        assert same
        assert len(same) < len(after)
        for page in same:
            assert all(
                bool((part == old).all()) for part, old in zip(page.parts, copied[page.name], strict=True)
            )

    kind.play(scenario)


def test_only_a_session_that_stands_still_is_read_whole(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        harness = await make()
        harness.generate()
        harness.admit(run=1)
        await harness.chunk()
        with pytest.raises(UnknownSessionError):
            await harness.call(lambda engine: engine.export_session("a"))
        with pytest.raises(UnknownSessionError):
            await harness.call(lambda engine: engine.pages("nobody"))

    kind.play(scenario)


def test_a_call_that_was_given_up_is_not_carried_out(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        harness = await make()
        called: list[Engine] = []
        given_up = harness.runner.call(called.append)
        if given_up.cancel():
            # Otherwise a thread was faster.
            await harness.call(lambda engine: None)
        assert len(called) == (not given_up.cancelled())

    kind.play(scenario)


def test_an_ended_device_delivers_what_it_has_made_and_no_more(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        harness = await make()
        assert [harness.runner.alive, harness.packager.alive] == [True, True]
        harness.generate()
        harness.admit(run=1)
        await harness.chunk()
        await harness.close()
        assert [harness.runner.alive, harness.packager.alive] == [False, False]
        made = harness.runner.engine.sessions["a"].delivered
        indices = [1 + index for index in range(made - 1)]
        await harness.callbacks_run()
        await kind.time_passes()
        found = [harness.delivered.get_nowait() for _ in range(harness.delivered.qsize())]
        assert [chunk.index for chunk in found if isinstance(chunk, PackagedChunk)] == indices
        harness.submit(commands.SetPlayhead("a", 1, 60.0, True))
        await harness.callbacks_run()
        await kind.time_passes()
        assert harness.delivered.empty()

    kind.play(scenario)


async def latents_of(harness: DeviceHarness, chunks: list[PackagedChunk]) -> Any:
    """Return the latents as a takeover reads them from the hot store."""
    import torch

    shape = harness.runner.engine.config.latent_shape
    parts = [
        torch.frombuffer(bytearray(chunk.latents), dtype=getattr(torch, chunk.latents_dtype)).reshape(shape)
        for chunk in chunks
    ]
    return torch.cat(parts)
