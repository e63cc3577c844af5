"""Entry point of the state store: `python -m turboserve.state_store`."""

from __future__ import annotations

import turboserve.program_start  # noqa: F401
from turboserve.service import Runtime, load, run
from turboserve.state_store.app import start
from turboserve.state_store.settings import Settings


def main() -> None:
    settings = load("state-store", Settings)

    async def begin(runtime: Runtime) -> None:
        await start(runtime, settings)

    run("state-store", settings, begin)


if __name__ == "__main__":
    main()
