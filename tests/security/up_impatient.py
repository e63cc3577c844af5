"""`turboserve up` with a shorter wait for a server's answers. It prints each result of a health check."""

from __future__ import annotations

from typing import Any

import typer

from turboserve.cli.stack import plan
from turboserve.cli.supervisor import core
from turboserve.cli.up import up


class LoggedSupervision(core.Supervision):
    def asked(self, name: str, answer: core.HealthAnswer, *args: Any, **fields: Any) -> list[core.Command]:
        print(f"health check of {name}: {answer.name}", flush=True)
        commands = super().asked(name, answer, *args, **fields)
        if any(isinstance(command, core.Hangs) for command in commands):
            print(f"health checks of {name}: too many without an answer", flush=True)
        return commands


if __name__ == "__main__":
    plan.SERVER_SILENT_LIMIT = 3
    plan.SERVER_ASK_EVERY_S = 0.5
    core.Supervision = LoggedSupervision  # type: ignore[misc]
    typer.run(up)
