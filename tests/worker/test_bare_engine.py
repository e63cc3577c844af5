"""The engine on a machine that has little more than torch."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
for absent in ("pydantic", "pydantic_settings", "jsonschema", "nats", "structlog"):
    sys.modules[absent] = None
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.interface import ChunkReady, EngineOptions, SessionSpec
from turboserve.worker.replicas.toyworld import load_toyworld
engine = Engine(load_toyworld(), EngineOptions(slab_bytes=1 << 26, max_lead_s=9.0))
engine.admit(SessionSpec("lone", "a red circle moving left"), 0.0)
while not any(isinstance(event, ChunkReady) for event in engine.step(0.0)):
    pass
print("generated")
"""


def test_the_engine_generates_without_the_service_s_dependencies() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "generated", run.stderr
