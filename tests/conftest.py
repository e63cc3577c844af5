"""Real servers for every test: NATS with JetStream, Redis and Postgres, started once from their wheels.

Each server starts only when a test needs it. A module gets them empty: no streams, no keys, a new database.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import uuid
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import hypothesis
import nats
import pytest
import redis
from _pytest.terminal import TerminalReporter
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from nats.js.errors import NotFoundError
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.helpers.browser import browser_address as browser_address
from tests.helpers.browser import page as page
from tests.helpers.pool_harness import Pool
from tests.helpers.web_server import WebServer, serving
from turboserve import subjects
from turboserve.cli.embedded import Layout, NatsServer, Ports, PostgresServer, RedisServer
from turboserve.cli.embedded.running import running
from turboserve.cli.embedded.server import NotReadyError
from turboserve.cli.stack.background import BackgroundStack

# Rewritten, so that their assertions report as much as those in test files.
pytest.register_assert_rewrite(
    "tests.scheduler.scheduler_rows",
    "tests.scheduler.scheduler_world",
    "tests.scheduler.migrations_bench",
    "tests.autoscaler.pool_world",
    "tests.worker.table_bench",
    "tests.worker.table_migrations",
)

# The same commit gets the same verdict. `make test PYTEST_ARGS="--hypothesis-profile explore"` draws new
# examples.
# There are no time limits: a slow machine is no fault of the code.
UNTIMED: dict[str, Any] = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("repeatable", derandomize=True, **UNTIMED)
hypothesis.settings.register_profile("explore", derandomize=False, **UNTIMED)
hypothesis.settings.load_profile("repeatable")


def pytest_sessionstart() -> None:
    """Unless the profile is `explore`, keep Hypothesis from using constants of imported modules.

    It mixes them into its examples. A property test would then pass or fail depending on which modules
    earlier tests have imported.
    """
    if hypothesis.settings().derandomize:
        nothing = Constants()
        providers._get_local_constants = lambda: nothing


# Settings and proxies of the developer's environment are no part of a test. Services inherit this process's
# environment.
for _name in [*os.environ]:
    if _name.startswith("TURBOSERVE_") or _name.lower().endswith("_proxy"):
        del os.environ[_name]

# Some container images forbid Python to keep compiled modules. Each process that a test starts would then
# compile every module again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Torch and similar libraries would otherwise use every core for matrices that fit in a cache.
os.environ.setdefault("OMP_NUM_THREADS", "1")

PATIENCE_S = 60.0
NO_DURABILITY = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")


ONE_STACK = (
    "tests/stack/test_stack_end_to_end.py",
    "tests/stack/test_stack_migrations.py",
    "tests/browser/test_player_page.py",
    "tests/browser/test_webrtc_page.py",
    "tests/browser/test_javascript_client.py",
    "tests/sdk/test_sdk_stack.py",
    "tests/stack/test_stack_recordings.py",
    "tests/stack/test_stack_faults.py",
)
"""Files whose tests share the fixture `stack`, in the order in which they run. No other file may use it.

To start and stop a stack takes more than 10 s of CPU time. The last file kills the stack's processes.
"""
GROUPS = {
    **dict.fromkeys(ONE_STACK, "stacks"),
    "tests/stack": "stacks",
    "tests/browser": "stacks",
    "tests/security/test_security_disk_full.py": "stacks",
    "tests/security/test_security_environment.py": "stacks",
    "tests/gateway": "pool",
    "tests/security/access": "pool",
    "tests/worker/test_service_migrations.py": "workers",
    "tests/worker/test_service_worker.py": "workers",
    "tests/worker/test_service_deaths.py": "workers",
    "tests/security/fuzz": "attacked",
    "tests/cli/test_stack.py": "supervisor",
    "tests/simulation/test_simulate_plants.py": "plants",
    "tests/scheduler/test_scheduler_deaths.py": "deaths",
    "tests/autoscaler/test_autoscaler_service.py": "autoscaler",
    "tests/worker/transfer/test_transfer_contract.py": "transfer",
    "tests/scheduler/test_scheduler_simulation.py": "scheduler simulation",
    "tests/scheduler/test_scheduler_standby.py": "standby",
    "tests/security/test_security_exhaustion.py": "exhaustion",
    "tests/simulation/test_simulate.py": "simulate",
    "tests/scheduler/test_scheduler_service.py": "scheduler",
    "tests/autoscaler/test_provider_contract.py": "providers",
    "tests/state_store/test_store_crash.py": "crashes",
    "tests/state_store/test_store_outages.py": "outages",
    "tests/bench/test_engine_bench_gpu.py": "profiles",
}
"""Folders and files whose tests run one after the other on one of xdist's processes, before all others.

