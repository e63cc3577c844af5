"""Settings of a stack whose workers compute a tiny random model: everything is real but the picture.

For tests of services, servers and logs. A chunk takes a twentieth of toyworld's processor time, and so does
the warm-up of a worker.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

_PROGRAM = Path(__file__).parents[1] / "worker" / "tiny_worker.py"
# The last word is that by which the record of a stack finds its workers.
TINY_COMMAND: Final = (sys.executable, str(_PROGRAM), "turboserve.worker")
TINY_WORKERS: Final = {"TURBOSERVE_POOL_WORKER_COMMAND": json.dumps(TINY_COMMAND)}
