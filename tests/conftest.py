"""Real servers for every test: NATS with JetStream, Redis and Postgres, started once from their wheels.

Each server starts only when a test needs it. A module gets them empty: no streams, no keys, a database whose
tables are empty.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import ssl
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any

import asyncpg
import certifi
import hypothesis
import nats
import pytest
import redis
import structlog
from _pytest.terminal import TerminalReporter
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from nats.js.errors import NotFoundError

from tests.helpers import forked_process, prepared_cluster
from tests.helpers.browser import browser_address as browser_address
from tests.helpers.browser import page as page
from tests.helpers.forked_groups import GroupHooks, GroupRunner
from tests.helpers.otlp_receiver import OtlpReceiver
from tests.helpers.patient_stack import PATIENT
from tests.helpers.pool_harness import Pool
from tests.helpers.prepared_cluster import NO_DURABILITY, migrated
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
    "tests.autoscaler.offer_fleet",
    "tests.worker.table_bench",
    "tests.worker.table_migrations",
    "tests.stack.received_traces",
)

# The same commit gets the same verdict. `make test PYTEST_ARGS="--hypothesis-profile explore"` draws new
# examples, and more of them, as `make soak` does.
# There are no time limits: a slow machine is no fault of the code.
UNTIMED: dict[str, Any] = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("repeatable", derandomize=True, **UNTIMED)
hypothesis.settings.register_profile("explore", derandomize=False, max_examples=200, **UNTIMED)
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

# Rich draws the traceback of a logged exception with every frame's variables, which takes half a second.
structlog.get_config()["processors"][-1].exception_formatter = structlog.dev.plain_traceback

create_context = ssl.create_default_context
AUTHORITIES = {certifi.where(), os.environ.get("SSL_CERT_FILE")}
"""Files with the certificates of public authorities."""


@cache
def trusting(authorities: str) -> ssl.SSLContext:
    """Return the context of all clients that trust these authorities."""
    return create_context(cafile=authorities)


def shared_context(
    purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH, *, cafile: Any = None, **more: Any
) -> ssl.SSLContext:
    """As `ssl.create_default_context`, which takes 20 ms to read what each of thousands of clients needs."""
    if cafile in AUTHORITIES and cafile is not None and purpose is ssl.Purpose.SERVER_AUTH and not more:
        return trusting(cafile)
    return create_context(purpose, cafile=cafile, **more)


ssl.create_default_context = shared_context

# Imports are most of what the start of a stack costs.
BackgroundStack.launch = staticmethod(forked_process.start_stack)

PATIENCE_S = 60.0
OBJECTS_PER_COLLECTION = 20_000

ONE_STACK = (
    "tests/stack/test_stack_end_to_end.py",
    "tests/stack/test_stack_migrations.py",
    "tests/browser/test_player_page.py",
    "tests/browser/test_webrtc_page.py",
    "tests/browser/test_key_press_benchmark.py",
    "tests/browser/test_javascript_client.py",
    "tests/sdk/test_sdk_stack.py",
    "tests/stack/test_stack_documents.py",
    "tests/stack/test_stack_recordings.py",
    "tests/stack/test_stack_shared_traces.py",
)
"""Files whose tests share the fixture `stack`, in the order in which they run. No other file may use it.

To start and stop a stack takes several seconds of CPU time.
"""
GROUPS = {
    "tests/gateway": "pool",
    "tests/security/access": "pool",
    "tests/stack/test_stack_faults.py": "stacks",
    "tests/stack": "stacks of their own",
    "tests/security/test_security_disk_full.py": "stacks of their own",
    "tests/security/test_security_environment.py": "stacks of their own",
    **dict.fromkeys(ONE_STACK, "stacks"),
    "tests/security/fuzz": "attacked",
    "tests/worker/test_service_migrations.py": "workers",
    "tests/worker/test_service_worker.py": "workers",
    "tests/worker/test_service_deaths.py": "workers",
    "tests/simulation/test_simulate_plants.py": "plants",
    "tests/worker/transfer/test_transfer_contract.py": "transfer",
    "tests/cli/test_stack.py": "supervisor",
    "tests/scheduler/test_scheduler_deaths.py": "deaths",
    "tests/autoscaler/test_autoscaler_service.py": "autoscaler",
    "tests/autoscaler/test_provider_contract.py": "providers",
    "tests/scheduler/test_scheduler_simulation.py": "scheduler simulation",
    "tests/simulation/test_simulate.py": "simulate",
    "tests/security/test_security_exhaustion.py": "exhaustion",
    "tests/scheduler/test_scheduler_standby.py": "standby",
    "tests/scheduler/test_scheduler_service.py": "scheduler",
    "tests/state_store/test_store_crash.py": "crashes",
    "tests/state_store/test_store_outages.py": "outages",
    "tests/bench/test_engine_bench_gpu.py": "profiles",
    "tests/worker/test_model_wan_vae.py": "libraries",
    "tests/worker/test_model_public.py": "libraries",
    "tests/worker/test_model_umt5.py": "libraries",
}
"""Folders and files whose tests run one after the other on one of the processes, before all others.

