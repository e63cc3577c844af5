"""What other users of the machine can access, and what a compromised server could do."""

from __future__ import annotations

import asyncio
import os
import pwd
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import psutil
import pytest

from tests.helpers.broker_clients import PATIENCE_S, connected_client
from tests.helpers.earlier_cluster import make_as_before
from turboserve.cli.embedded import Layout, NatsServer, Ports, PostgresServer, RedisServer, binaries
from turboserve.cli.embedded.folder import UnsafeFolderError, is_own_group, secure
from turboserve.cli.embedded.postgres import ROLE, SUPERUSER
from turboserve.cli.embedded.running import running
from turboserve.cli.stack.background import BackgroundStack

DUMMIES = Path(__file__).parents[1] / "cli" / "stack"
SERVERS = ("nats", "redis", "postgres")
ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not ROOT, reason="only root may make files of other users")
NOBODY = pwd.getpwnam("nobody")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackgroundStack]:
    """Real servers and stand-ins for the services, on a folder with careless permissions."""
    data = tmp_path_factory.mktemp("stack") / "data"
    logs = data / "logs"
    logs.mkdir(parents=True)
    (data / "ports.json").write_text("{}")
    (logs / "gateway.log").write_text("of an earlier version\n")
    for path, mode in ((data, 0o755), (logs, 0o755), (logs / "gateway.log", 0o644)):
        path.chmod(mode)
    command = (sys.executable, str(DUMMIES / "up_with_dummies.py"))
    environment = {"PYTHONPATH": str(DUMMIES)}
    stack = BackgroundStack(data, "--workers", "1", environment=environment, command=command)
    before = os.umask(0)
    try:
        stack.start()
    finally:
        os.umask(before)
    yield stack
    stack.stop()


def test_nothing_in_the_data_folder_is_open_to_other_users(stack: BackgroundStack) -> None:
    assert stat.S_IMODE(stack.data.stat().st_mode) == 0o700
    assert "was open to other users (mode 0755); now 0700" in stack.output
    for path in everything_in(stack.data):
        try:
            mode = path.lstat().st_mode
            closed = stat.S_IMODE(mode) & 0o007 == 0 or not entered(path, stack.data)
        except FileNotFoundError:
            continue
        assert stat.S_ISLNK(mode) or closed, path
    for name in ("secrets.json", "stack.json", "ports.json", "up.lock", "nats/nats.conf", "redis/redis.conf"):
        assert stat.S_IMODE((stack.data / name).stat().st_mode) == 0o600, name
    for log in (stack.data / "logs").iterdir():
        assert stat.S_IMODE(log.stat().st_mode) == 0o640, log
    for name in SERVERS:
        assert stat.S_IMODE((stack.data / name).stat().st_mode) == 0o700
        assert stat.S_IMODE((stack.data / name / "server.pid").stat().st_mode) & 0o037 == 0
    sockets = [path for path in everything_in(stack.data) if path.is_socket()]
    assert [stat.S_IMODE(path.stat().st_mode) for path in sockets] == [0o700]


def everything_in(top: Path) -> Iterator[Path]:
    """Yield files and folders. Unlike `Path.rglob`, skips those that running servers remove meanwhile."""
    for folder, folders, files in os.walk(top):
        yield from (Path(folder, name) for name in (*folders, *files))


def entered(path: Path, top: Path) -> bool:
    """Return whether other users can enter every folder from `top` (excluded) down to `path`."""
    between = [parent for parent in path.parents if top in parent.parents]
    return all(parent.stat().st_mode & 0o001 for parent in between)


def test_no_server_has_any_privilege(stack: BackgroundStack) -> None:
    owner = NOBODY.pw_uid if ROOT else os.geteuid()
    for name in SERVERS:
        server = psutil.Process(stack.record.pid(name))
        for process in (server, *server.children(recursive=True)):
            try:
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            except OSError:
                # Postgres starts processes that soon end.
                assert process != server
                continue
            status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            assert {int(status[f"Cap{kind}"], 16) for kind in ("Prm", "Eff", "Amb")} == {0}, name
            assert status["NoNewPrivs"] == "1"
            assert {int(uid) for uid in status["Uid"].split()} == {owner}
            if ROOT:
                assert status["Groups"].strip() == ""


