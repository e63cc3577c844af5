"""Build the images, bring the stack up in containers, stream a session through it, take it down.

`make compose-test` runs it. BUILD and COMPOSE name the commands; without them docker or podman is found. The
stack has its own name, port, tag, passwords, key and volumes, so another running stack and the `.env` of this
folder are not affected.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import httpx
from compose_env import first_key, generate, variables
from containers import Engine, EngineError, prepare_network, run

from turboserve.bench.streaming.decode import decode
from turboserve.bench.streaming.viewer import Viewer
from turboserve.experiments.chaos.simulated_clients import with_retry
from turboserve.experiments.toyworld.judge import has_colours
from turboserve.subjects import SERVICES

ROOT = Path(__file__).resolve().parent.parent
PROJECT = "turboserve-test"
READY_LIMIT_S = 300.0
CHUNK_LIMIT_S = 120.0
BACK_LIMIT_S = 120.0
"""Time from freezing a server until video continues: its watchdog takes 20 to 30 s, the machine the rest."""
STARTED = "echo started $(cut -d' ' -f22 /proc/1/stat)"
FREEZE = """
for each in /proc/[0-9]*; do
    case $(cat "$each/comm" 2>/dev/null) in "$1"*) kill -STOP "${each#/proc/}"; echo frozen ;; esac
