"""Which environment variables a process of the stack gets: an allow-list, never a copy of its parent's.

Every process of the same user can read a process's environment, and so can an attacker who controls the
process. A child therefore gets a base that reveals nothing about the stack, and the `TURBOSERVE_` settings
that it declares.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

PREFIX = "TURBOSERVE_"

SYSTEM = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TZ", "TZDIR", "TMPDIR"),
    *("LD_*", "GLIBC_TUNABLES", "MALLOC_*", "XDG_*"),
    # libfaketime reads these. Tests use it for faults of the clock.
    *("FAKETIME*", "DONT_FAKE_MONOTONIC"),
)
"""Variables that any program needs. Servers get these only. A trailing `*` matches any rest of a name."""
SERVICE: tuple[str, ...] = (
    *SYSTEM,
    *("VIRTUAL_ENV", "PYTHON*", "COVERAGE_*"),
    # The exporters of traces and metrics read these.
    *("OTEL_*", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_*", "REQUESTS_CA_BUNDLE"),
    "OMP_NUM_THREADS",
)
"""Variables that any service needs."""
DEVICE = (
    *("OMP_*", "KMP_*", "GOMP_*", "MKL_*", "OPENBLAS_*", "NUMEXPR_*", "CC", "CXX"),
    *("TORCH*", "PYTORCH_*", "TRITON_*", "NCCL_*", "GLOO_*", "TP_*", "UCX_*", "NIXL_*"),
    *("CUDA_*", "CUBLAS_*", "CUDNN_*", "NVIDIA_*", "NV_*", "ROCR_*", "HIP_*", "HSA_*"),
    *("HF_HOME", "HF_HUB_*", "HF_DATASETS_OFFLINE", "TRANSFORMERS_*", "AV_*"),
)
"""Variables that a worker needs as well: devices, their libraries, model folders. No token of a model hub."""
CLUSTER = ("RAY_*",)
"""Variables that the autoscaler needs as well, to reach a Ray cluster."""

WORKER_SETTINGS = frozenset(
    PREFIX + name.upper()
    for name in (
        *("worker_id", "pool_member"),
        *("model", "model_weights", "checkpoint", "checkpoint_container", "lora", "vae"),
        *("fast_vae", "text_encoder"),
        *("weights", "weights_digest"),
        *("rotation", "dtype", "device", "torch_threads", "worker_max_sessions"),
        *("memory_bytes", "host_memory_bytes", "host_sessions", "max_lead_s", "tier_report_interval_s"),
        *("tier_alpha", "send_latents"),
        *("profile", "gather_policy", "attention"),
        *("fidelity", "fidelity_profile", "fidelity_floor"),
        *("compile", "decode_batch", "overlap"),
        *("roles", "decode_workers", "decode_key", "decode_timeout_s", "text_workers"),
        *("sequence_parallel_directory", "sequence_parallel_timeout_s"),
        *("transfer_host", "transfer_port", "transfer_backends", "transfer_bytes_per_s"),
        *(
            "migration_quiesce_max_s",
            "migration_idle_window_s",
            "migration_idle_window_timeout_s",
            "worker_tick_s",
        ),
        "real_time_margin",
        *("video_crf", "video_preset", "chunk_ttl_s"),
    )
)
"""Settings that only the worker declares. A process that starts workers passes them on.

The autoscaler cannot import the worker, so this module lists them. A test compares the list with the worker's
settings."""


def settings_of(fields: Iterable[str]) -> frozenset[str]:
    """Return the variables of a settings class's fields: `settings_of(Settings.model_fields)`."""
    return frozenset(PREFIX + name.upper() for name in fields)


def child(
    environment: Mapping[str, str], base: Collection[str], settings: Collection[str] = ()
) -> dict[str, str]:
    """Select from `environment` what a child gets: variables that match `base`, and its own `settings`.

    Names are compared case-insensitively, because settings are read that way.
    """
    kept: dict[str, str] = {}
    for name, value in environment.items():
        if name.upper().startswith(PREFIX):
            if name.upper() in settings:
                # Always upper case, so that a value set for this child replaces the inherited one.
                kept[name.upper()] = value
        elif matches(name, base):
            kept[name] = value
    return kept


def listed(names: str) -> tuple[str, ...]:
    """Parse a setting with names separated by commas."""
    return tuple(name.strip().upper() for name in names.split(",") if name.strip())


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of `patterns` matches `name`."""
    upper = name.upper()
    return any(
        upper.startswith(pattern[:-1]) if pattern.endswith("*") else upper == pattern for pattern in patterns
    )


def unknown(environment: Iterable[str], known: Collection[str]) -> list[str]:
    """Return the `TURBOSERVE_` variables that are not in `known`. They are most likely misspelled."""
    return sorted(
        name for name in environment if name.upper().startswith(PREFIX) and name.upper() not in known
    )
