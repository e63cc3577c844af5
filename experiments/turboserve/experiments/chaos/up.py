"""`turboserve up` with words before its services' commands: `python -m turboserve.experiments.chaos.up …`."""

from __future__ import annotations

import json
import os

import typer

PREFIXES = "TURBOSERVE_CHAOS_PREFIXES"
"""Name of the variable: a JSON object, service → words before its command."""


def main() -> None:
    from turboserve.cli.stack import options
    from turboserve.cli.up import up

    options.PREFIXES.update(json.loads(os.environ.pop(PREFIXES, "{}")))
    typer.run(up)


if __name__ == "__main__":
    main()
