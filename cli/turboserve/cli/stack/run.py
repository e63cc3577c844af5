"""Runs a stack in the foreground until a signal stops it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from turboserve import environment, lifeline
from turboserve.cli.embedded import Layout
from turboserve.cli.embedded.ports import HOST
from turboserve.cli.settings import SOURCES, names
from turboserve.cli.stack import record
from turboserve.cli.stack.first_key import FirstKeyTask
from turboserve.cli.stack.options import Options, Workers
from turboserve.cli.stack.plan import Plan
from turboserve.cli.supervisor.core import Policy
from turboserve.cli.supervisor.logs import LogHub
from turboserve.cli.supervisor.shell import Supervisor
from turboserve.gateway import exposure
from turboserve.gateway.auth.access import Keys
from turboserve.gateway.settings import Settings as GatewaySettings

UMASK = 0o027
INSTALLED = Path(sys.prefix, ".setup-done")
"""Seconds and size of the installation, which `make setup` writes."""
OWN_VARIABLES = ("TURBOSERVE_DATA", lifeline.FD_VARIABLE, lifeline.PARENT_VARIABLE)
"""Variables that the command itself reads."""


class AlreadyRunningError(Exception):
    """Another `turboserve up` uses this data directory."""

    def __init__(self, layout: Layout, pid: str) -> None:
        where = ""
        with suppress(record.StackNotRunningError):
            where = f" at {record.read(layout.data).url}"
        who = f" (process {pid})" if pid else ""
        super().__init__(
            f"a stack is already running{where}{who} on {layout.data}: "
            "stop it with Ctrl-C first, or use another directory with --data"
        )


def run(options: Options, policy: Policy | None = None) -> int:
    """Run a stack until a signal, and return the exit status.

    Raises AlreadyRunningError, PortTakenError, BinaryMissingError or OSError. Raises ValidationError for
    settings that the gateway would refuse, before any process starts.
    """
    began_s = time.monotonic()
    # Every process of the stack inherits the mask: only the owner and the group can read its files.
    os.umask(UMASK)
    gateway = (
        GatewaySettings(gateway_host=HOST, api_keys_store=True)
        if options.auth
        else GatewaySettings(gateway_host=HOST)
    )
    first_key = FirstKeyTask()
    layout = Layout(options.data)
    remarks = layout.create()
    with _only_one(layout):
        plan = Plan(options, layout)
        # Choose the ports now, so that a taken port is reported before any process starts.
        urls, processes = plan.gateway_urls, plan.processes()
        keys = Keys(gateway.key_set(), gateway.operators, stored=gateway.api_keys_store)
        exposed = exposure.sentences(gateway, keys, plan.port)
        hub = LogHub(layout.logs, options.log_format)

        def announce(ready: int) -> None:
            _announce(hub, urls, ready, options.workers, exposed, began_s)
            if gateway.api_keys_store:
                first_key.start(plan.broker_settings("gateway"), urls, hub, options.log_format)

        try:
            supervisor = Supervisor(
                processes,
                hub,
                workers_rank=plan.workers_rank,
                policy=policy,
                on_change=lambda: _write_record(hub, plan, supervisor),
                workers_wanted=options.workers.low,
                on_ready=lambda ready: announce(ready),
            )
            hub.log("starting", data=str(layout.data), workers=str(options.workers))
            for remark in remarks:
                hub.log("data folder", "warning", remark=remark)
            for name in unread_variables(os.environ):
                hub.log("no service reads this variable: is it misspelled?", "warning", variable=name)
            status = asyncio.run(supervisor.run())
            hub.log("stopped")
            if status:
                hub.plain(f"\nThe stack did not start; the logs are in {layout.logs}\n")
            return status
        finally:
            layout.stack.unlink(missing_ok=True)
            hub.close()


def unread_variables(given: Iterable[str]) -> list[str]:
    """Return the `TURBOSERVE_` variables among `given` that no process of a stack reads."""
    known = frozenset(OWN_VARIABLES).union(*(names(reader) for reader in SOURCES))
    return environment.unknown(given, known)


def _write_record(hub: LogHub, plan: Plan, supervisor: Supervisor) -> None:
    """Write the record. A failure is only logged: the supervisor works on, and the next change retries."""
    try:
        record.write(plan, supervisor.describe(), supervisor.ready)
    except OSError as error:
        hub.log("record not written", "warning", file=str(plan.layout.stack), error=str(error))


def _announce(
    hub: LogHub, urls: Sequence[str], ready: int, workers: Workers, exposed: Sequence[str], began_s: float
) -> None:
    if ready < workers.low:
        hub.log("workers are missing", "warning", ready=ready, wanted=workers.low)
    after_s = time.monotonic() - began_s
    hub.log("stack is up", url=f"{urls[0]}/", workers=ready, after_s=round(after_s, 1))
    line = f"  TurboServe is up:  {'  '.join(f'{url}/' for url in urls)}  "
    bar = "─" * len(line)
    hub.plain(f"\n╭{bar}╮\n│{line}│\n╰{bar}╯\n  Ctrl-C stops the stack.")
    hub.plain(
        "".join(f"  {sentence}\n" for sentence in (*exposed, f"{_installed()}Started in {after_s:.0f} s."))
    )


def _installed() -> str:
    """Return a sentence about the installation; empty if `make` has not made it."""
    with suppress(OSError):
        if size := INSTALLED.read_text().strip():
            return f"Installed in {size}. "
    return ""


@contextmanager
def _only_one(layout: Layout) -> Iterator[None]:
    """Hold the lock of the data directory. The kernel releases the lock when this process ends in any way."""
    descriptor = os.open(layout.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not _locked(descriptor):
            raise AlreadyRunningError(layout, os.read(descriptor, 32).decode().strip())
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Take the lock, and return whether it was free. A reader of the record holds it for an instant."""
    for pause_s in (0.01, 0.05, 0.0):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(pause_s)
    return False