Some share processes that are slow to start (`pool`, `attacked`). Whole stacks at the same time would slow
each other down. The longest group is first, and each takes half a minute or more; the files after them are
short, so all processes end at about the same time.
"""
PROCESSES = pytest.StashKey[ExitStack]()
BEFORE = pytest.StashKey[dict[str, object]]()
OF_LIBRARIES = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}
"""Variables that libraries set for themselves. Torch sets one when it first loads its compiler."""


def group_of(nodeid: str) -> str:
    """Return the group of a test in `GROUPS`; for all other tests, their file."""
    file = file_of(nodeid)
    return GROUPS.get(file) or GROUPS.get(file.rpartition("/")[0], file)


def shared_by(nodeid: str) -> tuple[str, bool]:
    """Return what is the same for tests that share processes: the group, and whether `stack` is shared."""
    return group_of(nodeid), file_of(nodeid) in ONE_STACK


def file_of(nodeid: str) -> str:
    return nodeid.split("::", 1)[0]


class GroupScheduling(LoadFileScheduling):
    """As `--dist loadfile`, but keeps each group together."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GroupScheduling | None:
    if config.getoption("dist") != "loadfile":
        return None
    # Keep the order of `pytest_collection_modifyitems` instead of ordering by the number of tests alone.
    config.option.loadscopereorder = False
    return GroupScheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests: groups in the order of `GROUPS`, then files, those with the most tests first.

    In a group, the files of `ONE_STACK` come first.
    """
    of_stack = {file: place for place, file in enumerate(ONE_STACK)}
    first = {group: place for place, group in enumerate(dict.fromkeys(GROUPS.values()))}
    sizes = Counter(group_of(item.nodeid) for item in items)
    found = {group: place for place, group in enumerate(sizes)}

    def place(item: pytest.Item) -> tuple[int, int, int, int]:
        group = group_of(item.nodeid)
        within = of_stack.get(file_of(item.nodeid), len(of_stack))
        return first.get(group, len(first)), -sizes[group], found[group], within

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, which takes a seventh of the CPU time and finds little."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def process_state() -> dict[str, object]:
    """Return the state of this process that a test could leave changed for later tests."""
    umask = os.umask(0)
    os.umask(umask)
    variables = {name: value for name, value in os.environ.items() if name not in OF_LIBRARIES}
    # pytest-timeout uses SIGALRM.
    numbers = signal.valid_signals() - {signal.SIGALRM}
    handlers = {f"signal {number}": signal.getsignal(number) for number in numbers}
    return {**variables, **handlers, "working directory": str(Path.cwd()), "umask": umask}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.config.stash.setdefault(BEFORE, process_state())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """After the last of the tests that share processes, end these.

    After the last test of a file, fail if this process is left changed. Otherwise a later test could pass or
    fail depending on the tests before it.
    """
    try:
        yield
    finally:
        stash = item.config.stash
        following = "" if nextitem is None else nextitem.nodeid
        if shared_by(following) != shared_by(item.nodeid) and PROCESSES in stash:
            stash[PROCESSES].close()
    if file_of(following) != file_of(item.nodeid):
        before, after = stash[BEFORE], process_state()
        del stash[BEFORE]
        changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
        assert not changed, f"this file's tests leave changed: {', '.join(changed)}"


@pytest.fixture(scope="session")
def until_group_ends(pytestconfig: pytest.Config) -> Iterator[ExitStack]:
    """An exit stack that closes after the last of the tests that share it: see `shared_by`.

    An idle pool costs a tenth of a core.
    """
    with ExitStack() as stack:
        pytestconfig.stash[PROCESSES] = stack
        yield stack


@pytest.fixture(scope="session")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    layout = Layout(tmp_path_factory.mktemp("servers"))
    layout.create()
    return layout


@pytest.fixture(scope="session")
def ports(layout: Layout) -> Ports:
    return Ports(layout.ports)


@pytest.fixture(scope="session")
def nats_server(layout: Layout, ports: Ports) -> Iterator[NatsServer]:
    """The broker; `nats_server.url(service)` connects as that service, with its permissions."""
    server = NatsServer(
        layout.server("nats"),
        ports.get("nats"),
        {user: layout.secret(f"nats.{user}") for user in (*subjects.SERVICES, "admin")},
    )
    with running([server], layout.logs / "nats.log"):
        yield server


@pytest.fixture(scope="session")
def redis_server(layout: Layout, ports: Ports) -> Iterator[RedisServer]:
    server = RedisServer(layout.server("redis"), ports.get("redis"), layout.secret("redis"))
    with running([server], layout.logs / "redis.log"):
        yield server


@pytest.fixture(scope="session")
def postgres_server(layout: Layout, ports: Ports) -> Iterator[PostgresServer]:
    server = PostgresServer(
        layout.server("postgres"),
        ports.get("postgres"),
        layout.secret("postgres"),
        layout.secret("postgres.services"),
        NO_DURABILITY,
    )
    with running([server], layout.logs / "postgres.log"):
        yield server


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory, until_group_ends: ExitStack) -> Pool:
    """Servers, state store, scheduler and a drawing worker, for gateways with settings of their own."""
    return until_group_ends.enter_context(Pool(tmp_path_factory.mktemp("pool")).running())


@pytest.fixture(scope="session")
def gateway_url(pool: Pool) -> str:
    """A gateway of `pool` without API keys, as `make up` starts it."""
    return pool.gateway()


@pytest.fixture(scope="module")
def nats_url(nats_server: NatsServer) -> str:
    """URL of the broker without streams, for a user who may do everything."""
    asyncio.run(_without_streams(nats_server.url()))
    return nats_server.url()


@pytest.fixture(scope="module")
def redis_url(redis_server: RedisServer) -> str:
    """URL of Redis without keys."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url


