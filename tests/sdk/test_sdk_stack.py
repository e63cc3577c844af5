"""The client, against the whole stack. tests/stack/test_stack_documents.py runs its documented examples."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tools import demo
from typer.testing import CliRunner

from turboserve.bench.streaming.decode import decode as decode_file
from turboserve.cli.main import app
from turboserve.cli.stack.background import BackgroundStack
from turboserve.client import (
    AsyncClient,
    Chunk,
    Client,
    ControlSupersededError,
    NotFoundError,
    ProblemError,
    PromptSupersededError,
    Quality,
    SessionEndedError,
    Skip,
)
from turboserve.experiments.toyworld.judge import has_colours

pytestmark = pytest.mark.stack

RUNNER = CliRunner()


async def test_a_figure_is_steered(stack: BackgroundStack) -> None:
    async with AsyncClient(stack.url) as client:
        [model] = [each for each in await client.models() if each.default]
        [steer] = model.controls
        assert steer.name == "steer"
        assert {"left", "right", "up", "down", "stop"} <= set(steer.value_schema["enum"])
        session = await client.create("a red circle moving left", max_lead_s=1.0)
        async with session.watch() as stream:
            await anext(aiter(stream))
            receipt = await session.set_control("steer", "up", drop_buffer=True)
            async for chunk in stream:
                if chunk.control_seq >= receipt.control_seq:
                    break
        assert await session.applied(receipt) <= chunk.index
        assert (await session.refresh()).controls == {"steer": "up"}
        with pytest.raises(ProblemError) as refused:
            await session.set_control("steer", "sideways")
        assert (refused.value.status, refused.value.field) == (422, "value")
        await session.end()


async def test_a_session_from_its_first_prompt_to_its_end(stack: BackgroundStack, tmp_path: Path) -> None:
    async with AsyncClient(stack.url) as client:
        session = await client.create("a red circle moving left", seed=7, metadata={"who": "sdk"})
        recording = await session.record(tmp_path / "red.mp4", seconds=2.0)
        assert recording.seconds >= 2.0
        video = decode_file(recording.path.read_bytes())
        assert video.gaps() == []
        assert has_colours(video.frames, ["red"])

        async with session.watch() as stream:
            receipt = await session.prompt("a blue square moving up")
            async for chunk in stream:
                if chunk.control_seq >= receipt.control_seq:
                    break
        assert await session.applied(receipt) <= chunk.index
        assert (await session.refresh()).prompt == "a blue square moving up"
        assert any(decision.kind == "place" for decision in await session.decisions())

        changed = await session.change(quality=Quality(pin=True), max_lead_s=2.0)
        assert (changed.quality, changed.max_lead_s) == (Quality(pin=True), 2.0)
        changed = await session.change(quality=None)
        assert (changed.quality, changed.max_lead_s) == (None, 2.0)

        async with session.watch() as stream:
            items = stream.items()
            while not isinstance(item := await anext(items), Chunk):
                pass
            taken, receipt = item.index, await session.prompt("a green circle", drop_buffer=True)
            seen: list[Chunk | Skip] = []
            async for item in items:
                seen += [item] if isinstance(item, Chunk | Skip) else []
                if seen and isinstance(item, Chunk) and item.control_seq >= receipt.control_seq:
                    break
        # Chunks that were taken before the skip came, the skip, and the first chunk that shows the prompt.
        *before, skip, first = seen
        assert isinstance(skip, Skip)
        assert isinstance(first, Chunk)
        assert (skip.index, skip.control_seq) == (first.index, receipt.control_seq)
        given = [each.index for each in before if isinstance(each, Chunk)]
        assert sorted([*given, *skip.discarded]) == list(range(taken + 1, skip.index))

        assert (await session.pause()).activity == "paused"
        assert (await session.pause()).activity == "paused"
        assert (await session.resume()).activity == "watching"
        assert (await session.end()).phase == "terminated"
        kinds = [event.type async for event in session.events()]
        assert kinds[0] == "session.created"
        assert kinds[-1] == "session.ended"
        assert session.id in {each.id async for each in client.sessions(["terminated"])}
        with pytest.raises(SessionEndedError):
            await session.applied(receipt.model_copy(update={"prompt_id": "prm_unknown"}))


async def test_the_server_records_a_session(stack: BackgroundStack, tmp_path: Path) -> None:
    async with AsyncClient(stack.url) as client:
        session = await client.create("a red circle moving left", seed=7, record=True)
        async with session.watch(after=-1) as stream:
            async for chunk in stream:
                if chunk.index == 2:
                    break
        stopped = await session.stop_recording()
        info = await stopped.complete()
        assert (info.session, info.from_chunk, info.missing_chunks) == (session.id, 0, 0)
        again = await session.start_recording()
        assert again.id != stopped.id
        assert [each.id async for each in session.recordings()] == [again.id, stopped.id]
        written: list[tuple[int, int]] = []
        path = await stopped.download(tmp_path / "red.mp4", on_bytes=lambda *now: written.append(now))
        assert written[-1] == (path.stat().st_size, path.stat().st_size)
        video = decode_file(path.read_bytes())
        assert video.gaps() == []
        assert has_colours(video.frames, ["red"])
        await session.end()
        await again.delete()
        with pytest.raises(NotFoundError):
            await again.refresh()
        assert again.id not in {each.id async for each in client.recordings()}
        await client.recording(stopped.id).delete()


async def test_a_prompt_and_a_value_that_no_chunk_shows_are_superseded(stack: BackgroundStack) -> None:
    async with AsyncClient(stack.url) as client:
        session = await client.create("a red circle moving left")
        await session.pause()
        first = await session.prompt("a green square")
        second = await session.prompt("a blue square")
        left = await session.set_control("steer", "left")
        right = await session.set_control("steer", "right")
        await session.resume()
        async with session.watch() as stream:
            async for chunk in stream:
                if chunk.control_seq >= right.control_seq:
                    break
        with pytest.raises(PromptSupersededError) as lost:
            await session.applied(first)
        assert lost.value.superseded_by == second.prompt_id
        with pytest.raises(ControlSupersededError) as lost_value:
            await session.applied(left)
        assert (lost_value.value.control_id, lost_value.value.superseded_by) == (
            left.control_id,
            right.control_id,
        )
        assert await session.applied(right) <= chunk.index
        await session.end()


def test_the_client_without_async_watches_frames(stack: BackgroundStack) -> None:
    with Client(stack.url) as client:
        assert client.models()
        session = client.create("a green triangle moving right", seed=3)
        with session.watch(after=-1) as stream:
            times = []
            for frame in stream.frames(paced=True):
                assert frame.image.shape[-1] == 3
                times.append(frame.time_s)
                if frame.chunk == 2:
                    break
        assert times == sorted(times)
        assert times[0] == 0.0
        assert client.session(session.id).end().ended


def test_the_command_line_leads_a_session_from_creation_to_end(
    stack: BackgroundStack, tmp_path: Path
) -> None:
    def turboserve(*arguments: str, status: int = 0) -> str:
        result = RUNNER.invoke(app, ["session", *arguments], env={"TURBOSERVE_DATA": stack.record.data})
        assert result.exit_code == status, result.output
        return result.output.strip()

    given = ("--control", "steer=left", "--record")
    name = turboserve("create", "a red circle moving left", "--seed", "7", "--pin", *given)
    info = json.loads(turboserve("show", name))
    assert (info["seed"], info["controls"]) == (7, {"steer": "left"})
    assert info["quality"] == {"floor": None, "pin": True}
    assert info["recording"].startswith("rec_")
    assert "is not NAME=VALUE" in turboserve("create", "a", "--control", "steer", status=1)
    assert "No such file" in turboserve("create", "a", "--control", "first=@no.png", status=1)
    clip = tmp_path / "clip.mp4"
    assert turboserve("record", name, "-o", str(clip), "--seconds", "1").startswith(str(clip))
    assert has_colours(decode_file(clip.read_bytes()).frames, ["red"])
    with (
        ThreadPoolExecutor() as pool,
        Client(stack.url) as client,
        client.session(name).watch() as stream,
    ):
        waiting = pool.submit(turboserve, "prompt", name, "a blue square", "--json")
        # Without a viewer that takes chunks, none are generated beyond the lead.
        for _ in stream:
            if waiting.done():
                break
        shown = json.loads(waiting.result())["chunk_index"]
    turboserve("pause", name)
    waited = turboserve("prompt", name, "a blue square moving up", "--timeout", "0.2", status=1)
    assert f"turboserve session watch {name}" in waited
    turboserve("resume", name)
    assert name in {json.loads(line)["id"] for line in turboserve("list", "--json").splitlines()}
    turboserve("prompt", name, "not a [/b] square", "--no-wait")
    assert name in turboserve("list")
    turboserve("end", name)
    lines = [json.loads(line) for line in turboserve("watch", name, "--after", "-1", "--json").splitlines()]
    assert shown in [line["index"] for line in lines if line["type"] == "chunk" and line["control_seq"]]
    assert name not in turboserve("list", "--json")
    assert name in turboserve("list", "--json", "--all")
    # A terminal of 80 columns has no room for another column of words.
    header, *rows = turboserve("list", "--all").splitlines()
    assert header.split() == ["session", "phase", "activity", "chunks", "prompt"]
    assert any(name in row and "terminated" in row for row in rows)
    assert any(row.split() == ["ended"] or row.strip().startswith("ended by") for row in rows), rows
    assert "no session" in turboserve("show", "ses_unknown", status=1)
    # Other commands find the running stack as well.
    found = RUNNER.invoke(app, ["usage", "--json"], env={"TURBOSERVE_DATA": stack.record.data})
    assert found.exit_code == 0, found.output


def test_the_command_line_shows_a_chunk_from_the_request_to_its_delivery(stack: BackgroundStack) -> None:
    with Client(stack.url) as client:
        session = client.create("a red circle", seed=3)
        try:
            with session.watch(after=-1) as stream:
                next(iter(stream))
            done = RUNNER.invoke(app, ["session", "timeline", session.id, "--url", stack.url, "--json"])
        finally:
            session.end()
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    names = ["created", "decided", "placed", "fenced", "due", "started", "denoised", "decoded", "packaged"]
    assert [hop["name"] for hop in found["hops"]] == [*names, "published", "appended", "delivered"]
    # One clock measured the stages of the worker.
    steps = {hop["name"]: hop["since_s"] for hop in found["hops"]}
    assert all(steps[name] >= 0 for name in names[5:])
    computed = steps["denoised"] + steps["decoded"] + steps["packaged"]
    assert computed == pytest.approx(found["compute_s"], abs=1e-3)
    assert found["decision"]["worker"] == found["worker"]


@pytest.mark.parametrize("command", ["session list", "usage", "audit", "webhooks list"])
def test_a_command_without_a_stack_names_what_to_do(tmp_path: Path, command: str) -> None:
    environment = {"TURBOSERVE_DATA": str(tmp_path), "TURBOSERVE_URL": None}
    result = RUNNER.invoke(app, command.split(), env=environment)
    assert result.exit_code == 1
    assert "turboserve up" in result.output
    assert "--url" in result.output


def test_the_command_has_a_version() -> None:
    assert RUNNER.invoke(app, ["--version"]).output.startswith("turboserve 0.")


def test_a_device_that_is_not_there_is_an_error_in_one_line(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["generate", "a", "-o", str(tmp_path / "a.mp4"), "--device", "cuda:77"])
    assert result.exit_code == 1
    assert result.output.startswith("turboserve: --device: cuda:77 is not available: ")
    assert len(result.output.splitlines()) == 1


def test_the_demo_leaves_one_video_over_two_workers(stack: BackgroundStack, tmp_path: Path) -> None:
    lines: list[str] = []
    output = tmp_path / "demo.mp4"
    # A shorter script: each prompt for four chunks, since the figure of the one before leaves within two.
    demo.play(stack.url, output, demo.steps(act_s=3.0), seconds=12.0, say=lines.append)
    video = decode_file(output.read_bytes())
    assert video.gaps() == []
    for colour in ("red", "blue", "green"):
        parts = (video.frames[n : n + 8] for n in range(0, len(video.frames) - 8, 4))
        assert any(has_colours(part, [colour]) for part in parts), colour
    assert sum("comes from" in line for line in lines) == 2, lines
