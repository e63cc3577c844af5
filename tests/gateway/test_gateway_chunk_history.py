"""How one chunk came about: the hops from the request to the screen, by REST and by `turboserve session`."""

from __future__ import annotations

import asyncio
import json

import httpx
from typer.testing import CliRunner

from tests.gateway.conftest import StartSession, Watch
from turboserve.cli.main import app
from turboserve.contracts.chunks import ChunkHeader, ChunkStages
from turboserve.contracts.sessions import Decision, Phase, SessionRecord
from turboserve.gateway.chunks.history import Sources, history

PLACEMENT = ["created", "decided", "placed", "fenced"]


async def test_the_first_chunk_has_the_hops_of_its_placement_and_a_later_one_has_not(
    api: httpx.AsyncClient, gateway_url: str, start: StartSession, watch: Watch
) -> None:
    session = (await start())["id"]
    viewer = await watch(session, after=-1)
    await viewer.chunks(1)
    await viewer.say(type="first_frame")
    await viewer.chunks(1)
    receipt = (await api.post(f"/v1/sessions/{session}/prompts", json={"prompt": "a blue square"})).json()
    applied = await viewer.until("prompt.applied", prompt_id=receipt["prompt_id"])

    # The worker of these tests notes no stages, as a worker of an earlier version.
    first = (await api.get(f"/v1/sessions/{session}/chunks/0")).json()
    assert [hop["name"] for hop in first["hops"]] == [
        *PLACEMENT,
        "published",
        "appended",
        "delivered",
        "shown",
    ]
    assert first["decision"]["kind"] == "place"
    assert first["decision"]["worker"] == first["worker"]
    assert (first["hops"][0]["since_s"], first["hops"][-1]["by"]) == (None, "gateway")

    shown = (await api.get(f"/v1/sessions/{session}/chunks/{applied['chunk_index']}")).json()
    assert [hop["name"] for hop in shown["hops"]][:3] == ["prompted", "published", "appended"]
    assert "shown" not in [hop["name"] for hop in shown["hops"]]
    assert shown["decision"] is None
    assert shown["control_seq"] == receipt["control_seq"]

    for index, status, code in ((100_000, 404, "not_found"), (-1, 422, "invalid_input")):
        answer = await api.get(f"/v1/sessions/{session}/chunks/{index}")
        assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert (await api.get("/v1/sessions/ses_absent/chunks/0")).status_code == 404

    def run(*more: str) -> str:
        done = CliRunner().invoke(app, ["session", "timeline", session, "--url", gateway_url, *more])
        assert done.exit_code == 0, done.output
        return done.output

    printed = json.loads(await asyncio.to_thread(run, "--json"))
    assert [hop["name"] for hop in printed["hops"]] == [hop["name"] for hop in first["hops"]]
    table = await asyncio.to_thread(run, "--chunk", "1")
    assert "appended" in table
    assert "created" not in table


def test_a_chunk_of_an_earlier_version_has_the_hops_that_are_known() -> None:
    record = SessionRecord(
        id="ses_1",
        tenant="t",
        model="toyworld",
        prompt="x",
        seed=1,
        phase=Phase.ACTIVE,
        version=1,
        epoch=2,
        control_seq=0,
        created_at=100.0,
        updated_at=100.0,
    )
    header = ChunkHeader(
        session="ses_1",
        index=7,
        epoch=2,
        began=7,
        worker="wk_b",
        control_seq=0,
        first_frame=84,
        frames=12,
        fps=16,
        width=64,
        height=64,
        codec="avc1.42c01e",
        init_bytes=1,
        published_at=110.0,
    )
    decisions = [
        Decision(session="ses_1", epoch=0, worker="wk_b", kind="place", reason="earlier", at=101.0),
        Decision(session="ses_1", epoch=1, worker="wk_b", kind="recover", reason="lost", at=108.0),
        Decision(session="ses_1", epoch=1, worker="wk_a", kind="wait", reason="full", at=109.0),
    ]
    sources = Sources(record, header, 5, None, None, [], decisions, None)
    found = history(sources)
    assert [(hop.name.value, hop.by) for hop in found.hops] == [
        ("decided", "scheduler"),
        ("published", "wk_b"),
    ]
    assert found.decision is not None
    assert found.decision.kind == "recover"
    assert found.total_s == 2.0
    staged = header.model_copy(
        update={"stages": ChunkStages(due_s=3, started_s=2, denoised_s=1.5, decoded_s=1, packaged_s=0.5)}
    )
    hops = history(Sources(record, staged, 5, 110.25, None, [], [], None, 110.5)).hops
    assert [(hop.name.value, hop.since_s) for hop in hops] == [
        ("due", None),
        ("started", 1.0),
        ("denoised", 0.5),
        ("decoded", 0.5),
        ("packaged", 0.5),
        ("published", 0.5),
        ("appended", 0.25),
        ("delivered", 0.25),
    ]
