"""What holds for every device: the one with tensors and threads, and the virtual one of simulations."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from device_desk import LED, SLOTS, Desk, Kind, Tensors, Virtual

from turboserve.worker.engine import adoption
from turboserve.worker.engine.engine import Models
from turboserve.worker.engine.errors import DuplicateSession, SlabsExhausted, SnapshotRejected, UnknownSession
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.service import commands as do
from turboserve.worker.service import inputs as told
from turboserve.worker.service.stamped import Chunk

Make = Callable[[], Awaitable[Desk]]
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
        desk = await make()
        desk.admit(run=4)
        desk.generate()
        chunks = await desk.told_so_far(Chunk)
        assert [(chunk.run, chunk.index) for chunk in chunks] == [(4, index) for index in range(LED)]
        assert [chunk.packaged.frames for chunk in chunks] == [9, 12, 12]
        assert [chunk.first_frame for chunk in chunks] == [0, 9, 21]
        for chunk in chunks:
            elements = 1
            for size in chunk.latents_shape:
                elements *= size
            assert len(chunk.latents) % elements == 0
            assert chunk.packaged.fragment
        desk.submit(do.SetPlayhead("a", 4, 1.5, False))
        assert [chunk.index for chunk in await desk.told_so_far(Chunk)] == [3, 4]

    kind.play(scenario)


def test_nothing_is_made_before_or_after_it_may_be(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        desk = await make()
        desk.admit(run=1)
        assert await desk.told_so_far(Chunk) == []
        desk.generate()
        assert len(await desk.told_so_far(Chunk)) == LED
        desk.submit(do.StopGenerating(), do.SetPlayhead("a", 1, 3.0, False))
        assert await desk.told_so_far(Chunk) == []
        desk.submit(do.GenerateUntil(0.0))
        assert await desk.told_so_far(Chunk) == []
        desk.generate()
        assert (await desk.chunk()).index == LED

    kind.play(scenario)


def test_a_session_for_which_no_slab_is_free_is_refused(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        desk = await make()
        for number, session in enumerate("abc"):
            desk.admit(run=number, session=session)
        refused = await desk.next(told.AdmissionRefused)
        assert (refused.session, refused.run, refused.on_host) == ("c", SLOTS, False)
        desk.submit(do.Evict("a", 0))
        desk.admit(run=9, session="c")
        desk.generate()
        assert (await desk.chunk("c")).run == 9

    kind.play(scenario)


def test_a_session_that_is_here_already_is_no_other(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        desk = await make()
        desk.generate()
        desk.admit(run=1)
        desk.admit(run=2)
        failed = await desk.next(told.RunFailed)
        assert (failed.session, failed.run) == ("a", 2)
        desk.submit(do.SetPlayhead("a", 1, 3.0, False))
        while (await desk.chunk()).index < LED:
            pass

    kind.play(scenario)


def test_a_suspended_session_goes_on_where_it_was(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        desk = await make()
        desk.generate()
        desk.admit(run=1)
        await desk.chunk()
        desk.submit(do.Suspend("a", 1))
        moved = await desk.next(told.MovedToHost)
        assert await desk.call(lambda engine: engine.free_slots) == SLOTS
        assert await desk.call(lambda engine: engine.table.host_bytes_used) > 0
        desk.submit(do.Resume("a", 1, 60.0))
        assert (await desk.chunk()).index == moved.next_chunk
        assert await desk.call(lambda engine: engine.table.host_bytes_used) == 0

    kind.play(scenario)


def test_a_resumption_for_which_no_slab_is_free_leaves_it_on_the_host(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        desk = await make()
        desk.generate()
        desk.admit(run=1)
        await desk.chunk()
        desk.submit(do.Suspend("a", 1))
        moved = await desk.next(told.MovedToHost)
        desk.admit(run=2, session="b")
        desk.admit(run=3, session="c")
        desk.submit(do.Resume("a", 1, 0.0))
        refused = await desk.next(told.AdmissionRefused)
        assert (refused.session, refused.on_host) == ("a", True)
        desk.submit(do.Evict("b", 2), do.Resume("a", 1, 60.0))
        assert (await desk.chunk()).index == moved.next_chunk

    kind.play(scenario)


def test_a_state_that_does_not_fit_on_the_host_stays_and_goes_on(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        desk = await make()
        desk.generate()
        desk.admit(run=1)
        desk.admit(run=2, session="b")
        buffer = await desk.reserve(on_host=True)
        desk.submit(do.Suspend("b", 2))
        refused = await desk.next(told.SuspendRefused)
        assert refused.session == "b"
        desk.submit(do.SetPlayhead("b", 2, 60.0, False))
        while (await desk.chunk("b")).index < LED:
            pass
        await desk.call(lambda engine: adoption.release(engine, buffer))
        desk.submit(do.Suspend("b", 2))
        assert (await desk.next(told.MovedToHost)).session == "b"

    kind.play(scenario)


def test_a_halted_session_makes_nothing_until_it_is_not(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        desk = await make()
        desk.generate()
        desk.admit(run=1)
        await desk.told_so_far(Chunk)
        desk.submit(do.Halt("a", 1, 0), do.SetPlayhead("a", 1, 60.0, True))
        assert await desk.told_so_far(Chunk) == []
        desk.submit(do.Unhalt("a", 1, 0))
        assert (await desk.chunk()).index == LED

    kind.play(scenario)


def test_a_prompt_takes_effect_between_two_chunks(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        desk = await make()
        desk.generate()
        desk.admit(run=1)
        await desk.told_so_far(Chunk)
        desk.submit(do.SetPrompt("a", 1, 3, "a blue square"), do.SetPlayhead("a", 1, 60.0, False))
        said = [await desk.next(Chunk, told.ControlTaken) for _ in range(4)]
        assert isinstance(said[0], told.ControlTaken)
        assert said[0].control_seq == 3
        chunks = [item for item in said[1:] if isinstance(item, Chunk)]
        assert [(chunk.index, chunk.control_seq) for chunk in chunks] == [(LED + n, 3) for n in range(3)]

    kind.play(scenario)


def test_of_several_prompts_the_last_is_what_is_shown_and_each_is_acknowledged(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        desk = await make()
        desk.generate()
        desk.admit(run=1)
        await desk.told_so_far(Chunk)
        for number in (1, 2, 3):
            desk.submit(do.SetPrompt("a", 1, number, f"a blue {number}"))
        taken = await desk.told_so_far(told.ControlTaken)
        assert [each.control_seq for each in taken] == [1, 2, 3]
        desk.submit(do.SetPlayhead("a", 1, 3.0, False))
        assert (await desk.chunk()).control_seq == 3

    kind.play(scenario)


def test_a_session_stands_still_whole_until_it_is_thawed(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        desk = await make()
        desk.generate()
        desk.admit(run=1)
        await desk.chunk()
        # So far away that there is always something to make, however fast the device is.
        desk.submit(do.SetPlayhead("a", 1, 10_000.0, False), do.Freeze("a", 1, 11))
        frozen = await desk.next(told.Frozen)
        assert frozen.number == 11
        assert await desk.told_so_far(Chunk) == []
        header, _ = await desk.at_rest("a")
        assert header["next_chunk"] == frozen.next_chunk
        desk.submit(do.Thaw("a", 1))
        assert (await desk.chunk()).index == frozen.next_chunk

    kind.play(scenario)


def test_a_wish_to_stand_still_can_be_taken_back(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        desk = await make()
        desk.admit(run=1)
        desk.submit(do.Freeze("a", 1, 1), do.Thaw("a", 1))
        desk.generate()
        while (await desk.chunk()).index < LED - 1:
            pass
        assert await desk.told_so_far(told.Frozen) == []

    kind.play(scenario)


def test_an_evicted_session_leaves_nothing_and_its_commands_mean_nothing(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        desk = await make()
        desk.generate()
        desk.admit(run=1)
        await desk.chunk()
        desk.submit(do.Evict("a", 1), do.SetPlayhead("a", 1, 9.0, True), do.Halt("a", 1, 0))
        await desk.settled()
        assert await desk.call(lambda engine: (engine.free_slots, engine.table.host_bytes_used)) == (SLOTS, 0)
        desk.submit(do.Evict("a", 1), do.Resume("a", 1, 0.0), do.Evict("nobody", 7))
        assert await desk.told_so_far(told.RunFailed) == []
        desk.admit(run=2)
        chunk = await desk.chunk()
        assert (chunk.run, chunk.index) == (2, 0)

    kind.play(scenario)


def test_commands_of_an_earlier_run_mean_nothing(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        desk = await make()
        desk.generate()
        desk.admit(run=4)
        desk.submit(do.Evict("a", 3), do.Suspend("a", 3), do.Halt("a", 3, 0), do.Freeze("a", 3, 1))
        desk.submit(do.SetPlayhead("a", 4, 60.0, False))
        assert [(await desk.chunk()).index for _ in range(6)] == list(range(6))

    kind.play(scenario)


def test_commands_that_a_suspension_overtook_harm_no_session(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        desk = await make()
        desk.generate()
        desk.admit(run=1)
        await desk.chunk()
        desk.submit(do.Suspend("a", 1))
        moved = await desk.next(told.MovedToHost)
        desk.submit(do.SetPlayhead("a", 1, 0.5, True), do.Halt("a", 1, 0), do.Resume("a", 1, 60.0))
        assert (await desk.chunk()).index == moved.next_chunk

    kind.play(scenario)


def test_a_session_without_latents_goes_on_at_its_chunk(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        desk = await make()
        desk.generate()
        desk.admit(run=1, next_chunk=5)
        # What arrives meanwhile takes effect once the session is there.
        desk.submit(do.SetPrompt("a", 1, 3, "a blue square"))
        first = await desk.chunk()
        assert (first.index, first.packaged.frames) == (5, 12)
        desk.submit(do.SetPlayhead("a", 1, 60.0, False))
        while (chunk := await desk.chunk()).control_seq < 3:
            assert chunk.index < 9

    kind.play(scenario)


def test_a_session_goes_on_from_its_latents(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        desk, other = await make(), await make()
        for each in (desk, other):
            each.generate()
        desk.admit(run=1)
        shown = [await desk.chunk() for _ in range(2)]
        other.admit(run=5, next_chunk=2, latents=await latents_of(desk, shown))
        chunk = await other.chunk()
        assert (chunk.run, chunk.index, chunk.first_frame) == (5, 2, 21)

    kind.play(scenario)


def test_latents_of_a_wrong_shape_end_the_run(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        desk = await make()
        desk.generate()
        desk.admit(run=1)
        latents = await latents_of(desk, [await desk.chunk(), await desk.chunk()])
        desk.admit(run=2, next_chunk=1, session="b", latents=latents)
        failed = await desk.next(told.RunFailed)
        assert (failed.session, failed.run) == ("b", 2)
        assert "before chunk 1" in failed.reason

    kind.play(scenario)


def test_a_session_that_cannot_be_computed_ends_alone(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        desk = await make()
        desk.generate()
        desk.admit(run=1)
        desk.admit(run=2, session="fails", prompt="raise")
        failed = await desk.next(told.RunFailed)
        assert (failed.session, failed.run) == ("fails", 2)
        desk.submit(do.SetPlayhead("a", 1, 60.0, False))
        assert isinstance(await desk.chunk(), Chunk)
        assert await desk.call(lambda engine: engine.free_slots) == SLOTS - 1

    kind.play(scenario)


@pytest.mark.parametrize("on_host", [False, True])
def test_a_state_goes_on_elsewhere_as_it_would_have_here(kind: Kind, on_host: bool) -> None:
    async def scenario(make: Make) -> None:
        here, there = await make(), await make()
        for each in (here, there):
            each.generate()
        here.admit(run=1)
        await here.told_so_far(Chunk)
        if on_host:
            here.submit(do.Suspend("a", 1))
            await here.next(told.MovedToHost)
        else:
            here.submit(do.Freeze("a", 1, 1))
            await here.next(told.Frozen)
        header, pages = await here.at_rest("a")
        buffer = await there.reserve(on_host=on_host)
        await there.adopt(buffer, header, pages, run=8)
        assert await there.told_so_far(Chunk) == []
        for desk, run in ((here, 1), (there, 8)):
            desk.submit(do.Resume("a", run, 1.5) if on_host else do.Thaw("a", run))
            desk.submit(do.SetPlayhead("a", run, 1.5, False))
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
        here.submit(do.Freeze("a", 1, 1))
        await here.next(told.Frozen)
        header, pages = await here.at_rest("a")
        buffer = await there.reserve(on_host=False)
        with pytest.raises(SnapshotRejected, match="model"):
            await there.adopt(buffer, {**header, "model": "another"}, pages, run=8)
        missing = dict(list(pages.items())[:-1])
        with pytest.raises(SnapshotRejected):
            await there.adopt(buffer, header, missing, run=8)
        with pytest.raises(SnapshotRejected):
            buffer.place("no page of a state", 4)
        await there.adopt(buffer, header, pages, run=8)
        second = await there.reserve(on_host=False)
        with pytest.raises(DuplicateSession):
            await there.adopt(second, header, pages, run=9)
        with pytest.raises(SlabsExhausted):
            await there.reserve(on_host=False)
        await there.call(lambda engine: adoption.release(engine, second))
        assert await there.call(lambda engine: engine.free_slots) == SLOTS - 1

    kind.play(scenario)


def test_pages_that_a_chunk_changed_are_known_by_their_stamps(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        desk = await make()
        desk.generate()
        desk.admit(run=1)
        await desk.told_so_far(Chunk)
        before = await desk.call(lambda engine: adoption.read(engine, "a"))
        sent = {page.name: page.stamp for page in before}
        copied = {page.name: [part.clone() for part in page.parts] for page in before}
        desk.submit(do.SetPlayhead("a", 1, 0.6, False))
        assert len(await desk.told_so_far(Chunk)) == 1
        after = await desk.call(lambda engine: adoption.read(engine, "a"))
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
        desk = await make()
        desk.generate()
        desk.admit(run=1)
        await desk.chunk()
        with pytest.raises(UnknownSession):
            await desk.call(lambda engine: adoption.read_at_rest(engine, "a"))
        with pytest.raises(UnknownSession):
            await desk.call(lambda engine: adoption.read(engine, "nobody"))

    kind.play(scenario)


def test_a_call_that_was_given_up_is_not_carried_out(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        desk = await make()
        called: list[int] = []
        given_up = desk.runner.call(called.append)
        if given_up.cancel():
            # Else a thread was faster.
            await desk.call(lambda engine: None)
        assert len(called) == (not given_up.cancelled())

    kind.play(scenario)


def test_an_ended_device_delivers_what_it_has_made_and_no_more(kind: Kind) -> None:
    async def scenario(make: Make) -> None:
        desk = await make()
        assert desk.runner.alive
        assert desk.packager.alive
        desk.generate()
        desk.admit(run=1)
        await desk.chunk()
        await desk.close()
        assert not desk.runner.alive
        assert not desk.packager.alive
        made = desk.runner.engine.table.sessions["a"].delivered
        indices = [1 + index for index in range(made - 1)]
        await asyncio.sleep(0.2)
        found = [desk.delivered.get_nowait() for _ in range(desk.delivered.qsize())]
        assert [chunk.index for chunk in found if isinstance(chunk, Chunk)] == indices
        desk.submit(do.SetPlayhead("a", 1, 60.0, True))
        await asyncio.sleep(0.2)
        assert desk.delivered.empty()

    kind.play(scenario)


async def latents_of(desk: Desk, chunks: list[Chunk]) -> Any:
    """As a takeover brings them from the hot store."""
    import torch

    shape = desk.runner.engine.config.latent_shape
    parts = [
        torch.frombuffer(bytearray(chunk.latents), dtype=getattr(torch, chunk.latents_dtype)).reshape(shape)
        for chunk in chunks
    ]
    return torch.cat(parts)
