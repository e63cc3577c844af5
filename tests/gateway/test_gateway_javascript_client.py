"""The JavaScript client in a real Chromium, on a page with the gateway's policy, against a real gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.browser import NEEDS_CHROMIUM, until
from tests.helpers.pool_harness import Pool

pytestmark = NEEDS_CHROMIUM

KEY = "key-of-the-javascript-client-0123456789"


@pytest.fixture
def keyed_url(pool: Pool) -> Iterator[str]:
    """A gateway that needs an API key."""
    yield pool.gateway("javascript_keyed", TURBOSERVE_API_KEYS=f"{KEY}=script", DRAWN_KEY=KEY)
    pool.stop("javascript_keyed")


@pytest.fixture(scope="module")
def stopping_url(pool: Pool) -> Iterator[str]:
    """The gateway "stopping", which the tests stop and start."""
    yield pool.gateway("stopping")
    pool.stop("stopping")


async def visit(page: Any, url: str) -> None:
    """Open a page of the gateway without a script, with the policy of the gateway's pages."""
    # A page that Playwright itself answers would need a permission to reach this machine.
    await page.goto(f"{url}/page/player.css")


async def test_a_session_from_creation_to_end(gateway_url: str, page: Any) -> None:
    await visit(page, gateway_url)
    found = await page.evaluate(
        """async (url) => {
          const { Client } = await import("/page/client/index.js");
          const client = new Client(url);
          const session = await client.create("a red circle", {
            seed: 7, metadata: { who: "js" }, maxLeadS: 2,
          });
          const created = session.info;
          const listed = [];
          for await (const each of client.sessions({ phases: ["requested", "active"], pageSize: 1 })) {
            listed.push(each.id);
          }
          const changed = await session.change({ maxLeadS: null, quality: { pin: true } });
          const types = [], chunks = [];
          let receipt = null;
          for await (const item of session.watch({ after: -1, eventsAfter: 0 })) {
            types.push(item.type);
            if (item.type !== "chunk") continue;
            chunks.push(item);
            receipt ??= await session.prompt("a blue square");
            if (item.control_seq >= receipt.control_seq) break;
          }
          const first = chunks[0];
          return {
            session: created, changed, types, receipt, indices: chunks.map(({ index }) => index),
            listed: listed.includes(session.id),
            header: [typeof first.compute_s, first.worker.length > 0, first.data.byteLength === first.bytes],
            slack: chunks.some(({ tier, slack_s, credit_s }) => tier && Number.isFinite(slack_s + credit_s)),
            format: [first.format.mime, first.format.init.byteLength === first.format.bytes],
            read: await client.session(session.id).refresh(),
            paused: await session.pause(), again: await session.pause(), resumed: await session.resume(),
            decisions: (await session.decisions()).map(({ kind }) => kind),
            ended: await session.end(), models: (await client.models()).map(({ id }) => id),
            workers: (await client.workers()).length, video: session.videoUrl,
          };
        }""",
        gateway_url,
    )
    assert (found["session"]["seed"], found["session"]["metadata"]) == (7, {"who": "js"})
    assert found["session"]["max_lead_s"] == 2
    assert (found["changed"]["max_lead_s"], found["changed"]["quality"]["pin"]) == (None, True)
    assert found["indices"] == list(range(len(found["indices"])))
    assert {"session.created", "session.placed", "prompt.accepted"} <= set(found["types"])
    assert found["header"] == ["number", True, True]
    assert found["listed"]
    assert found["format"][0].startswith("video/mp4")
    assert found["format"][1]
    assert found["read"]["prompt"] == "a blue square"
    assert (found["paused"]["activity"], found["again"]["activity"]) == ("paused", "paused")
    assert found["resumed"]["activity"] == "watching"
    assert "place" in found["decisions"]
    assert found["ended"]["phase"] == "terminated"
    assert found["models"]
    assert found["workers"] >= 1
    assert found["video"].startswith(f"{gateway_url}/v1/sessions/")


