"""Assembles a recorder over any object storage and starts it in the service runner."""

from __future__ import annotations

from turboserve.recorder.content import Content
from turboserve.recorder.recorder import Recorder
from turboserve.recorder.settings import Settings
from turboserve.recorder.storage import Storage
from turboserve.recording_subjects import READ_RECORDING
from turboserve.service import Runtime


async def start(runtime: Runtime, settings: Settings, storage: Storage) -> Recorder:
    """Start a recorder. Object storage that is away is a warning: the recorder is ready, and waits for it."""
    recorder = Recorder(runtime, settings, storage)
    content = Content(storage, runtime.clock, settings.recording_cache_bytes, settings.recording_segment_s)
    runtime.check("orders", lambda: recorder.listed)
    runtime.warn("object_storage", recorder.storage_warning)
    runtime.warn("recordings_behind", recorder.behind_warning)
    runtime.on_stop(recorder.close)
    await runtime.bus.serve_raw(READ_RECORDING, content.read)
    runtime.spawn(recorder.run(), "orders")
    return recorder
