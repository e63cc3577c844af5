"""A tiny worker as a process of its own, forked from one that has loaded torch.

Loading torch costs two seconds of a core, and tests start dozens of workers.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from tests.worker import tiny_worker

LOADED = ("turboserve.worker.service.app", "turboserve.worker.settings")


class ForkedWorker:
    """As `subprocess.Popen` of `tiny_worker.py`. Its environment is only `environment`."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(LOADED))
        self._process = context.Process(target=_run, args=(dict(environment), log), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status; negative for the number of the signal that ended it, None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self) -> None:
        self._process.join()


def _run(environment: Mapping[str, str], log: Path) -> None:
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.clear()
    os.environ.update(environment)
    tiny_worker.main()
