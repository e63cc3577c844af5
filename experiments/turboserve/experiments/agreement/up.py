"""`turboserve up` with recorded schedulers and autoscalers: `python -m …`, with the folder in a variable."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from turboserve.experiments.agreement.recorded import FILE, SERVICE

FOLDER = "TURBOSERVE_RECORDED_FOLDER"


def main() -> None:
    from turboserve.cli.stack import options
    from turboserve.cli.up import up

    folder = Path(os.environ.pop(FOLDER))
    for name in ("scheduler", "autoscaler"):
        options.MODULES[name] = "turboserve.experiments.agreement.recorded"
        options.PREFIXES[name] = ["env", f"{SERVICE}={name}", f"{FILE}={folder / name}"]
    typer.run(up)


if __name__ == "__main__":
    main()
