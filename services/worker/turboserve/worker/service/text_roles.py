"""The role `text`: a worker that encodes prompts, and workers that have their prompts encoded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

from turboserve import logs
from turboserve.service import Runtime
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.interface import TextEncoder
from turboserve.worker.engine.models import Models
from turboserve.worker.remote_decoding.frames import TensorSpec
from turboserve.worker.remote_decoding.ports import RolePorts
from turboserve.worker.remote_decoding.text_client import TextClient
from turboserve.worker.remote_decoding.text_server import TextServer, encode_one
from turboserve.worker.service.decode_roles import free_networks, key_of
from turboserve.worker.service.role_serving import Listen, at_interface, serve_role
from turboserve.worker.settings import Settings, addresses_of

PROMPT = "a red circle moving left"
"""What is encoded to warm up."""

log = logs.get("decoding")


def encode_elsewhere(worker: str, engine: Engine, settings: Settings, ports: RolePorts) -> TextClient:
    """Have the engine's prompts encoded by the configured text workers. The engine must not run yet."""
    sample = TensorSpec.of(encode_one(engine.backend.text, PROMPT))
    client = TextClient(
        worker,
        engine.fingerprint,
        engine.config,
        addresses_of(settings.text_workers),
        key_of(settings),
        settings.decode_timeout_s,
        sample.dtype,
        ports.connect,
    )
    engine.text.remote = client
    return client


def load_encoder(settings: Settings, load: Callable[[Settings], Models]) -> tuple[TextEncoder, str]:
    """Load the model, keep its text encoder, and warm it up. Returns its fingerprint, too.

    Raises the errors of `load`.
    """
    models = load(settings)
    encoder, fingerprint = models.text, models.fingerprint
    device = models.transformer.patch_embedding.weight.device
    del models
    free_networks(device)
    encode_one(encoder, PROMPT)
    return encoder, fingerprint


async def start_text_worker(
    runtime: Runtime, settings: Settings, load: Callable[[Settings], Models], name: str
) -> None:
    """Load the text encoder and serve the workers that prove the key. `name`: the worker's id.

    Raises the errors of `load`, `InterfaceError` and `OSError`.
    """
    listening = at_interface(settings)
    encoder, fingerprint = await asyncio.to_thread(load_encoder, settings, load)
    await serve_encoder(runtime, settings, encoder, fingerprint, name, listening)


async def serve_encoder(
    runtime: Runtime,
    settings: Settings,
    encoder: TextEncoder,
    fingerprint: str,
    name: str,
    listening: Listen,
    thread: Executor | None = None,
) -> TextServer:
    """Serve workers with a loaded text encoder, until the runtime stops. `thread`: see `RoleServer`.

    Raises `OSError`.
    """
    served = TextServer(name, fingerprint, encoder, key_of(settings), runtime.clock.monotonic, thread)
    address = await serve_role(runtime, served, listening, "text server")
    log.info("text worker serves", worker=name, address=address)
    return served
