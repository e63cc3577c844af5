"""Which environment variables a process of the stack is given: an allow-list, never a copy of its parent's.

Every process that the same user runs can read an environment, and so can whoever gets hold of the process. A
child therefore gets a base that says nothing of the stack, and the `TURBOSERVE_` settings that it declares.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

PREFIX = "TURBOSERVE_"

SYSTEM = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TZ", "TZDIR", "TMPDIR"),
    *("LD_*", "GLIBC_TUNABLES", "MALLOC_*", "XDG_*"),
    # Faults of the clock, for tests: libfaketime reads these.
    *("FAKETIME*", "DONT_FAKE_MONOTONIC"),
)
"""What any program needs: servers get this and no more. `*` at the end stands for any rest of a name."""
SERVICE = (
    *SYSTEM,
    *("VIRTUAL_ENV", "PYTHON*", "COVERAGE_*"),
    # What traces and metrics are exported with.
    *("OTEL_*", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_*", "REQUESTS_CA_BUNDLE"),
    "OMP_NUM_THREADS",
)
"""What any service needs."""
DEVICE = (
    *("OMP_*", "KMP_*", "GOMP_*", "MKL_*", "OPENBLAS_*", "NUMEXPR_*", "CC", "CXX"),
    *("TORCH*", "PYTORCH_*", "TRITON_*", "NCCL_*", "GLOO_*", "TP_*", "UCX_*", "NIXL_*"),
    *("CUDA_*", "CUBLAS_*", "CUDNN_*", "NVIDIA_*", "NV_*", "ROCR_*", "HIP_*", "HSA_*"),
    *("HF_HOME", "HF_HUB_*", "HF_DATASETS_OFFLINE", "TRANSFORMERS_*", "AV_*"),
)
"""What a worker needs beside: devices, their libraries, and where models lie. No token of a model hub."""
CLUSTER = ("RAY_*",)
"""What the autoscaler needs beside, to reach a Ray cluster."""

WORKER_SETTINGS = frozenset(
    PREFIX + name.upper()
    for name in (
        *("worker_id", "pool_slot"),
        *("model", "model_weights", "checkpoint", "checkpoint_container", "lora", "vae", "text_encoder"),
        *("rotation", "dtype", "device", "torch_threads", "worker_max_sessions"),
        *("memory_bytes", "host_memory_bytes", "max_lead_s", "profile", "gather_policy", "attention"),
        *("compile", "decode_batch", "overlap"),
        *("transfer_host", "transfer_port", "transfer_backends", "transfer_bytes_per_s"),
        *("move_still_s", "move_quiet_s", "move_patience_s", "worker_tick_s"),
        "real_time_margin",
        *("video_crf", "video_preset", "chunk_ttl_s"),
    )
)
"""Settings that the worker declares and others do not: who starts workers passes these on. The autoscaler
cannot import the worker, so they stand here; a test compares them with the worker's settings."""


def settings_of(fields: Iterable[str]) -> frozenset[str]:
    """The variables of a settings class's fields: `settings_of(Settings.model_fields)`."""
    return frozenset(PREFIX + name.upper() for name in fields)


def child(
    environment: Mapping[str, str], base: Collection[str], settings: Collection[str] = ()
) -> dict[str, str]:
    """Of `environment` what a child gets: variables that `base` names, and the `settings` of its own.

    Names are compared without regard to case, as settings are read.
    """
    kept: dict[str, str] = {}
    for name, value in environment.items():
        if name.upper().startswith(PREFIX):
            if name.upper() in settings:
                # In one spelling, so that what is set for the child in particular replaces it.
                kept[name.upper()] = value
        elif matches(name, base):
            kept[name] = value
    return kept


def listed(names: str) -> tuple[str, ...]:
    """The names in a setting that separates them by commas."""
    return tuple(name.strip().upper() for name in names.split(",") if name.strip())


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of `patterns` stands for `name`."""
    upper = name.upper()
    return any(
        upper.startswith(pattern[:-1]) if pattern.endswith("*") else upper == pattern for pattern in patterns
    )


def unknown(environment: Iterable[str], known: Collection[str]) -> list[str]:
    """`TURBOSERVE_` variables that nobody reads: most likely misspelt."""
    return sorted(
        name for name in environment if name.upper().startswith(PREFIX) and name.upper() not in known
    )
