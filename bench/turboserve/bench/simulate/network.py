"""The broker's plain half: hints that may be lost, requests whose outcome may be unknown, partitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from turboserve.bench.simulate.faults import Faults
from turboserve.bench.simulate.kernel import Action, Awaited, Kernel, Program, Task
from turboserve.bus.client import NoServerError
from turboserve.contracts.errors import DeadlineError, TurboServeError

DEADLINE_S = 2.0
"""How long a caller waits for an answer; appends to a log likewise."""

Handler = Callable[[Any], Task[Any]]


class Network:
    """Who reaches whom, and with what luck."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.faults = Faults()
        self.up = True
        """The broker."""
        self.cut: dict[str, float] = {}
        """Programs without a connection to the broker, and until when."""
        self.on_publish: Callable[[Program, Any, Any], None] = lambda _program, _topic, _message: None
        """Where a hint goes that an executor publishes: program, topic, message."""
        self._losses: Counter[str] = Counter()
        """Program → how often it was cut off from the broker."""
        self._restarts = 0
        self._servers: dict[str, tuple[Program, Callable[[str], Handler]]] = {}

    def reaches(self, program: Program) -> bool:
        return self.up and self.kernel.now >= self.cut.get(program.name, 0.0)

    def cut_off(self, program: Program, seconds: float) -> None:
        self.kernel.note("cut", program.name, f"{seconds:.3f}")
        self._losses[program.name] += 1
        self.cut[program.name] = max(self.cut.get(program.name, 0.0), self.kernel.now + seconds)

    def stop(self) -> None:
        """The broker goes down; `up` says when it is back."""
        self.kernel.note("broker down")
        self.up = False
        self._restarts += 1

    def connection(self, program: Program) -> int | None:
        """As `Bus.connection`."""
        return self._restarts + self._losses[program.name] if self.reaches(program) else None

    def delay(self) -> float:
        return self.kernel.random.expovariate(1.0 / self.faults.delay_s)

    # Hints

    def hint(self, source: Program, target: Program, action: Action) -> None:
        """Publish and forget: lost, doubled, overtaken, or lost because the target is away."""
        if not self.reaches(source) or self.kernel.chance(self.faults.lost_hint):
            return

        def arrive() -> None:
            if target.up and self.reaches(target):
                target.after(0.0, action)

        for _ in range(1 + self.kernel.chance(self.faults.doubled_hint)):
            self.kernel.at(self.delay(), arrive)

    # Requests

    def serve(self, service: str, program: Program, handler_of: Callable[[str], Handler]) -> None:
        """`program` answers requests to `service`; `handler_of` a name gives the task that does."""
        self._servers[service] = (program, handler_of)

    def call(
        self, source: Program, service: str, name: str, request: Any, deadline_s: float = DEADLINE_S
    ) -> Awaited[Any]:
        """Ask. Fails with the server's typed error, `NoServerError`, or `DeadlineError`: outcome unknown."""
        outcome: Awaited[Any] = Awaited()
        kernel, faults = self.kernel, self.faults
        late = DeadlineError(f"no answer to {name} within {deadline_s} s", retry_after_s=0.5)
        # A connection that is down holds back what is written to it: it may arrive once it is up again.
        reached = self.reaches(source) or kernel.chance(faults.late_request)
        if not reached or kernel.chance(faults.lost_request):
            kernel.at(deadline_s, lambda: outcome.settle(error=late))
            return outcome
        if kernel.chance(faults.late_request) or not self.reaches(source):
            kernel.at(deadline_s, lambda: outcome.settle(error=late))
            transit_s = deadline_s * kernel.random.uniform(0.5, 2.5)
        else:
            transit_s = self.delay()
        sent_at = kernel.now
        lost = kernel.chance(faults.lost_answer)

        def answer(server: Program, value: Any, error: Exception | None) -> None:
            if error is not None and not isinstance(error, TurboServeError):
                server.on_error(server, error)
                error = TurboServeError(f"{service} failed at {name}")
            left_s = sent_at + deadline_s - kernel.now
            back_s = self.delay()
            if lost or back_s > left_s or not self.reaches(source):
                kernel.at(max(left_s, 0.0), lambda: outcome.settle(error=late))
                return
            if isinstance(error, TurboServeError):
                error.answered = True
            kernel.at(back_s, lambda: outcome.settle(value, error))

        def arrive() -> None:
            found = self._servers.get(service)
            if found is None or not (found[0].up and self.reaches(found[0])):
                error = NoServerError(f"{service} does not answer {name}", retry_after_s=0.5)
                kernel.at(self.delay(), lambda: outcome.settle(error=error))
                return
            kernel.at(max(sent_at + deadline_s - kernel.now, 0.0), lambda: outcome.settle(error=late))
            server, handler_of = found
            server.spawn(handler_of(name)(request)).then(lambda value, error: answer(server, value, error))

        kernel.at(transit_s, arrive)
        return outcome
