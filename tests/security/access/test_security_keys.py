"""The file of hashed keys: its contents, its permissions, and changes while sessions play."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets
from pydantic import ValidationError

from tests.helpers import forked_process
from tests.helpers.pool_harness import Pool
from tests.helpers.waiting import eventually
from tests.security.access.conftest import Connect, OpenSocket
from turboserve.cli.keys import app as keys_command
from turboserve.gateway.auth import key_file
from turboserve.gateway.auth.access import Keys
from turboserve.gateway.auth.key_file import KeyFileError
from turboserve.gateway.settings import Settings

KEY = re.compile(r"ts_[0-9a-f]{8}_[0-9a-f]{48}")
PATIENCE_S = 120.0
ENV_KEY = "a-key-from-the-environment"


def turboserve_keys(*words: str) -> tuple[int, str, str]:
    """Run `turboserve keys WORDS`. Returns status, stdout and stderr."""
    from typer.testing import CliRunner

    done = CliRunner().invoke(keys_command, list(words))
    return done.exit_code, done.stdout, done.stderr


def test_only_the_hash_is_kept_and_the_key_is_shown_once(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    status, shown, told = turboserve_keys("add", "acme", "--operator", "--file", str(path))
    assert status == 0
    key = shown.strip()
    assert KEY.fullmatch(key)
    assert key not in told
    content = path.read_text()
    secret = key.rpartition("_")[2]
    assert secret not in content
    assert path.stat().st_mode & 0o777 == 0o600
    found = Keys(key_file.read(path)).identify(key)
    assert found is not None
    assert (found.tenant, found.operator) == ("acme", True)
    # The same key under another salt has another hash.
    assert key_file.read(path).keys[0].hash != key_file.KeyFile().hash_of(key)
    status, shown, _ = turboserve_keys("list", "--file", str(path))
    assert status == 0
    assert "acme" in shown
    assert secret not in shown
    status, shown, _ = turboserve_keys("revoke", key.split("_")[1], "--file", str(path))
    assert status == 0
    assert Keys(key_file.read(path)).identify(key) is None


@pytest.mark.parametrize("words", [["add", "a tenant"], ["add", ""], ["revoke", "00000000"], ["list"]])
def test_what_cannot_be_done_is_said_and_changes_nothing(tmp_path: Path, words: list[str]) -> None:
    path = tmp_path / "keys.json"
    if words[0] == "revoke":
        key_file.add(path, "acme")
    before = path.read_bytes() if path.exists() else None
    status, shown, told = turboserve_keys(*words, "--file", str(path))
    assert (status, shown) == (1, "")
    assert told.startswith("turboserve: ")
    assert (path.read_bytes() if path.exists() else None) == before


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o604, 0o601])
def test_a_file_that_others_may_use_is_refused(tmp_path: Path, mode: int, monkeypatch: Any) -> None:
    path = tmp_path / "keys.json"
    key_file.add(path, "acme")
    path.chmod(mode)
    with pytest.raises(KeyFileError, match="chmod 600"):
        key_file.read(path)
    # Nor is it extended: a user who could write it may have added a key.
    with pytest.raises(KeyFileError):
        key_file.add(path, "boss")
    monkeypatch.setenv("TURBOSERVE_API_KEYS_FILE", str(path))
    with pytest.raises(ValidationError, match="api_keys_file"):
        Settings()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file to another user")
def test_a_file_of_another_user_is_refused_and_keeps_its_owner_when_root_changes_it(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key_file.add(path, "acme")
    os.chown(path, 12_345, 12_345)
    # As root both are read; written files keep their owner.
    with pytest.raises(KeyFileError, match="belongs to user 12345"):
        key_file.read(path)
    os.chown(path, 0, 12_345)
    key_file.add(path, "boss")
    assert (path.stat().st_uid, path.stat().st_gid) == (0, 12_345)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}garbage",
        '{"version": 2, "salt": "00000000000000000000000000000000", "keys": []}',
        '{"version": 1, "salt": "00", "keys": []}',
        '{"version": 1, "salt": "00000000000000000000000000000000", "keys": [{"tenant": "acme"}]}',
        '{"version": 1, "salt": "00000000000000000000000000000000", "keys": []}',
    ],
)
def test_a_file_without_usable_keys_is_refused(tmp_path: Path, content: str, monkeypatch: Any) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content)
    path.chmod(0o600)
    monkeypatch.setenv("TURBOSERVE_API_KEYS_FILE", str(path))
    with pytest.raises(ValidationError, match=r"API_KEYS_FILE|api_keys_file"):
        Settings()


def test_a_file_and_a_list_at_once_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "keys.json"
    key_file.add(path, "acme")
    monkeypatch.setenv("TURBOSERVE_API_KEYS_FILE", str(path))
    monkeypatch.setenv("TURBOSERVE_API_KEYS", f"{ENV_KEY}=acme")
    with pytest.raises(ValidationError, match="both set"):
        Settings()
    monkeypatch.delenv("TURBOSERVE_API_KEYS")
    monkeypatch.setenv("TURBOSERVE_API_KEYS_STORE", "1")
    with pytest.raises(ValidationError, match="both set"):
        Settings()


def test_concurrent_additions_lose_none_and_readers_never_see_a_part(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key_file.add(path, "first")

    def add(number: int) -> str:
        return key_file.add(path, f"tenant-{number}")[1]

    def read(_: int) -> int:
        return len(key_file.read(path).keys)

    with ThreadPoolExecutor(8) as pool:
        reading = pool.map(read, range(40))
        made = list(pool.map(add, range(40)))
        assert min(reading) >= 1
    keys = Keys(key_file.read(path))
    assert [keys.identify(key) is not None for key in made] == [True] * 40
    assert [entry.name for entry in tmp_path.iterdir()] == ["keys.json"]


def test_the_setting_keeps_no_key_in_memory_nor_in_the_environment(tmp_path: Path) -> None:
    """In a process of its own: its environment is what later child processes of the gateway inherit."""
    program = """
