"""`turboserve up` with a shorter wait for a server's answers."""

from __future__ import annotations

import typer

from turboserve.cli.stack import plan
from turboserve.cli.up import up

if __name__ == "__main__":
    plan.SERVER_SILENT_LIMIT = 3
    plan.SERVER_ASK_EVERY_S = 0.5
    typer.run(up)
