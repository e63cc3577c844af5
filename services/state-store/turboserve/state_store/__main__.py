"""Entry point of the state store: `python -m turboserve.state_store`."""

from __future__ import annotations

import turboserve.program_start
from turboserve.service import Runtime, load, run
from turboserve.state_store.app import start
from turboserve.state_store.settings import Settings


def main() -> None:
    settings = load("state-store", Settings)

    async def begin(runtime: Runtime) -> None:
        await start(runtime, settings)

    # Its connections keep hundreds of prepared statements. A full collection took 40 to 70 ms, every 10 s.
    turboserve.program_start.collect_rarely()
    run("state-store", settings, begin)


if __name__ == "__main__":
    main()