async def test_refusals_are_typed_and_name_the_field_and_the_limit(gateway_url: str, page: Any) -> None:
    await visit(page, gateway_url)
    tries = 0

    async def lose(route: Any) -> None:
        nonlocal tries
        tries += 1
        await route.abort()

    await page.route("**/v1/models", lose)
    found = await page.evaluate(
        """async (url) => {
          const sdk = await import("/page/client/index.js");
          const refusal = (action) => action().then(() => "none", (error) => ({
            name: error.name, is: error instanceof sdk.TurboServeError, code: error.code,
            status: error.status, field: error.field, limit: error.limit, errors: error.errors,
            message: error.message,
          }));
          const client = new sdk.Client(url);
          const watch = (id, options) => async () => {
            for await (const item of client.session(id).watch(options)) if (item.type === "chunk") return;
          };
          const session = await client.create("a red circle");
          const far = await refusal(watch(session.id, { after: 1_000_000 }));
          const queries = [await refusal(watch(session.id, { eventsAfter: -1 })),
                           await refusal(watch(session.id, { after: -2 }))];
          await session.end();
          const hurried = new sdk.Client(url, { attempts: 2 });
          return {
            long: await refusal(() => client.create("x".repeat(2_001))),
            both: await refusal(() => client.create("", { seed: -1 })),
            unknown: await refusal(() => client.session("ses_unknown").refresh()),
            unseen: await refusal(watch("ses_unknown")), far, queries,
            unreachable: await refusal(() => hurried.models()),
            scheme: await refusal(async () => new sdk.Client("ftp://x")),
            ended: await refusal(() => session.prompt("a blue square")),
          };
        }""",
        gateway_url,
    )
    long = found["long"]
    assert (long["name"], long["status"], long["code"]) == ("ProblemError", 422, "invalid_input")
    assert (long["field"], str(long["limit"])) == ("prompt", "2000")
    assert {error["field"] for error in found["both"]["errors"]} == {"prompt", "seed"}
    for name in ("unknown", "unseen"):
        assert (found[name]["name"], found[name]["code"]) == ("NotFoundError", "session_not_found")
    assert found["far"]["name"] == "ChunkGoneError"
    queries = found.pop("queries")
    assert [(each["status"], each["field"]) for each in queries] == [(422, "events_after"), (422, "after")]
    assert found["unreachable"]["name"] == "GatewayUnreachableError"
    assert found["unreachable"]["message"].startswith(f"{gateway_url}: ")
    assert tries == 2
    assert found["scheme"]["name"] == "TypeError"
    assert found["ended"]["code"] == "transition_not_allowed"
    assert all(found[name]["is"] for name in found if name != "scheme")


async def test_an_answer_that_got_lost_creates_one_session(gateway_url: str, page: Any, api: Any) -> None:
    await visit(page, gateway_url)
    keys: list[str] = []

    async def lose_the_first(route: Any) -> None:
        keys.append(route.request.headers["idempotency-key"])
        answer = await route.fetch()
        if len(keys) == 1:
            await route.abort()
        else:
            await route.fulfill(response=answer)

    await page.route("**/v1/sessions", lose_the_first)
    session = await page.evaluate(
        """async (url) => {
          const { Client } = await import("/page/client/index.js");
          return (await new Client(url).create("a lost green triangle")).id;
        }""",
        gateway_url,
    )
    assert len(keys) == 2
    assert keys[0] == keys[1]
    listed = (await api.get("/v1/sessions", params={"limit": 50})).json()["sessions"]
    assert [each["id"] for each in listed if each["prompt"] == "a lost green triangle"] == [session]
    await api.delete(f"/v1/sessions/{session}")


