"""What the deciding cores were given and what they decided, and whether they decide it again."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from turboserve.autoscaler.control.composition_controller import CompositionController
from turboserve.autoscaler.control.controller import Controller
from turboserve.autoscaler.control.policy import default_table
from turboserve.autoscaler.control_loop import ControlLoop
from turboserve.autoscaler.core import Pool
from turboserve.autoscaler.messages import Launch
from turboserve.autoscaler.settings import AutoscalerSettings
from turboserve.autoscaler.shell import Shell
from turboserve.scheduler.app import core_of
from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.settings import SchedulerSettings

SCHEDULER, POOL, CONTROLLER = "scheduler", "pool", "controller"


class Core(Protocol):
    """A core: events in, decisions out."""

    def handle(self, event: Any, now: float) -> Any:
        """Process one event at monotonic time `now`, seconds."""
        ...


@dataclass(frozen=True)
class Handled:
    """One event, when it was handled, and what the core returned."""

    now: float
    event: Any
    returned: Any


@dataclass
class Recording:
    """All that one core handled."""

    core: str
    """`SCHEDULER`, `POOL` or `CONTROLLER`."""
    settings: SchedulerSettings | AutoscalerSettings
    size: int = 0
    """The controller's first target."""
    handled: list[Handled] = field(default_factory=list)

    def again(self) -> list[Any]:
        """Feed the events to a new core with the same settings. Returns what it returns."""
        core = self._core()
        return [core.handle(each.event, each.now) for each in self.handled]

    def differences(self) -> int:
        """Count the events to which a new core answers otherwise."""
        return sum(found != each.returned for found, each in zip(self.again(), self.handled, strict=True))

    def _core(self) -> Core:
        settings = self.settings
        if isinstance(settings, SchedulerSettings):
            return core_of(settings)
        if self.core == CONTROLLER:
            table = default_table()
            return Controller(settings.control_policy(table), table, self.size)
        launched = (command.worker for command in self.commands() if isinstance(command, Launch))
        return Pool(settings.pool_name, _names(launched), settings.policy())

    def commands(self) -> Iterator[Any]:
        """Yield all commands of the core, in order."""
        for each in self.handled:
            yield from each.returned if isinstance(each.returned, list) else ()


def _names(launched: Iterable[str]) -> Callable[[], str]:
    """Return the ids that the recorded pool gave to its workers, in order. They are random, not decided."""
    return iter(launched).__next__


class Recorder:
    """Records cores in memory, or in a file. A term, or a process, has cores of its own."""

    def __init__(self, file: Path | None = None) -> None:
        self.recordings: list[Recording] = []
        self._file = None if file is None else file.open("wb")

    def scheduler(self, core: Scheduler, settings: SchedulerSettings) -> Scheduler:
        """Record a scheduler's core."""
        self._record(core, Recording(SCHEDULER, _public(settings)))
        return core

    def autoscaler(self, shell: Shell, settings: AutoscalerSettings) -> None:
        """Record an autoscaler's pool and its controller. Call it before any task of the shell runs."""
        self._record(shell.pool, Recording(POOL, _public(settings)))

        def made(control: ControlLoop) -> None:
            controller = control.controller
            # The controller of a pool of several offers also asks the pool, which is not recorded.
            if not isinstance(controller, CompositionController):
                self._record(controller, Recording(CONTROLLER, _public(settings), controller.target))

        shell.on_control = made

    def _record(self, core: Any, recording: Recording) -> None:
        handle = core.handle
        self.recordings.append(recording)
        self._write(recording)

        def recorded(event: Any, now: float) -> Any:
            returned = handle(event, now)
            handled = Handled(now, event, returned)
            if self._file is None:
                recording.handled.append(handled)
            self._write((recording.core, handled))
            return returned

        core.handle = recorded

    def _write(self, item: object) -> None:
        if self._file is not None:
            pickle.dump(item, self._file)
            self._file.flush()


def _public(settings: Any) -> Any:
    """Return settings without passwords."""
    hidden: dict[str, Any] = {"nats_password": None, "worker_nats_password": None, "worker_identities": {}}
    known = type(settings).model_fields
    return settings.model_copy(update={name: value for name, value in hidden.items() if name in known})


def read(folder: Path) -> list[Recording]:
    """Read the files of a folder's recorders. An entry that its process did not complete is left out."""
    found: list[Recording] = []
    newest: dict[str, Recording] = {}
    for path in sorted(folder.glob("*.pickle")):
        with path.open("rb") as file:
            while True:
                try:
                    item = pickle.load(file)
                except (EOFError, pickle.UnpicklingError):
                    break
                if isinstance(item, Recording):
                    newest[item.core] = item
                    found.append(item)
                else:
                    core, handled = item
                    newest[core].handled.append(handled)
    return found


def decisions(recordings: Iterable[Recording]) -> dict[str, Any]:
    """Return, by core, how many there were, their events, and those that a new core answers otherwise."""
    found: dict[str, Any] = {}
    for each in recordings:
        known = found.setdefault(each.core, {"cores": 0, "events": 0, "different": 0})
        known["cores"] += 1
        known["events"] += len(each.handled)
        known["different"] += each.differences()
    return dict(sorted(found.items()))


def handled(recordings: Iterable[Recording], core: str) -> list[Handled]:
    """Return all events of one core's recordings, in order of time."""
    events = [event for each in recordings if each.core == core for event in each.handled]
    return sorted(events, key=lambda event: event.now)