Some share processes that are slow to start (`pool`, `attacked`), or imports that take seconds (`libraries`).
Two processes run whole stacks at the same time: these tests mostly wait, and one process would still run them
when all others have ended. The longest group is first, and each but the last takes half a minute or more.
`LONG_FILES` come next; the files after them are short, so all processes end at about the same time.
"""
LONG_FILES = (
    "tests/worker/test_sequence_parallel_service.py",
    "tests/experiments/test_slack_bench.py",
    "tests/autoscaler/test_autoscaler_shared.py",
    "tests/scheduler/test_scheduler_placement_properties.py",
    "tests/worker/test_service_residency.py",
    "tests/simulation/test_simulate_lost_log.py",
    "tests/state_store/test_store_session_migrations.py",
    "tests/simulation/test_simulate_tenants.py",
    "tests/deploy/test_watchdog.py",
    "tests/experiments/test_toyworld_quality.py",
    "tests/state_store/test_transactions_contract.py",
    "tests/worker/test_sequence_parallel_processes.py",
    "tests/state_store/test_store_log_space.py",
    "tests/experiments/test_scale_bench.py",
    "tests/cli/test_embedded_servers.py",
    "tests/worker/test_engine_budget.py",
    "tests/security/test_security_transfer_listeners.py",
    "tests/simulation/test_simulate_slack_plants.py",
    "tests/state_store/test_store_logs.py",
    "tests/scheduler/test_scheduler_rescue_properties.py",
    "tests/worker/test_remote_decoding_connections.py",
    "tests/simulation/test_simulate_migrations.py",
    "tests/shared/test_bus_slow_connection.py",
    "tests/experiments/test_paper.py",
    "tests/state_store/test_store_full_disk.py",
    "tests/experiments/test_toyworld_judge.py",
    "tests/shared/test_broker_streams.py",
    "tests/experiments/test_fidelity_profile.py",
    "tests/deploy/test_reverse_proxy.py",
    "tests/simulation/test_runtime_worker.py",
    "tests/state_store/test_store_workers.py",
    "tests/autoscaler/test_composition.py",
    "tests/autoscaler/test_provider_kubernetes.py",
    "tests/experiments/test_published_traces.py",
    "tests/simulation/test_simulate_loans.py",
    "tests/worker/test_engine_sequence_parallel.py",
    "tests/experiments/test_batching_policies.py",
    "tests/simulation/test_simulate_drift.py",
)
"""Files of few tests that take 12 s or more, alternately such that wait and such that compute, the longest
first."""
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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=0, help="run groups of tests in this many processes")


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(GroupHooks)


def pytest_configure(config: pytest.Config) -> None:
    if processes := config.getoption("processes"):
        config.pluginmanager.register(GroupRunner(processes, group_of))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Share between the processes what takes long to start."""
    if session.config.option.collectonly:
        return
    prepared_cluster.set_folder(session.config._tmp_path_factory.getbasetemp() / "prepared_cluster")  # type: ignore[attr-defined]
    if session.config.getoption("processes"):
        forked_process.share_imports()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests: groups in the order of `GROUPS`, `LONG_FILES`, then those with the most tests first.

    In a group, the files of `ONE_STACK` come first.
    """
    of_stack = {file: place for place, file in enumerate(ONE_STACK)}
    first = {group: place for place, group in enumerate(dict.fromkeys([*GROUPS.values(), *LONG_FILES]))}
    sizes = Counter(group_of(item.nodeid) for item in items)
    found = {group: place for place, group in enumerate(sizes)}

    def place(item: pytest.Item) -> tuple[int, int, int, int]:
        group = group_of(item.nodeid)
        within = of_stack.get(file_of(item.nodeid), len(of_stack))
        return first.get(group, len(first)), -sizes[group], found[group], within

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, which takes a seventh of the CPU time and finds little.

    Later it ignores what was imported and collected, hundreds of thousands of objects, and runs more rarely.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(OBJECTS_PER_COLLECTION, *gc.get_threshold()[1:])
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
    if BEFORE not in item.config.stash:
        item.config.stash[BEFORE] = process_state()


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
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    # A folder of its own: only tests that need Postgres wait for the cluster.
    layout = Layout(tmp_path_factory.mktemp("postgres"))
    prepared_cluster.copy_cluster_to(layout.data)
    layout.create()
    server = PostgresServer(
        layout.server("postgres"),
        Ports(layout.ports).get("postgres"),
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


@pytest.fixture(scope="session")
def migrated_database(postgres_server: PostgresServer) -> str:
    """Name of a database with the state store's tables. Its copies skip every migration."""
    name = "test_migrated"
    asyncio.run(_with_database(postgres_server, name))
    asyncio.run(migrated(postgres_server.url(name)))
    return name