async def test_a_stream_continues_after_its_last_chunk_when_the_gateway_is_back(
    pool: Pool, stopping_url: str, page: Any
) -> None:
    await visit(page, stopping_url)
    await page.evaluate(
        """async (url) => {
          const { Client } = await import("/page/client/index.js");
          const session = await new Client(url).create("a red circle");
          window.seen = [];
          window.stream = session.watch({ after: -1 });
          window.reading = (async () => {
            for await (const item of stream) if (item.type === "chunk") window.seen.push(item.index);
            return { end: stream.end, id: session.id };
          })();
          window.session = session;
        }""",
        stopping_url,
    )
    await until(page, "() => window.seen.length > 1")
    pool.stop("stopping")
    before = len(await page.evaluate("window.seen"))
    pool.gateway("stopping")
    await until(page, "(before) => window.seen.length > before + 2", arg=before)
    end = await page.evaluate("session.end().then(() => reading)")
    indices = await page.evaluate("window.seen")
    assert indices == list(range(len(indices)))
    assert (end["end"]["phase"], end["end"]["last"]) == ("terminated", indices[-1])


async def test_an_index_that_no_caller_gave_is_forgotten_when_it_is_refused(
    gateway_url: str, page: Any
) -> None:
    await visit(page, gateway_url)
    found = await page.evaluate(
        """async (url) => {
          const { Client, StreamConnection } = await import("/page/client/index.js");
          const session = await new Client(url).create("a red circle");
          let broken = false, lost = 0;
          const gone = await new Promise((resolve) => {
            const connection = new StreamConnection(session, {
              lost: () => (lost += 1),
              gone: resolve,
              chunk: () => {
                if (broken) {
                  connection.close();
                  resolve(null);
                }
                broken = true;
                connection.lastIndex = -5;
              },
            }, { after: -1 });
          });
          await session.end();
          return [gone?.message ?? null, lost];
        }""",
        gateway_url,
    )
    # Of two interruptions, the client itself made the first one. The gateway's refusal is the second.
    assert found == [None, 2]


ELEMENT = """async ([url, attributes]) => {
  await import("/page/client/player.js");
  const player = document.createElement("turboserve-player");
  window.player = player;
  // An earlier element of the page still plays. Its events are not this one's.
  const events = window.events = [];
  for (const type of ["hello", "format", "chunk", "promptapplied", "promptshown", "controlshown", "quality",
                      "stall", "skip", "statechange", "reconnecting", "end", "error"]) {
    player.addEventListener(type, ({ detail }) => {
      const { error } = detail;
      events.push([type, error ? { name: error.name, isFinal: detail.isFinal } : detail]);
    });
  }
  for (const [name, value] of Object.entries(attributes)) player.setAttribute(name, value);
  document.body.append(player);
}"""
HAS = "(type) => window.events.some(([each]) => each === type)"


