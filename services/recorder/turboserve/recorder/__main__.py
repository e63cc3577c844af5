"""`python -m turboserve.recorder`."""

from __future__ import annotations

import turboserve.program_start  # noqa: F401
from turboserve import service
from turboserve.recorder import app
from turboserve.recorder.settings import Settings
from turboserve.recorder.storage import Storage, open_store


def main() -> None:
    settings = service.load("recorder", Settings)
    try:
        store = open_store(settings)
    except (OSError, ValueError) as error:
        service.refuse("recorder", [f"TURBOSERVE_RECORDINGS_URL: {error}"])

    async def start(runtime: service.Runtime) -> None:
        await app.start(runtime, settings, Storage(store, settings.recording_storage_timeout_s))

    service.run("recorder", settings, start)


if __name__ == "__main__":
    main()