@pytest.fixture(scope="session")
def new_database(postgres_server: PostgresServer, migrated_database: str) -> Callable[[], str]:
    """Makes a database with the state store's empty tables and returns its URL."""

    def make() -> str:
        database = f"test_{uuid.uuid4().hex[:12]}"
        asyncio.run(_with_database(postgres_server, database, migrated_database))
        return postgres_server.url(database)

    return make


@pytest.fixture(scope="module")
def postgres_url(new_database: Callable[[], str]) -> str:
    """URL of a database of the module's own, with the state store's empty tables."""
    return new_database()


@pytest.fixture(scope="module")
def empty_postgres_url(postgres_server: PostgresServer) -> str:
    """URL of a database of the module's own, without any table."""
    database = f"test_{uuid.uuid4().hex[:12]}"
    asyncio.run(_with_database(postgres_server, database))
    return postgres_server.url(database)


@pytest.fixture(scope="session")
def other_site(tmp_path_factory: pytest.TempPathFactory, until_group_ends: ExitStack) -> WebServer:
    """A web server whose pages may use the gateway of `stack`."""
    return until_group_ends.enter_context(serving(tmp_path_factory.mktemp("site")))


@pytest.fixture(scope="session")
def stack_receiver(until_group_ends: ExitStack) -> OtlpReceiver:
    """The collector to which `stack` exports its traces."""
    return until_group_ends.enter_context(OtlpReceiver().running())


@pytest.fixture(scope="session")
def stack(
    tmp_path_factory: pytest.TempPathFactory,
    until_group_ends: ExitStack,
    other_site: WebServer,
    stack_receiver: OtlpReceiver,
) -> BackgroundStack:
    """The whole stack with two workers: `stack.url`, `stack.record`, `stack.kill("gateway")`.

    The files of `ONE_STACK` share it. Each worker has room for four sessions. Migrations have enough time,
    even on a slow machine.
    """
    data = tmp_path_factory.mktemp("stack") / "data"
    environment = {
        **PATIENT,
        "TURBOSERVE_WORKER_MAX_SESSIONS": "4",
        "TURBOSERVE_CORS_ORIGINS": other_site.url,
        "TURBOSERVE_OTLP_ENDPOINT": stack_receiver.endpoint,
    }
    stack = BackgroundStack(data, "--workers", "2", "--webhooks", environment=environment)
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


async def _with_database(server: PostgresServer, database: str, template: str | None = None) -> None:
    """Create the database, as a copy of `template`. What took too long on a busy machine is repeated."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with suppress(NotReadyError):
                if template is not None:
                    async with server.superuser() as connection:
                        with suppress(asyncpg.DuplicateDatabaseError):
                            await connection.execute(f'create database "{database}" template "{template}"')
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