@pytest.fixture(scope="module")
def postgres_url(postgres_server: PostgresServer) -> str:
    """URL of an empty database of the module's own."""
    database = f"test_{uuid.uuid4().hex[:12]}"
    asyncio.run(_with_database(postgres_server, database))
    return postgres_server.url(database)


@pytest.fixture(scope="session")
def other_site(tmp_path_factory: pytest.TempPathFactory, until_group_ends: ExitStack) -> WebServer:
    """A web server whose pages may use the gateway of `stack`."""
    return until_group_ends.enter_context(serving(tmp_path_factory.mktemp("site")))


@pytest.fixture(scope="session")
def stack(
    tmp_path_factory: pytest.TempPathFactory, until_group_ends: ExitStack, other_site: WebServer
) -> BackgroundStack:
    """The whole stack with two workers: `stack.url`, `stack.record`, `stack.kill("gateway")`.

    The files of `ONE_STACK` share it. Each worker has room for four sessions. Migrations have enough time,
    even on a slow machine.
    """
    data = tmp_path_factory.mktemp("stack") / "data"
    environment = {
        "TURBOSERVE_WORKER_MAX_SESSIONS": "4",
        "TURBOSERVE_MIGRATION_TIMEOUT_S": "120",
        "TURBOSERVE_CORS_ORIGINS": other_site.url,
    }
    stack = BackgroundStack(data, "--workers", "2", environment=environment)
    return until_group_ends.enter_context(stack)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A data directory for a stack of the test's own."""
    return tmp_path / "data"


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Report whether a browser was present: without one its test is skipped, which is easily overlooked."""
    browser = {
        outcome: [
            report
            for report in terminalreporter.stats.get(outcome, [])
            if isinstance(report, pytest.TestReport) and "browser" in report.keywords
        ]
        for outcome in ("passed", "failed", "error", "skipped")
    }
    ran = [report for outcome in ("passed", "failed", "error") for report in browser[outcome]]
    if ran:
        terminalreporter.write_line("the browser test ran")
    elif browser["skipped"]:
        terminalreporter.write_line("the browser test did not run: no chromium found", yellow=True)


async def _with_database(server: PostgresServer, database: str) -> None:
    """Create the database. A connection that took too long on a busy machine is repeated."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with suppress(NotReadyError):
                return await server.ensure_database(database)
            await asyncio.sleep(0.1)


async def _without_streams(url: str) -> None:
    client = await nats.connect(url, connect_timeout=int(PATIENCE_S))
    try:
        jetstream = client.jetstream(timeout=PATIENCE_S)
        for stream in await jetstream.streams_info():
            with suppress(NotFoundError):
                await jetstream.delete_stream(stream.config.name or "")
    finally:
        await client.close()
