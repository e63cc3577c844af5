"""The part of `subjects` about recordings."""

from __future__ import annotations

from turboserve.contracts import recordings, requests
from turboserve.contracts.base import Contract
from turboserve.subject_types import Endpoint

_STORE = "state-store"
START_RECORDING = Endpoint(
    "state.recording.start", recordings.StartRecording, recordings.RecordingRecord, _STORE, ("gateway",)
)
STOP_RECORDING = Endpoint(
    "state.recording.stop", recordings.StopRecording, recordings.RecordingRecord, _STORE, ("gateway",)
)
GET_RECORDING = Endpoint(
    "state.recording.get", recordings.RecordingRef, recordings.RecordingRecord, _STORE, ("gateway",)
)
LIST_RECORDINGS = Endpoint(
    "state.recording.list", recordings.ListRecordings, recordings.RecordingPage, _STORE, ("gateway",)
)
DELETE_RECORDING = Endpoint(
    "state.recording.delete", recordings.RecordingRef, recordings.RecordingRecord, _STORE, ("gateway",)
)
LIST_RECORDING_ORDERS = Endpoint(
    "state.recording.orders",
    recordings.ListRecordingOrders,
    recordings.RecordingOrders,
    _STORE,
    ("recorder",),
    periodic=True,
)
REPORT_RECORDING = Endpoint(
    "state.recording.report",
    recordings.ReportRecording,
    recordings.RecordingRecord,
    _STORE,
    ("recorder",),
    periodic=True,
)
FORGET_RECORDING = Endpoint(
    "state.recording.forget", recordings.RecordingRef, requests.Done, _STORE, ("recorder",)
)
READ_RECORDING = Endpoint(
    "recorder.read", recordings.ReadRecording, recordings.RecordingBytes, "recorder", ("gateway",)
)
"""The answer's body is the raw bytes: see `Bus.call_raw`."""

ENDPOINTS: tuple[Endpoint[Contract, Contract], ...] = (  # type: ignore[assignment]
    START_RECORDING,
    STOP_RECORDING,
    GET_RECORDING,
    LIST_RECORDINGS,
    DELETE_RECORDING,
    LIST_RECORDING_ORDERS,
    REPORT_RECORDING,
    FORGET_RECORDING,
    READ_RECORDING,
)
