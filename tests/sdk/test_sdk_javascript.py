"""The JavaScript client's package and modules, and its types against the API's documents."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.node import needs_node, output_of

ROOT = Path(__file__).parents[2]
SDK = ROOT / "sdk" / "js"
SOURCES = {file.name: file.read_text() for file in (SDK / "src").glob("*.ts")}
MODULES = {file.name: file.read_text() for file in (SDK / "dist").glob("*.js")}
OPENAPI: dict[str, Any] = json.loads((ROOT / "docs/reference/openapi.json").read_text())["components"]
ASYNCAPI: dict[str, Any] = json.loads((ROOT / "docs/reference/asyncapi.json").read_text())["components"]
SCHEMAS = {
    "SessionInfo": OPENAPI["schemas"]["Session"],
    "Receipt": OPENAPI["schemas"]["Receipt"],
    "Decision": OPENAPI["schemas"]["SessionDecision"],
    "Migration": OPENAPI["schemas"]["StartedMigration"],
    "Ticket": OPENAPI["schemas"]["Ticket"],
    "Link": OPENAPI["schemas"]["Link"],
    "RecordingInfo": OPENAPI["schemas"]["Recording"],
    "Model": OPENAPI["schemas"]["Model"],
    "Worker": OPENAPI["schemas"]["Worker"],
    **{name: ASYNCAPI["schemas"][name] for name in ("Hello", "Init", "ChunkMessage", "Skip", "End")},
    "ChunkFidelity": ASYNCAPI["schemas"]["ChunkFidelity"],
}
WHOLE = {
    "SessionInfo",
    "Receipt",
    "Decision",
    "Ticket",
    "Link",
    "RecordingInfo",
    "Hello",
    "Init",
    "ChunkMessage",
    "ChunkFidelity",
    "Skip",
    "End",
}
"""Interfaces that have every member of their schema."""


def members(interface: str) -> dict[str, bool]:
    """Return the members of an interface of `models.ts`, and whether each is always there."""
    [body] = re.findall(
        rf"export interface {interface} \{{\n(.*?)^\}}", SOURCES["models.ts"], re.DOTALL | re.MULTILINE
    )
    found = re.findall(r"^  (\w+)(\??):", body, re.MULTILINE)
    return {name: not optional for name, optional in found}


def exported(text: str) -> set[str]:
    """Return the names of the values that a module exports."""
    lists = re.findall(r"export \{([^}]*)\}", text)
    single = re.findall(r"export (?:declare )?(?:class|const|function) (\w+)", text)
    return {*single, *(name for names in lists for name in re.findall(r"\w+", names))}


@pytest.mark.parametrize("interface", SCHEMAS)
def test_an_interface_has_the_members_of_the_document(interface: str) -> None:
    found, schema = members(interface), SCHEMAS[interface]
    assert found
    assert set(found) <= set(schema["properties"])
    assert {name for name, always in found.items() if always} <= {*schema["required"], "type"}
    if interface in WHOLE:
        assert set(found) == set(schema["properties"])


def test_every_event_that_the_element_reports_has_a_type() -> None:
    [body] = re.findall(
        r"interface PlayerEventDetails \{\n(.*?)^\}", SOURCES["played_session.ts"], re.DOTALL | re.MULTILINE
    )
    sent = {
        name
        for file in ("player.ts", "played_session.ts")
        for name in re.findall(r'#(?:emit|report)\("(\w+)"', SOURCES[file])
    }
    assert set(re.findall(r"^  (\w+):", body, re.MULTILINE)) == sent


@pytest.mark.parametrize("folder", ["js", "python"])
def test_the_license_of_a_client_is_the_projects(folder: str) -> None:
    assert (ROOT / "sdk" / folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_modules_import_nothing_but_each_other() -> None:
    assert {"index.js", "player.js"} <= set(MODULES)
    for text in MODULES.values():
        for path in re.findall(r'from "([^"]+)"', text):
            assert path.removeprefix("./") in MODULES


@pytest.mark.skipif(shutil.which("npm") is None, reason="no npm on this machine: nothing was packed")
def test_npm_packs_the_modules_and_the_types(tmp_path: Path) -> None:
    command = ["npm", "pack", str(SDK), "--offline", "--ignore-scripts", "--pack-destination", str(tmp_path)]
    subprocess.run(
        [*command, "--cache", str(tmp_path / "cache")],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=120,
    )
    [package] = tmp_path.glob("*.tgz")
    with tarfile.open(package) as archive:
        names = {name.removeprefix("package/") for name in archive.getnames()}
        described = json.loads(archive.extractfile("package/package.json").read())  # type: ignore[union-attr]
    assert names == {
        "package.json",
        "README.md",
        "LICENSE",
        *(f"dist/{name}" for name in MODULES),
        *(f"dist/{name}".removesuffix(".js") + ".d.ts" for name in MODULES),
    }
    assert described["license"] == "Apache-2.0"
    assert "dependencies" not in described
    for entry in (".", "./player"):
        assert {path.removeprefix("./") for path in described["exports"][entry].values()} <= names


@needs_node
def test_node_imports_the_client_without_a_browser() -> None:
    script = "import(process.argv[1]).then((client) => console.log(Object.keys(client).join()))"
    names = output_of(script, SDK / "dist/index.js")
    assert set(names.strip().split(",")) == exported(MODULES["index.js"])


def prompts_on_screen(steps: str) -> list[Any]:
    """Return the ids of the prompts that `ShownPrompts` reports while Node runs `steps`."""
    script = f"""import(process.argv[1]).then(({{ ShownPrompts }}) => {{
      const reported = [];
      const shown = new ShownPrompts(({{ promptId }}) => reported.push(promptId));
      {steps}
      console.log(JSON.stringify(reported));
    }})"""
    reported: list[Any] = json.loads(output_of(script, SDK / "dist/shown_prompts.js"))
    return reported


@needs_node
def test_the_newest_prompt_stays_on_screen_when_its_first_chunk_is_forgotten() -> None:
    steps = """
      shown.applied(0, "a red circle", "first");
      shown.applied(10, "a blue square", "second");
      for (let index = 5; index < 2000; index++) {
        shown.chunk(index, index);
        shown.look(index);
      }"""
    assert prompts_on_screen(steps) == ["first", "second"]


@needs_node
def test_a_prompt_that_a_reconnection_repeats_is_reported_once() -> None:
    steps = """
      shown.applied(0, "a red circle", "first");
      shown.chunk(0, 0);
      shown.look(0);
      shown.applied(0, "a red circle", "first");
      shown.look(0.5);"""
    assert prompts_on_screen(steps) == ["first"]


@needs_node
def test_a_request_that_a_gateway_cannot_pass_on_is_repeated_at_another_one() -> None:
    script = """import(process.argv[1]).then(async ({ Client }) => {
      const asked = [];
      globalThis.fetch = async (url) => {
        asked.push(url.hostname);
        const status = { slow: 504, away: 503 }[url.hostname] ?? 200;
        return new Response(JSON.stringify({ retry_after_s: 0.01, models: [] }), { status });
      };
      await new Client(["http://slow", "http://away", "http://here"]).models();
      console.log(JSON.stringify(asked));
    })"""
    assert json.loads(output_of(script, SDK / "dist/index.js")) == ["slow", "away", "here"]


OVER_WEBRTC = """
let peer;
globalThis.RTCPeerConnection = class {
  constructor() { peer = this; }
  addTransceiver() {}
  createDataChannel() { return (this.channel = {}); }
  setLocalDescription() { this.localDescription = { sdp: "offer" }; }
  setRemoteDescription() { this.answered = true; }
  close() { this.isClosed = true; }
};
const asked = [];
globalThis.fetch = async (url, { method }) => {
  if (method === "POST") asked.push(new URL(url).searchParams.get("events_after"));
  return new Response(method === "POST" ? "answer" : null, { status: method === "POST" ? 201 : 204 });
};
const heard = [];
const until = async (done) => { while (!done()) await new Promise((resolve) => setTimeout(resolve, 5)); };
import(process.argv[1]).then(async ({ Client }) => {
  const { WebRtcConnection } = await import(process.argv[2]);
  const session = new Client("http://gateway.test").session("ses_1");
  const on = {
    hello: () => heard.push("hello"),
    event: ({ sequence }, isNew) => heard.push([sequence, isNew]),
    problem: ({ message }) => heard.push(message),
    unavailable: (error) => heard.push(`${error.name}: ${error.message}`),
    lost: () => heard.push("lost"),
  };
  const connection = new WebRtcConnection(session, on);
  const receive = (message) => peer.channel.onmessage({ data: JSON.stringify(message) });
  const hello = { type: "hello", newest_event: 5, events_after: 3 };
  await until(() => peer?.answered);
  receive({ ...hello, protocol_version: 1 });
  receive({ type: "error", title: "not about the client's message" });
  receive({ type: "session.changed", sequence: 5 });
  receive({ type: "session.changed", sequence: 6 });
  receive({ type: "pong" });
  const first = peer;
  first.channel.onclose();
  await until(() => peer !== first && peer.answered);
  receive({ ...hello, protocol_version: 2 });
  const { isClosed } = peer;
  const ticks = new Set();
  globalThis.setInterval = (tick) => (ticks.add(tick), tick);
  globalThis.clearInterval = (tick) => ticks.delete(tick);
  let now = 0;
  Date.now = () => now;
  const atEnd = [];
  const ends = { end: () => atEnd.push("end"), lost: () => atEnd.push("lost") };
  peer = null;
  new WebRtcConnection(new Client(["http://a.test", "http://b.test"]).session("ses_1"), ends);
  await until(() => peer?.answered);
  receive({ ...hello, protocol_version: 1 });
  const checks = ticks.size;
  receive({ type: "end" });
  for (; now < 5000; now += 500) for (const tick of [...ticks]) tick();
  const isShown = !peer.isClosed;
  const tried = [];
  let refusal;
  const three = ["http://a.test", "http://b.test", "http://c.test"];
  peer = null;
  new WebRtcConnection(new Client(three).session("ses_1"), { unavailable: ({ name }) => (refusal = name) });
  await until(() => peer?.answered);
  receive({ ...hello, protocol_version: 1 });
  globalThis.fetch = async (url) => {
    tried.push(new URL(url).hostname);
    now += 20_000;
    return new Response("{}", { status: 503 });
  };
  peer.channel.onclose();
  await until(() => refusal);
  console.log(JSON.stringify({ asked, heard, isClosed, checks, atEnd, isShown, tried, refusal }));
  process.exit();
});
"""
"""Leads a `WebRtcConnection` through two greetings, the second in another version of the protocol. Then leads
one that knows two gateways to the end of its session, and one that loses its connection when no gateway
takes it, and each takes 20 s to say so."""


@needs_node
def test_over_webrtc_events_continue_and_another_version_of_the_protocol_is_refused() -> None:
    result = json.loads(output_of(OVER_WEBRTC, SDK / "dist/index.js", SDK / "dist/webrtc_connection.js"))
    assert result["asked"][:3] == [None, "6", None]
    assert result["heard"][:4] == ["hello", [5, False], [6, True], "lost"]
    [refused] = result["heard"][4:]
    assert refused.startswith("ProtocolError:")
    assert "version 2" in refused
    assert result["isClosed"]
    # With several gateways, a page reported "reconnecting" 2 s after the end.
    assert (result["checks"], result["atEnd"], result["isShown"]) == (1, ["end"], True)
    # After ten seconds, the gateways that were not tried yet were given up.
    assert (result["tried"], result["refusal"]) == (["b.test", "c.test", "a.test"], "ProblemError")


OVERTAKEN = """
let socket;
globalThis.WebSocket = class {
  static OPEN = 1;
  readyState = 1;
  constructor() { socket = this; }
  send() {}
  close() {}
};
globalThis.requestAnimationFrame = () => 0;
globalThis.cancelAnimationFrame = () => {};
let answer;
globalThis.fetch = () => new Promise((resolve) => {
  answer = (body) => resolve(new Response(JSON.stringify(body), { status: 202 }));
});
const playback = {
  wanted: true, started: false, release() {}, reset() {}, beginAt() {},
  play() { this.wanted = true; },
  pause() { this.wanted = false; },
};
const seen = [];
const note = (step) => seen.push([step, played.state.activity, played.state.newestEvent, playback.wanted]);
let played;
const modules = process.argv.slice(1).map((module) => import(module));
Promise.all(modules).then(async ([{ Client }, { PlayedSession }]) => {
  const session = new Client("http://gateway.test").session("ses_1");
  played = new PlayedSession(session, { websocket: playback }, () => {}, null, "websocket");
  const receive = (message) => socket.onmessage({ data: JSON.stringify(message) });
  const live = { phase: "active", epoch: 1 };
  const event = (type, sequence, activity) => receive({ type, sequence, activity, ...live });
  receive({
    type: "hello", protocol_version: 1, newest_event: 3, events_after: 3, activity: "watching", ...live,
    start_s: 0, control_seq: 1, report_interval_s: 60,
  });
  const pausing = played.pause();
  event("prompt.accepted", 4, "watching");
  note("before the answer");
  answer({ phase: "suspended", activity: "paused", epoch: 1, newest_event: 6 });
  await pausing;
  note("answer");
  event("prompt.applied", 5, "watching");
  note("late event");
  event("session.suspended", 6, "paused");
  note("its own event");
  event("session.resume_requested", 7, "watching");
  note("next event");
  const earlier = played.pause();
  answer({ phase: "suspended", activity: "paused", epoch: 1 });
  await earlier;
  note("earlier gateway");
  const late = played.resume();
  answer({ phase: "active", activity: "watching", epoch: 1, newest_event: 6 });
  await late;
  note("late answer");
  const overtaken = played.pause();
  event("session.resume_requested", 9, "watching");
  note("resumed by another viewer");
  answer({ phase: "suspended", activity: "paused", epoch: 1, newest_event: 8 });
  await overtaken;
  note("overtaken answer");
  console.log(JSON.stringify(seen));
  process.exit();
});
"""
"""Pauses a session while news of it arrives out of order."""


@needs_node
def test_news_that_was_overtaken_does_not_turn_the_state_back() -> None:
    seen = json.loads(output_of(OVERTAKEN, SDK / "dist/index.js", SDK / "dist/played_session.js"))
    assert seen == [
        ["before the answer", "watching", 4, False],
        ["answer", "paused", 6, False],
        ["late event", "paused", 6, False],
        ["its own event", "paused", 6, False],
        ["next event", "watching", 7, True],
        ["earlier gateway", "paused", 7, False],
        ["late answer", "paused", 7, False],
        ["resumed by another viewer", "watching", 9, False],
        ["overtaken answer", "watching", 9, True],
    ]
