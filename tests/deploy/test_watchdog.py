"""The watchdog of servers in containers, here around a real broker without a container."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import nats.errors
import psutil
import pytest
from nats.js.errors import ServerError

from tests.helpers.broker_clients import connected_client
from tests.helpers.waiting import eventually_blocking
from turboserve.cli.embedded.binaries import nats_server
from turboserve.experiments.chaos.small_disk import SmallDisk, why_not
from turboserve.free_ports import any_free
from turboserve.subjects import CHUNKS, OWN, SERVICES

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PATIENCE_S = 60.0


class Watched:
    """nats-server under the watchdog with compose's configuration, except for its folder and its port."""

    def __init__(self, folder: Path, work: Path, silent_limit: int = 30) -> None:
        """`silent_limit`: unanswered probes that end it; a busy machine does not reach the default."""
        self.folder, self.port, self.log = folder, any_free(), work / "log"
        text = (DEPLOY / "nats/nats.conf").read_text()
        for old, new in (('"/data"', f'"{folder}"'), ("port: 4222", f"port: {self.port}")):
            assert old in text
            text = text.replace(old, new)
        config = work / "nats.conf"
        config.write_text(text)
        probe = f"exec {sys.executable} -I -S {DEPLOY / 'nats/probe.py'}"
        users = [service.upper().replace("-", "_") for service in (*SERVICES, "health", "watchdog")]
        self._command = [
            *("sh", str(DEPLOY / "watchdog.sh"), str(folder), probe),
            *(str(nats_server()), "-c", str(config)),
        ]
        self._environment = {
            **os.environ,
            **{f"NATS_{user}_PASSWORD": "secret" for user in users},
            "NATS_PORT": str(self.port),
            "NATS_MAX_FILE_STORE": str(2**30),
            "WATCHDOG_EVERY_S": "1",
            "WATCHDOG_SILENT_LIMIT": str(silent_limit),
        }

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """Run the watchdog. Yields it once the broker has appended its probe."""
        with self.log.open("wb") as output:
            process = subprocess.Popen(
                self._command, env=self._environment, stdout=subprocess.DEVNULL, stderr=output
            )
        try:
            eventually_blocking(self._has_appended)
            yield process
        finally:
            for each in [*psutil.Process(process.pid).children(), process] if process.poll() is None else []:
                each.kill()
            process.wait()

    def _has_appended(self) -> bool:
        # The broker creates and removes folders while they are searched.
        with suppress(FileNotFoundError):
            return any(file.stat().st_size for file in self.folder.rglob("WATCHDOG/msgs/*.blk"))
        return False

    def said(self) -> str:
        return self.log.read_text()


def server_of(watchdog: subprocess.Popen[bytes]) -> psutil.Process:
    children = psutil.Process(watchdog.pid).children()
    return next(child for child in children if child.name() == "nats-server")


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "data", tmp_path)


def test_it_ends_when_the_broker_is_frozen_and_leaves_nothing_of_it(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "data", tmp_path, silent_limit=4)
    with watched.running() as watchdog:
        server = server_of(watchdog)
        server.suspend()
        assert watchdog.wait(PATIENCE_S) == 1
        server.wait(PATIENCE_S)
    assert "no answer 4 times in a row" in watched.said()


def test_it_passes_a_request_to_end_on_and_ends_with_the_broker(watched: Watched) -> None:
    with watched.running() as watchdog:
        server = server_of(watchdog)
        watchdog.send_signal(signal.SIGTERM)
        assert watchdog.wait(PATIENCE_S) in (0, 1, 128 + signal.SIGTERM)
        server.wait(PATIENCE_S)
    assert "is killed" not in watched.said()
    assert "Server Exiting" in watched.said()


def test_it_ends_when_the_broker_ends(watched: Watched) -> None:
    with watched.running() as watchdog:
        server_of(watchdog).kill()
        assert watchdog.wait(PATIENCE_S) == 128 + signal.SIGKILL


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
async def test_it_waits_while_the_disk_is_full_and_ends_when_there_is_room_and_nothing_is_stored(
    tmp_path: Path,
) -> None:
    with SmallDisk(tmp_path / "disk", 96 * 2**20) as disk:
        watched = Watched(disk.path / "data", tmp_path)
        with watched.running() as watchdog:
            client = await connected_client(
                f"nats://state-store:secret@127.0.0.1:{watched.port}", inbox_prefix=b"_INBOX_state_store"
            )
            jetstream = client.jetstream(timeout=PATIENCE_S)
            await jetstream.add_stream(name=CHUNKS, subjects=[OWN.every])
            disk.fill()
            with pytest.raises((nats.errors.TimeoutError, ServerError)):
                await jetstream.publish(OWN.of("s1"), bytes(2**18), timeout=1.0)
            await client.close()
            eventually_blocking(lambda: "its disk is full" in watched.said())
            # More failing answers than would end it if there were room.
            eventually_blocking(lambda: watched.said().count("unhealthy") > 5)
            assert watchdog.poll() is None
            disk.free()
            assert watchdog.wait(PATIENCE_S) == 1
    assert "it failed 3 times in a row" in watched.said()