done
"""
UNPRIVILEGED = "import os; print('root' if os.getuid() == 0 else 'unprivileged')"
FIRST_PROMPT, FIRST_COLOUR = "a red circle moving left", "red"
SECOND_PROMPT, SECOND_COLOUR = "a blue square moving up", "blue"


def say(text: str) -> None:
    print(f"compose-test: {text}", flush=True)


def build(engine: Engine, tag: str) -> None:
    """Build one image per service and one of the broker, `turboserve-<name>:<tag>`."""
    torch_index = os.environ.get("TORCH_INDEX")
    _build(engine, f"turboserve-nats:{tag}", "deploy/nats/Dockerfile")
    for service in SERVICES:
        arguments = ["--build-arg", f"SERVICE={service}"]
        if torch_index and service == "worker":
            arguments += ["--build-arg", f"TORCH_INDEX={torch_index}"]
        _build(engine, f"turboserve-{service}:{tag}", "deploy/Dockerfile", *arguments)


def _build(engine: Engine, image: str, dockerfile: str, *arguments: str) -> None:
    started_s = time.monotonic()
    run([*engine.build, "-f", dockerfile, *arguments, "-t", image, "."], {}, quiet=True)
    say(f"built {image} in {time.monotonic() - started_s:.0f} s")


class Stack:
    """The containers of one test."""

    def __init__(self, engine: Engine, tag: str, folder: Path) -> None:
        """Copy the files that compose reads to `folder`: some composes prefer the `.env` beside the file."""
        shutil.copy(ROOT / "compose.yaml", folder)
        shutil.copytree(ROOT / "deploy", folder / "deploy")
        self.port = _free_port()
        text = generate((ROOT / ".env.example").read_text())
        self._environment = {
            **variables(text),
            "TURBOSERVE_TAG": tag,
            "TURBOSERVE_PORT": str(self.port),
            # Some composes take the project's name from here.
            "COMPOSE_PROJECT_NAME": PROJECT,
        }
        lines = [f"{name}={value}\n" for name, value in self._environment.items()]
        (folder / ".env").write_text("".join(lines))
        self.key = first_key(self._environment)
        self._compose = [*engine.compose, "-p", PROJECT, "-f", str(folder / "compose.yaml")]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def up(self) -> None:
        run([*self._compose, "up", "-d", "--no-build"], self._environment, quiet=True)

    def down(self) -> None:
        """Remove containers, network and volumes. Never raises, because it also cleans up after failures."""
        run([*self._compose, "down", "-v"], self._environment, quiet=True, check=False)

    def logs(self) -> str:
        parts = []
        for service in ("nats", "redis", "postgres", *SERVICES):
            done = run([*self._compose, "logs", service], self._environment, quiet=True, check=False)
            parts.append(f"--- {service}\n" + "\n".join((done.stdout or "").splitlines()[-40:]))
        return "\n".join(parts)

    def check_services(self) -> None:
        """Check that every service passes its image's health check and none runs as root.

        Raises EngineError.
        """
        for service in SERVICES:
            self._expect(service, "ready", "probe")
            self._expect(service, "unprivileged", "python", "-c", UNPRIVILEGED)

    def freeze(self, server: str, program: str) -> None:
        """Send SIGSTOP to all processes of `program` in the container of `server`, not to its watchdog."""
        # Not every image has pkill.
        self._expect(server, "frozen", "sh", "-c", FREEZE, "-", program)

    def started(self, server: str) -> str:
        """Return when the first process in the container of `server` began; empty while there is none."""
        command = [*self._compose, "exec", "-T", server, "sh", "-c", STARTED]
        done = run(command, self._environment, quiet=True, check=False)
        return next((line for line in done.stdout.splitlines() if line.startswith("started ")), "")

    def _expect(self, service: str, word: str, *command: str) -> None:
        # The output is checked: not every compose passes on the exit status.
        done = run([*self._compose, "exec", "-T", service, *command], self._environment, quiet=True)
        if word not in done.stdout.splitlines():
            raise EngineError(f"{service}: {' '.join(command)} did not say {word!r}:\n{done.stdout}")


def authorization(key: str | None) -> dict[str, str]:
    """Return the headers of a client that has `key`."""
    return {"Authorization": f"Bearer {key}"} if key else {}


async def wait_ready(url: str, key: str | None) -> None:
    """Wait until the gateway is ready and a worker has joined. Raises TimeoutError with what was missing."""
    deadline_s = time.monotonic() + READY_LIMIT_S
    missing = "no answer"
    async with httpx.AsyncClient(base_url=url, timeout=5.0, headers=authorization(key)) as api:
        while time.monotonic() < deadline_s:
            try:
                ready = await api.get("/readyz")
                models = (await api.get("/v1/models")).json().get("models") if ready.is_success else None
                if models:
                    return
                missing = "no worker yet" if ready.is_success else ready.text
            except (httpx.HTTPError, ValueError) as error:
                missing = repr(error)
            await asyncio.sleep(0.5)
    raise TimeoutError(f"the stack was not ready within {READY_LIMIT_S:.0f} s: {missing}")


async def check_closed(url: str) -> None:
    """Check that the API refuses requests without a key or with a foreign host name.

    Raises AssertionError.
    """
    async with httpx.AsyncClient(base_url=url) as api:
        found = [
            (await api.get("/v1/sessions")).status_code,
            (await api.get("/v1/sessions", headers=authorization("x" * 32))).status_code,
            (await api.get("/v1/sessions", headers={"Host": "elsewhere.example"})).status_code,
        ]
    if found != [401, 401, 421]:
        raise AssertionError(f"without a key, with a wrong one, under a foreign name: {found}")


async def stream_a_session(url: str, key: str | None) -> str:
    """Create, watch, decode, switch the prompt, decode again, delete; returns a summary."""
    async with httpx.AsyncClient(base_url=url, headers=authorization(key)) as api:
        viewer = await Viewer.create(api, FIRST_PROMPT, seed=1, keep_video=True)
        async with viewer.watching():
            await viewer.more_chunks(4, CHUNK_LIMIT_S)
            switch = await viewer.submit(SECOND_PROMPT)
            applied = await viewer.event("prompt.applied", CHUNK_LIMIT_S, prompt_id=switch.prompt_id)
            # A new prompt may take two chunks until no part of the old one is visible.
            settled = applied["chunk_index"] + 2
            await viewer.until(lambda: viewer.last >= settled + 1, CHUNK_LIMIT_S, "video of the new prompt")
            await viewer.delete()
            await viewer.until(lambda: viewer.ended is not None, CHUNK_LIMIT_S, "end of the stream")
        video, chunks = decode(viewer.video()), viewer.chunks
        before = video.between(0.0, chunks[3].end_s)
        after = video.between(chunks[settled].start_s, chunks[settled + 1].end_s)
    checks = {
        "chunks are contiguous": [chunk.index for chunk in chunks] == list(range(len(chunks))),
        "no chunk came twice": viewer.player.repeated == 0,
        "frames are contiguous": not video.gaps(),
        f"the first prompt is {FIRST_COLOUR}": has_colours(before, [FIRST_COLOUR]),
        f"the second prompt is {SECOND_COLOUR}": has_colours(after, [SECOND_COLOUR]),
    }
    failed = [what for what, holds in checks.items() if not holds]
    if failed:
        raise AssertionError(f"not so: {'; '.join(failed)}")
    waited_s = applied["received_s"] - switch.submitted_s
    return f"{len(chunks)} chunks, {len(video.frames)} frames; the prompt was applied after {waited_s:.1f} s"


async def survive_frozen_servers(stack: Stack) -> str:
    """Freeze each server without resuming it; video and everything that needs the server must continue."""
    took: list[str] = []
    async with httpx.AsyncClient(base_url=stack.url, headers=authorization(stack.key)) as api:
        viewer = await Viewer.create(api, FIRST_PROMPT, seed=2)
        async with viewer.watching():
            await viewer.more_chunks(2, CHUNK_LIMIT_S)
            for server, program in (
                ("nats", "nats-server"),
                ("redis", "redis-server"),
                ("postgres", "postgres"),
            ):
                began_s, started = time.monotonic(), await asyncio.to_thread(stack.started, server)
                await asyncio.to_thread(stack.freeze, server, program)
                while await asyncio.to_thread(stack.started, server) in ("", started):
                    if time.monotonic() > began_s + BACK_LIMIT_S:
                        raise TimeoutError(
                            f"{server} stands still and was not restarted in {BACK_LIMIT_S:.0f} s"
                        )
                    await asyncio.sleep(1.0)
                await viewer.more_chunks(2, BACK_LIMIT_S)
                await with_retry(lambda: viewer.submit(SECOND_PROMPT), BACK_LIMIT_S)
                took.append(f"{server} {time.monotonic() - began_s:.0f} s")
            await viewer.delete()
        if [chunk.index for chunk in viewer.chunks] != list(range(len(viewer.chunks))):
            raise AssertionError("chunks are not contiguous after servers stood still")
    return f"frozen and replaced, until video went on: {', '.join(took)}"


def test(engine: Engine, tag: str) -> None:
    """Test one stack from up to down. Shows its logs and takes it down before an error is raised."""
    with tempfile.TemporaryDirectory() as folder:
        _test(Stack(engine, tag, Path(folder)))


def _test(stack: Stack) -> None:
    stack.down()
    try:
        started_s = time.monotonic()
        stack.up()
        asyncio.run(wait_ready(stack.url, stack.key))
        say(f"the stack is up after {time.monotonic() - started_s:.0f} s at {stack.url}")
        stack.check_services()
        say("every service's health check passes, and none runs as root")
        asyncio.run(check_closed(stack.url))
        say("without a key nothing is told")
        say(asyncio.run(stream_a_session(stack.url, stack.key)))
        say(asyncio.run(survive_frozen_servers(stack)))
    except BaseException:
        print(stack.logs(), flush=True)
        raise
    finally:
        stack.down()
        say("taken down")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only-build", action="store_true", help="build the images and stop")
    parser.add_argument("--tag", default="test", help="the images' tag")
    arguments = parser.parse_args()
    # A cancelled run takes its containers down as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.chdir(ROOT)
    try:
        engine = Engine.find()
        build(engine, arguments.tag)
        if not arguments.only_build:
            if (remark := prepare_network()) is not None:
                say(remark)
            test(engine, arguments.tag)
            say("passed")
    except (EngineError, TimeoutError, AssertionError, httpx.HTTPError) as error:
        say(f"FAILED: {error}")
        return 1
    return 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