async def test_the_services_role_may_nothing_beyond_its_database(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    """Incident: as superuser each of these ran programs, read files or created further roles."""
    (tmp_path / "secret").write_text("root:x")
    connection = await asyncpg.connect(postgres_server.url())
    try:
        for attack in (
            f"copy (select 1) to program 'touch {tmp_path}/touched'",
            f"create table loot (line text); copy loot from '{tmp_path}/secret'",
            f"select pg_read_file('{tmp_path}/secret')",
            "select pg_read_file('postgresql.conf')",
            "select pg_ls_dir('.')",
            f"select lo_import('{tmp_path}/secret')",
            "create role intruder superuser login",
            f"alter role {ROLE} superuser",
            f"alter role {ROLE} createdb",
            f"set role {SUPERUSER}",
            "create database elsewhere",
            "alter system set archive_command = 'touch /tmp/x'",
            "create function f() returns int language c as 'libc.so.6', 'getpid'",
            "create extension adminpack",
            "select * from pg_authid",
            "select pg_reload_conf()",
        ):
            with pytest.raises((asyncpg.InsufficientPrivilegeError, asyncpg.FeatureNotSupportedError)):
                await connection.execute(attack)
        assert not (tmp_path / "touched").exists()
        row = await connection.fetchrow(
            "select rolsuper, rolcreaterole, rolcreatedb, rolreplication, rolbypassrls "
            "from pg_roles where rolname = $1",
            ROLE,
        )
        assert row is not None
        assert not any(row.values())
        # It may do its own work.
        await connection.execute("create table own_work (x int); drop table own_work")
    finally:
        await connection.close()


async def test_the_superuser_does_not_log_in_over_the_network(postgres_server: PostgresServer) -> None:
    for user, password in (
        (SUPERUSER, postgres_server.superuser_password),
        (ROLE, "wrong"),
        ("postgres", "x"),
    ):
        with pytest.raises((asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidPasswordError)):
            await asyncpg.connect(
                host="127.0.0.1", port=postgres_server.port, user=user, password=password, database="postgres"
            )
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await asyncpg.connect(postgres_server.url("postgres"))
    async with postgres_server.superuser() as connection:
        assert await connection.fetchval("select current_setting('is_superuser')") == "on"


def test_a_cluster_of_an_earlier_version_is_taken_over_with_its_data(tmp_path: Path) -> None:
    """In that version the services were superuser, and owned everything as such."""
    layout = Layout(tmp_path / "data")
    layout.create()
    server = PostgresServer(
        layout.server("postgres"), Ports(layout.ports).get("p"), "admin", "services", ("fsync=off",)
    )

    async def after() -> None:
        connection = await asyncpg.connect(server.url())
        try:
            await connection.execute(
                "insert into sessions (x) values (8); alter table sessions add column y int"
            )
            assert [row["x"] for row in await connection.fetch("select x from seen order by x")] == [7, 8]
            await connection.execute("alter type kind add value 'b'; drop sequence alone; drop view seen")
        finally:
            await connection.close()

    with running([server], tmp_path / "log"):
        asyncio.run(make_as_before(server))
    with running([server], tmp_path / "log"):
        asyncio.run(after())


@needs_root
def test_root_runs_servers_from_folders_closed_to_everybody(tmp_path: Path) -> None:
    """Data and programs below a closed home, as root's is, and files that an earlier version left to root."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    layout = Layout(closed / "data")
    layout.create()
    ports = Ports(layout.ports)
    server = NatsServer(layout.server("nats"), ports.get("nats"), {"admin": "x"})
    with running([server], tmp_path / "log"):
        asyncio.run(_store(server))
    for path in (server.directory, *server.directory.rglob("*")):
        os.lchown(path, 0, 0)
    with running([server], tmp_path / "log"):
        assert asyncio.run(_stored(server)) == 1
        assert server.directory.stat().st_uid == NOBODY.pw_uid


@needs_root
def test_programs_in_a_closed_folder_are_copied_to_where_the_servers_user_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = (NOBODY.pw_uid, NOBODY.pw_gid)
    everybodys = Path("/bin/true").resolve()
    assert binaries.reachable(everybodys, user) == everybodys
    tree = tmp_path / "closed" / "install"
    (tree / "bin").mkdir(parents=True)
    (tree / "share").mkdir()
    (tree / "share" / "file").write_text("x")
    program = tree / "bin" / "server"
    program.write_bytes(everybodys.read_bytes())
    for path, mode in ((program, 0o700), (tree / "share" / "file", 0o600), (tmp_path / "closed", 0o700)):
        path.chmod(mode)
    assert not binaries.may_run(program, *user)
    tmp_path.chmod(0o755)
    shared = Path(f"/var/tmp/turboserve-test-{os.getpid()}")
    monkeypatch.setattr(binaries, "SHARED_COPIES", shared)
    try:
        copy = binaries.reachable(program, user)
        assert copy == binaries.reachable(program, user)
        subprocess.run([copy], user=user[0], group=user[1], extra_groups=[], check=True)
        read = subprocess.run(
            ["cat", copy.parents[1] / "share" / "file"], user=user[0], capture_output=True, check=True
        )
        assert read.stdout == b"x"
    finally:
        subprocess.run(["rm", "-r", shared], check=True)


def test_a_new_folder_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert secure(tmp_path / "new") == []
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_an_open_folder_that_is_no_stacks_is_refused_and_left_alone(tmp_path: Path) -> None:
    """`--data ~` or `--data /srv` must not close other users' files."""
    folder = tmp_path / "home"
    folder.mkdir()
    folder.chmod(0o755)
    (folder / "letter").write_text("x")
    with pytest.raises(UnsafeFolderError, match="holds files of other programs"):
        secure(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "secrets.json").write_text("{}")
    folder.chmod(0o777)
    with pytest.raises(UnsafeFolderError, match="nothing in it can be trusted"):
        secure(folder)


def test_a_folder_in_one_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(UnsafeFolderError, match=f"other users may write to {shared} "):
        secure(shared / "data")
    assert not (shared / "data").exists()
    # As in /tmp: there no user can replace another's files.
    shared.chmod(0o1777)
    assert secure(shared / "data") == []


def test_a_link_is_followed_to_what_is_checked_in_the_same_way(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (tmp_path / "link").symlink_to(shared)
    assert secure(tmp_path / "link" / "data") == []
    shared.chmod(0o777)
    with pytest.raises(UnsafeFolderError, match=f"other users may write to {shared} "):
        secure(tmp_path / "link" / "data")


@needs_root
def test_folders_and_links_of_others_are_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    os.chown(foreign, NOBODY.pw_uid, -1)
    with pytest.raises(UnsafeFolderError, match="belongs to nobody, not to root"):
        secure(foreign)
    mine = tmp_path / "mine"
    mine.mkdir()
    (tmp_path / "link").symlink_to(mine)
    os.lchown(tmp_path / "link", NOBODY.pw_uid, -1)
    with pytest.raises(UnsafeFolderError, match="is a link of nobody"):
        secure(tmp_path / "link")
    # Root may work in a user's folder; a remark names its owner.
    (remark,) = secure(foreign / "data")
    assert f"{foreign} is a folder of nobody" in remark
    assert is_own_group(0)
    assert not is_own_group(NOBODY.pw_gid)


@needs_root
def test_a_link_that_a_server_laid_is_not_followed(tmp_path: Path) -> None:
    """The folder is the server's, and root's writes there must not go elsewhere."""
    layout = Layout(tmp_path / "data")
    layout.create()
    target = tmp_path / "target"
    target.write_text("precious")
    server = RedisServer(layout.server("redis"), 1, "x")
    asyncio.run(server.prepare())
    for name in ("redis.conf.new", "server.pid.new"):
        (server.directory / name).symlink_to(target)
    asyncio.run(server.prepare())
    guard = [*server.command()[:-2], "/bin/true"]
    subprocess.run(guard, check=True, timeout=60)
    assert target.read_text() == "precious"
    assert target.stat().st_uid == 0


async def _store(server: NatsServer) -> None:
    client = await connected_client(server.url())
    await client.jetstream(timeout=PATIENCE_S).add_stream(name="KEPT", subjects=["kept"])
    await client.jetstream(timeout=PATIENCE_S).publish("kept", b"x")
    await client.close()


async def _stored(server: NatsServer) -> int:
    client = await connected_client(server.url())
    messages: int = (await client.jetstream(timeout=PATIENCE_S).stream_info("KEPT")).state.messages
    await client.close()
    return messages
