"""Executes the core's commands: processes, probes, timers and signals."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil

from turboserve.cli.supervisor import core, kernel
from turboserve.cli.supervisor.health_checks import HealthChecks
from turboserve.cli.supervisor.logs import LogHub
from turboserve.cli.supervisor.process import Process
from turboserve.cli.supervisor.spec import NotReadyError, ProcessSpec, ServerUnresponsiveError
from turboserve.cli.supervisor.workers import count_ready
from turboserve.lifeline import FD_VARIABLE, PARENT_VARIABLE
from turboserve.service import EXIT_SETTINGS
from turboserve.tasks import stop

WORKERS = "workers"
ANNOUNCEMENT = "announcement"
WORKERS_LIMIT_S = 120.0
PROBE_EVERY_S = 0.05
LOOK_AROUND_EVERY_S = 1.0


class Supervisor:
    """Keeps `specs` running until a signal. `run` returns 0, or 1 if a process has never become ready.

    `on_change` is called after every start, readiness and end. `on_ready` is called once, when everything is
    ready, with the number of workers that serve. That number is below `workers_wanted` if the workers need
    more than WORKERS_LIMIT_S.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        hub: LogHub,
        *,
        workers_rank: int,
        workers_wanted: int = 0,
        policy: core.Policy | None = None,
        on_change: Callable[[], None] = lambda: None,
        on_ready: Callable[[int], None] = lambda ready_workers: None,
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._hub = hub
        self._on_change, self._on_ready = on_change, on_ready
        self._workers_wanted = workers_wanted
        workers = core.Member(WORKERS, rank=workers_rank, grace_s=8.0, launched=False)
        self._core = core.Supervision([*(spec.member for spec in specs), workers], policy)
        self._processes: dict[str, Process] = {}
        self._ended: deque[Process] = deque(maxlen=64)
        """Ended processes whose children may still write to their pipes."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._reaper = kernel.Reaper()
        self._status = 0
        self._ready_announced = False
        self._lifeline = (-1, -1)

    @property
    def ready(self) -> bool:
        """Whether everything has been ready once."""
        return self._ready_announced

    def describe(self) -> dict[str, dict[str, Any]]:
        """Describe every process: kind, state, restarts, alarm, port, pid, and the guard's pid of servers."""
        return {name: self._describe(spec) for name, spec in self._specs.items()}

    async def run(self) -> int:
        self._loop = asyncio.get_running_loop()
        self._finished = asyncio.Event()
        kernel.adopt_orphans()
        self._lifeline = os.pipe()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._loop.add_signal_handler(number, self.stop)
        self._loop.add_signal_handler(signal.SIGCHLD, self._look_for_exits)
        questions = HealthChecks(self._specs.values(), self._core, self._hub, self._processes.get, self._obey)
        watching = [asyncio.create_task(self._look_around()), asyncio.create_task(questions.run())]
        self._obey(self._core.start(self._loop.time()))
        await self._finished.wait()
        await stop(*watching)
        for process in self._ended:
            process.close()
        kernel.reap_all()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            self._loop.remove_signal_handler(number)
        for descriptor in self._lifeline:
            os.close(descriptor)
        return self._status

    def stop(self) -> None:
        """Stop everything in order. A second call stops everything at once."""
        self._hub.log("stopping at once" if self._core.stopping else "stopping (Ctrl-C again to hurry)")
        self._obey(self._core.stop(self._loop.time()))

    def _obey(self, commands: Sequence[core.Command]) -> None:
        for command in commands:
            match command:
                case core.Launch(name):
                    self._start_task(name, self._launch(self._specs[name]))
                case core.Terminate(name) | core.Kill(name) if name == WORKERS:
                    self._end_workers(kill=isinstance(command, core.Kill))
                case core.Terminate(name):
                    self._end(name, signal.SIGTERM)
                case core.Kill(name):
                    self._hub.log("killing", "warning", process=name)
                    self._end(name, signal.SIGKILL)
                case core.Crashed(name, delay_s):
                    self._hub.log("restarting", "warning", process=name, in_s=round(delay_s, 1))
                case core.Hangs(name, unanswered):
                    self._hub.log("does not answer", "error", process=name, unanswered=unanswered)
                case core.Failing(name, failures, reason):
                    self._hub.log("fails", "error", process=name, failures=failures, reason=reason)
                case core.Alarm(name, reason):
                    self._hub.log("alarm", "error", process=name, reason=reason)
                case core.AlarmOver(name):
                    self._hub.log("alarm ended", process=name)
                case core.GaveUp(name, attempts, refused):
                    self._status = 1
                    reason = "its settings are invalid: see above" if refused else "it never became ready"
                    self._hub.log("giving up", "error", process=name, failed_starts=attempts, reason=reason)
                case core.AllReady():
                    self._start_task(ANNOUNCEMENT, self._announce())
                case core.Done():
                    self._finished.set()
        self._on_change()
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due_s = self._core.next_deadline()
        self._timer = None if due_s is None else self._loop.call_at(due_s, self._tick)

    def _tick(self) -> None:
        self._obey(self._core.tick(self._loop.time()))

    def _start_task(self, name: str, work: Any) -> None:
        self._cancel(name)
        self._tasks[name] = asyncio.create_task(work)

    def _cancel(self, name: str) -> None:
        task = self._tasks.pop(name, None)
        if task is not None:
            task.cancel()

    async def _launch(self, spec: ProcessSpec) -> None:
        try:
            if spec.prepare is not None:
                await spec.prepare()
            self._processes[spec.name] = Process(
                spec.command,
                self._environment(spec.environment),
                [self._lifeline[0]],
                lambda text: self._hub.line(spec.name, text),
            )
        except Exception as error:
            self._hub.log("could not start", "error", process=spec.name, error=str(error))
            self._obey(self._core.exited(spec.name, self._loop.time()))
            return
        self._on_change()
        began_s = self._loop.time()
        while not await self._serves(spec):
            await asyncio.sleep(PROBE_EVERY_S)
        self._hub.log("ready", process=spec.name, after_s=round(self._loop.time() - began_s, 2))
        self._obey(self._core.ready(spec.name, self._loop.time()))

    async def _serves(self, spec: ProcessSpec) -> bool:
        try:
            await spec.probe()
        except ServerUnresponsiveError:
            self._obey(self._core.asked(spec.name, core.HealthAnswer.SILENT, self._loop.time()))
            return False
        except NotReadyError:
            self._obey(self._core.asked(spec.name, core.HealthAnswer.FAILS, self._loop.time()))
            return False
        except Exception as error:
            self._hub.log("probe failed", "error", process=spec.name, error=repr(error))
            await asyncio.sleep(1.0)
            return False
        return True

    def _environment(self, given: Mapping[str, str]) -> dict[str, str]:
        lifeline = {FD_VARIABLE: str(self._lifeline[0]), PARENT_VARIABLE: str(os.getpid())}
        return {**given, **lifeline}

    def _end(self, name: str, number: signal.Signals) -> None:
        process = self._processes.get(name)
        if process is not None and number is signal.SIGKILL and self._specs[name].kind == "server":
            # A server stopped by SIGSTOP does not notice the end of its guard. The guard may be stopped, too.
            kernel.kill_tree(process.pid)
        elif process is not None:
            process.send(number)
        elif name in self._tasks:
            # The process is still being prepared, so there is nothing to signal.
            self._cancel(name)
            self._loop.call_soon(lambda: self._obey(self._core.exited(name, self._loop.time())))

    def _look_for_exits(self) -> None:
        for name, process in list(self._processes.items()):
            status = process.poll()
            if status is None:
                continue
            self._ended.append(self._processes.pop(name))
            self._cancel(name)
            if not self._core.stopping:
                self._hub.log("ended", "error", process=name, pid=process.pid, status=status_text(status))
            self._obey(self._core.exited(name, self._loop.time(), refused=status == EXIT_SETTINGS))

    async def _look_around(self) -> None:
        """Reap adopted orphans and look for ended processes, periodically."""
        while True:
            await asyncio.sleep(LOOK_AROUND_EVERY_S)
            self._reaper.reap(self._known())
            self._look_for_exits()

    async def _announce(self) -> None:
        deadline_s = self._loop.time() + WORKERS_LIMIT_S
        while (ready := await count_ready(self._workers())) < self._workers_wanted:
            if self._core.stopping:
                return
            if self._loop.time() > deadline_s:
                break
            await asyncio.sleep(0.2)
        self._ready_announced = True
        self._on_change()
        self._on_ready(ready)

    def _known(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def _workers(self) -> list[psutil.Process]:
        guards = [
            self._processes[spec.name].pid
            for spec in self._specs.values()
            if spec.kind == "server" and spec.name in self._processes
        ]
        return kernel.strangers(self._known(), guards)

    def _end_workers(self, kill: bool) -> None:
        for worker in self._workers():
            with suppress(psutil.NoSuchProcess):
                worker.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        if WORKERS not in self._tasks:
            self._start_task(WORKERS, self._wait_for_workers())

    async def _wait_for_workers(self) -> None:
        while self._workers():
            await asyncio.sleep(0.05)
        self._obey(self._core.exited(WORKERS, self._loop.time()))

    def _describe(self, spec: ProcessSpec) -> dict[str, Any]:
        process = self._processes.get(spec.name)
        pid = process.pid if process is not None else None
        described: dict[str, Any] = {
            "kind": spec.kind,
            "state": self._core.state(spec.name).value,
            "restarts": self._core.restarts(spec.name),
            "alarm": self._core.alarm(spec.name),
            "port": spec.port,
            "pid": pid,
        }
        if spec.pid_file is not None:
            described["guard_pid"] = pid
            with suppress(OSError, ValueError):
                described["pid"] = int(spec.pid_file.read_text())
        return described


def status_text(status: int) -> str:
    """Return the exit status as text, or the name of the signal that ended the process.

    A guard reports a signal that ended its server as 128 + the signal's number.
    """
    number = -status if status < 0 else status - 128
    with suppress(ValueError):
        if number > 0:
            return signal.Signals(number).name
    return str(status)
