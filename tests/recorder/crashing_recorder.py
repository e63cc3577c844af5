"""The recorder as a process that kills itself at one point: `python crashing_recorder.py`.

The points are inserted here, from outside: the recorder itself has none. `CRASH` is POINT:COUNT, where COUNT
is how often the process passes the point before it dies there.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from turboserve.bus.chunk_log import ChunkLog
from turboserve.recorder.__main__ import main
from turboserve.recorder.recorder import Recorder
from turboserve.recorder.storage import Storage
from turboserve.recorder.writer import RecordingWriter

Work = Callable[..., Awaitable[Any]]


def points() -> dict[str, tuple[type, str, Callable[..., bool], bool]]:
    """Return point → class, method, which calls count, whether the process dies after the call."""

    def of(kind: str) -> Callable[..., bool]:
        return lambda _self, path, *_: f"/{kind}/" in path

    def any_call(*_: Any) -> bool:
        return True

    return {
        "before the listing": (Storage, "listing", any_call, False),
        "after the listing": (Storage, "listing", any_call, True),
        "before the log is read": (ChunkLog, "after", any_call, False),
        "before an init segment": (Storage, "put", of("inits"), False),
        "after an init segment": (Storage, "put", of("inits"), True),
        "before a segment": (Storage, "put", of("segments"), False),
        "after a segment": (Storage, "put", of("segments"), True),
        "before a report": (RecordingWriter, "_report", any_call, False),
        "after a report": (RecordingWriter, "_report", any_call, True),
        "before a deletion": (Storage, "delete", any_call, False),
        "after a deletion": (Storage, "delete", any_call, True),
        "after the row was forgotten": (Recorder, "_delete", any_call, True),
    }


def crash_at(point: str, count: int) -> None:
    owner, method, counts, after = points()[point]
    work: Work = getattr(owner, method)
    left = count

    async def run(*args: Any, **options: Any) -> Any:
        nonlocal left
        dies = counts(*args)
        left -= dies
        if dies and left < 0 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = await work(*args, **options)
        if dies and left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    setattr(owner, method, run)


if __name__ == "__main__":
    wanted = os.environ.get("CRASH")
    if wanted:
        name, _, passed = wanted.partition(":")
        crash_at(name, int(passed))
    main()