async def test_the_element_plays_and_reports(pool: Pool, stopping_url: str, page: Any) -> None:
    url = stopping_url
    await visit(page, url)
    await page.evaluate(ELEMENT, [url, {"base-url": url}])
    session = await page.evaluate("player.create('a red circle moving left').then(({ id }) => id)")
    assert await page.evaluate("player.getAttribute('session')") == session
    await until(page, "() => window.player.playhead > 1")
    assert (
        await page.evaluate("[player.video.videoWidth > 0, player.started, player.connected]") == [True] * 3
    )
    receipt = await page.evaluate("player.prompt('a blue square')")
    await until(page, HAS, arg="promptapplied")
    shown = "(id) => window.events.some(([type, detail]) => type === 'promptshown' && detail.promptId === id)"
    await until(page, shown, arg=receipt["prompt_id"])
    [first, second] = await page.evaluate(
        "events.filter(([type]) => type === 'promptshown').map((e) => e[1])"
    )
    assert (first["prompt"], first["promptId"]) == ("a red circle moving left", "first")
    assert second["prompt"] == "a blue square"
    assert first["seconds"] > 0
    assert second["seconds"] > 0
    control = await page.evaluate("player.setControl('steer', 'left')")
    await until(page, HAS, arg="controlshown")
    [steered] = await page.evaluate("events.filter(([type]) => type === 'controlshown').map((e) => e[1])")
    assert (steered["name"], steered["value"], steered["controlId"]) == (
        *("steer", "left"),
        control["control_id"],
    )
    assert steered["seconds"] > 0
    for name in ("hello", "format", "chunk", "quality", "statechange"):
        assert await page.evaluate(HAS, name), name
    quality = await page.evaluate("events.findLast(([type]) => type === 'quality')[1]")
    assert {"chunk", "tier", "slack_s", "credit_s", "fidelity"} == set(quality)

    assert (await page.evaluate("player.pause()"))["activity"] == "paused"
    assert await page.evaluate("[player.state.activity, player.video.paused]") == ["paused", True]
    assert (await page.evaluate("player.resume()"))["activity"] == "watching"
    at_s = await page.evaluate("player.playhead")
    await until(page, "(s) => window.player.playhead > s", arg=at_s + 0.5)

    # Without a gateway, playback ends with the buffer, and continues when the gateway is back.
    pool.stop("stopping")
    await until(page, "() => window.player.stalled")
    await until(page, HAS, arg="reconnecting")
    at_s = await page.evaluate("player.playhead")
    pool.gateway("stopping")
    await until(page, "(s) => window.player.playhead > s", arg=at_s + 0.5)
    await until(page, "() => !window.player.stalled")
    stalls = await page.evaluate("events.filter(([type]) => type === 'stall').map(([, d]) => d.stalled)")
    assert stalls[:2] == [True, False]

    # Another element shows the same session by its address. It keeps the session while it moves.
    await page.evaluate(ELEMENT, [url, {"src": f"{url}/v1/sessions/{session}"}])
    await until(page, "() => window.player.started")
    moved = "const main = document.createElement('main'); document.body.append(main); main.append(player);"
    await page.evaluate(f"() => {{ {moved} }}")
    assert await page.evaluate("player.session.id") == session
    assert (await page.evaluate("player.end()"))["phase"] == "terminated"
    await until(page, HAS, arg="end")
    assert await page.evaluate("player.ended.phase") == "terminated"
    await page.evaluate("player.close()")
    assert await page.evaluate("[player.session, player.hasAttribute('src')]") == [None, False]
    with pytest.raises(Exception, match="the player has no session"):
        await page.evaluate("player.prompt('x')")


async def test_a_key_that_is_set_after_a_refusal_opens_the_session(keyed_url: str, page: Any) -> None:
    await visit(page, keyed_url)
    session = await page.evaluate(
        """async ([url, key]) => {
          const { Client } = await import("/page/client/index.js");
          return (await new Client(url, { key }).create("a red circle")).id;
        }""",
        [keyed_url, KEY],
    )
    await page.evaluate(ELEMENT, [keyed_url, {"base-url": keyed_url, "session": session}])
    await until(page, HAS, arg="error")
    assert await page.evaluate("events.at(-1)[1]") == {"name": "UnauthorizedError", "isFinal": True}
    assert await page.evaluate("player.session") is None
    await page.evaluate("(key) => { player.key = key; }", KEY)
    await until(page, "() => window.player.started")
    assert KEY not in await page.evaluate("document.documentElement.outerHTML")
    wrong = await page.evaluate(
        """async (url) => {
          const { Client } = await import("/page/client/index.js");
          const error = await new Client(url, { key: "wrong-0123456789" }).models().catch((each) => each);
          return [error.name, error.hadKey, error.wasSentWith("wrong-0123456789"), JSON.stringify(error)];
        }""",
        keyed_url,
    )
    assert wrong[:3] == ["UnauthorizedError", True, True]
    assert "wrong-0123456789" not in wrong[3]
    await page.evaluate("player.end()")


async def test_a_late_answer_for_a_session_that_was_left_changes_nothing(gateway_url: str, page: Any) -> None:
    await visit(page, gateway_url)
    await page.evaluate(ELEMENT, [gateway_url, {"base-url": gateway_url}])
    await page.evaluate("player.create('a red circle').then((session) => { window.left = session; })")
    await until(page, "() => window.player.started")
    may_answer = asyncio.Event()

    async def hold(route: Any) -> None:
        await may_answer.wait()
        await route.continue_()

    await page.route("**/pause", hold)
    await page.evaluate("() => { window.late = player.pause(); }")
    await page.evaluate("player.create('a blue square').then(() => {})")
    await until(page, "() => window.player.started")
    may_answer.set()
    assert (await page.evaluate("late"))["activity"] == "paused"
    assert await page.evaluate("[player.state.activity, player.video.paused]") == ["watching", False]
    await page.evaluate("Promise.all([player.end(), left.end()])")