import gc, os
from turboserve.gateway import __main__ as gateway
def run(name, settings, start):
    print("TURBOSERVE_API_KEYS" in os.environ, len(settings.api_keys.keys), repr(settings))
gateway.service.run = run
gateway.main()
"""
    file = tmp_path / "program.py"
    file.write_text(program)
    done = forked_process.run([str(file)], {**os.environ, "TURBOSERVE_API_KEYS": f"{ENV_KEY}=acme"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("False 1 ")
    assert ENV_KEY not in done.stdout + done.stderr


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="module")
def first(file: Path) -> str:
    return key_file.add(file, "acme")[1]


@pytest.fixture(scope="module")
def filed_url(pool: Pool, file: Path, first: str) -> Iterator[str]:
    pool.unforked.add("filed")
    yield pool.gateway("filed", TURBOSERVE_API_KEYS_FILE=str(file), DRAWN_KEY=first)
    pool.stop("filed")


@pytest.fixture
async def status(filed_url: str, client: Any) -> Callable[..., Awaitable[int]]:
    """`await status(key)`: the status of the answer to a request with the key."""
    api: httpx.AsyncClient = client(filed_url)

    async def ask(key: str) -> int:
        answer = await api.get("/v1/sessions", headers={"Authorization": f"Bearer {key}"})
        return answer.status_code

    return ask


async def test_a_key_counts_from_when_it_is_made_until_it_is_revoked(
    filed_url: str,
    file: Path,
    first: str,
    status: Callable[..., Awaitable[int]],
    client: Connect,
    socket: OpenSocket,
) -> None:
    record, key = key_file.add(file, "boss", operator=True)

    async def known() -> bool:
        return await status(key) == 200

    async def unknown() -> bool:
        return await status(key) in (401, 429)

    await eventually(known)
    api = client(filed_url, key)
    session = (await api.post("/v1/sessions", json={"prompt": "a red circle"})).json()
    async with (
        socket(filed_url, session["id"], {"Authorization": f"Bearer {key}"}) as opened,
        api.stream("GET", session["links"]["events"]) as events,
        api.stream("GET", session["links"]["video"]) as video,
    ):
        assert json.loads(await opened.recv())["type"] == "hello"
        assert (events.status_code, video.status_code) == (200, 200)
        key_file.revoke(file, record.id)
        await eventually(unknown)
        # Everything that the key had opened ends, without a restart.
        async with asyncio.timeout(PATIENCE_S):
            with suppress(websockets.ConnectionClosed):
                while True:
                    await opened.send('{"type": "ping"}')
                    await opened.recv()
            async for _ in events.aiter_bytes():
                pass
            async for _ in video.aiter_bytes():
                pass
        assert opened.close_code == 4401
    assert await status(first) == 200
    # Requests over the socket after the end have changed nothing.
    again, second = key_file.add(file, "boss")

    async def back() -> bool:
        return await status(second) == 200

    await eventually(back)
    read = await client(filed_url, second).get(session["links"]["self"])
    assert read.json()["phase"] != "terminated"
    await client(filed_url, second).delete(session["links"]["self"])
    key_file.revoke(file, again.id)


async def test_an_invalid_file_leaves_the_keys_unchanged_and_an_empty_one_refuses_all_clients(
    pool: Pool, file: Path, first: str, status: Callable[..., Awaitable[int]]
) -> None:
    content = file.read_bytes()

    def complaints() -> int:
        return str(pool.log("filed")).count("api keys unchanged")

    async def spoil(change: Callable[[], object]) -> None:
        before = complaints()
        change()

        async def complained() -> bool:
            return complaints() > before

        await eventually(complained)
        assert await status(first) == 200

    await spoil(lambda: file.write_bytes(content[:-20]))
    file.write_bytes(content)
    await spoil(lambda: file.chmod(0o644))
    file.chmod(0o600)
    await spoil(lambda: file.unlink())
    only = key_file.add(file, "other")[0]
    key_file.revoke(file, only.id)

    async def nobody() -> bool:
        return await status(first) in (401, 429)

    await eventually(nobody)
    file.write_bytes(content)

    async def as_before() -> bool:
        return await status(first) == 200

    await eventually(as_before)


async def test_no_secret_of_the_file_is_in_the_process_or_its_log(
    pool: Pool, filed_url: str, first: str, status: Callable[..., Awaitable[int]]
) -> None:
    assert await status(first) == 200
    secret = first.rpartition("_")[2]
    assert secret not in pool.log("filed")
    assert b"turboserve.gateway" in Path(f"/proc/{pool.pid('filed')}/cmdline").read_bytes()
    for pid in (path.name for path in Path("/proc").iterdir() if path.name.isdigit()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"turboserve" in command:
                assert secret.encode() not in command + Path(f"/proc/{pid}/environ").read_bytes()
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
