"""The end of a forked program: as that of an interpreter, except that the kernel frees the objects.

A fork shares the memory of its imports with its origin. An interpreter that ends frees its objects one by
one. In a fork, that would first copy most of this memory, and take a quarter of a second.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

UNWRITTEN = 120
"""Exit status of an interpreter that could not write what was left to write."""


def run_to_end(program: Callable[[], None]) -> NoReturn:
    """Run the program, and end this process with its exit status."""
    status = _status_of(program)
    # In the interpreter's order: other threads, then functions of `atexit`, then what is left to write.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for output in (sys.stdout, sys.stderr):
        try:
            if output is not None and not output.closed:
                output.flush()
        except OSError:
            traceback.print_exc()
            status = UNWRITTEN
    os._exit(status)


def _status_of(program: Callable[[], None]) -> int:
    try:
        program()
    except SystemExit as exiting:
        if exiting.code is None:
            return 0
        if isinstance(exiting.code, int):
            return exiting.code & 0xFF
        print(exiting.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        # The process ends by this signal, as only the interpreter can do it.
        raise
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0