async def test_an_element_that_was_removed_at_once_opens_its_session_when_it_is_back(
    gateway_url: str, page: Any, api: Any
) -> None:
    session = (await api.post("/v1/sessions", json={"prompt": "a red circle"})).json()["id"]
    await visit(page, gateway_url)
    await page.evaluate(ELEMENT, [gateway_url, {"base-url": gateway_url}])
    await page.evaluate("(id) => { player.setAttribute('session', id); player.remove(); }", session)
    assert await page.evaluate("player.session") is None
    await page.evaluate("() => { document.body.append(player); }")
    await until(page, "() => window.player.started")
    await api.delete(f"/v1/sessions/{session}")


async def test_a_video_that_the_browser_refuses_ends_with_an_error(gateway_url: str, page: Any) -> None:
    await visit(page, gateway_url)
    await page.evaluate(ELEMENT, [gateway_url, {"base-url": gateway_url}])
    await page.evaluate(
        """async () => {
          const revoke = URL.revokeObjectURL;
          window.revoked = [];
          URL.revokeObjectURL = (address) => revoke(window.revoked.push(address) && address);
          const append = SourceBuffer.prototype.appendBuffer;
          SourceBuffer.prototype.appendBuffer = function broken(data) {
            append.call(this, new Uint8Array(data.byteLength).fill(0xff));
          };
          await player.create("a red circle");
          window.restore = () => { SourceBuffer.prototype.appendBuffer = append; };
        }"""
    )
    await until(page, HAS, arg="error")
    # The address of the source did not wait for the next session.
    assert await page.evaluate("revoked.includes(player.video.src)")
    errors = "events.filter(([type]) => type === 'error').map(([, detail]) => detail)"
    assert await page.evaluate(errors) == [{"name": "PlaybackError", "isFinal": True}]
    assert await page.evaluate("player.session") is None
    # The next session plays.
    await page.evaluate("restore()")
    await page.evaluate("player.open(player.getAttribute('session'))")
    await until(page, "() => window.player.started")
    await page.evaluate("player.end()")


async def test_a_format_that_the_browser_does_not_know_is_an_error(gateway_url: str, page: Any) -> None:
    await visit(page, gateway_url)
    found = await page.evaluate(
        """async () => {
          const { Playback } = await import("/page/client/playback.js");
          const error = await new Promise((resolve) => {
            const video = document.createElement("video");
            const playback = new Playback(video, () => {}, () => {}, resolve);
            playback.init({ mime: 'video/mp4; codecs="none"' }, new ArrayBuffer(8));
            playback.chunk({ start_s: 0, duration_s: 1 }, new ArrayBuffer(8));
          });
          return [error.name, error.code, error.cause.name];
        }"""
    )
    assert found == ["PlaybackError", "playback", "NotSupportedError"]


async def test_chips_write_the_prompts_of_any_guide(gateway_url: str, page: Any) -> None:
    await visit(page, gateway_url)
    found = await page.evaluate(
        """async () => {
          const { PromptReader } = await import("/page/prompts.js");
          const kind = (name, ...texts) => ({
            kind: name, default: texts[0], choices: texts.map((text) => ({ text, synonyms: [] })),
          });
          const written = (pattern) => new PromptReader({ id: "any", prompt_guide: {
            pattern, subjects: ["animal"], other_words: ["a", "at"], words_limit: 8, notes: [],
            kinds: [kind("animal", "cat", "dog"), kind("motion", "running"), kind("time", "night")],
          } }).withChoice("a dog", "motion", "running");
          return [written("a {animal} {motion} {time}"), written("a {animal} {motion} at {time}")];
        }"""
    )
    assert found == ["a dog running", "a dog running"]
