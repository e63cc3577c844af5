"""Correctness, then speed, of the engine on a GPU.

Needs torch, numpy, safetensors and cachetools, and a checkout.

    python bench/gpu/measure.py --golden DIR_OR_FILE... --out results.json

`--tiny` measures a tiny model with the same code, also on a CPU, to check that the script works. If a call is
limited to ten minutes, use three calls, each with `--limit-s 450`: `--parts correctness kernels speed
--windows 12`, then `--parts kernels speed --windows 21`, then `--parts whole --windows 12`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "services" / "worker"), str(ROOT / "shared")]

import torch  # noqa: E402
from configurations import configurations  # noqa: E402
from digest import digest_seconds  # noqa: E402
from forward_profile import forward_profile  # noqa: E402
from notes import Notes, reason  # noqa: E402
from shipped_model import shipped_model  # noqa: E402
from video import video  # noqa: E402

from turboserve.bench.engine.hardware import chunk_flop, matrix_rate, slab_memory, suspend  # noqa: E402
from turboserve.bench.engine.kernels import attention_kernels  # noqa: E402
from turboserve.bench.engine.measure import Timer, batches, naive_chunk_s  # noqa: E402
from turboserve.bench.engine.models import (  # noqa: E402
    PUBLIC_DECODERS,
    DecoderSizes,
    FixedText,
    random_decoder,
    random_transformer,
)
from turboserve.bench.engine.naive import ClonedCache, ShiftedCache  # noqa: E402
from turboserve.bench.engine.stages import decoding  # noqa: E402
from turboserve.bench.engine.whole import moving, playing  # noqa: E402
from turboserve.worker.engine.golden import GoldenReport, check_file, check_type  # noqa: E402
from turboserve.worker.engine.models import COMPILER, Models  # noqa: E402
from turboserve.worker.engine.tensor_backend import KINDS  # noqa: E402
from turboserve.worker.model.config import ModelConfig  # noqa: E402
from turboserve.worker.model.presets import preset  # noqa: E402
from turboserve.worker.model.taehv import TaehvConfig  # noqa: E402
from turboserve.worker.model.transformer import CausalWanTransformer  # noqa: E402
from turboserve.worker.model.wan_vae_config import WanVaeConfig  # noqa: E402

FLOAT32_TOLERANCE = 1e-4
BFLOAT16_TOLERANCE = 0.2
"""Tolerance against float32 after all chunks of a reference. Latents have a standard deviation of about 1."""
MOST_DECODED = 4
"""Maximum number of sessions whose chunks are decoded at once: each takes 8 GB with the Wan VAE at 480p."""
PARTS = ("correctness", "shipped", "digest", "kernels", "speed", "profile", "fidelity", "whole", "video")
LOWER = "fp8"
"""The kind of attention of lower fidelity. It is measured, and never taken for the fastest."""
TINY = ModelConfig(
    dim=48,
    ffn_dim=96,
    num_heads=2,
    num_layers=2,
    text_dim=12,
    text_len=5,
    latent_height=4,
    latent_width=4,
    freq_dim=32,
)

TINY_DECODERS: dict[str, DecoderSizes] = {
    "wan": WanVaeConfig(base_dim=8),
    "taehv": TaehvConfig(widths=(16, 8, 8, 8)),
}


def main() -> int:
    """Run the measurements. Returns exit status 1 if a reference is not reproduced."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--golden", type=Path, nargs="*", default=[ROOT / "tests" / "data" / "golden"])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--windows", type=int, nargs="*", default=[12, 21], help="window sizes, in latent frames"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--chunks", type=int, default=4, help="number of chunks per session in the part `whole`"
    )
    parser.add_argument(
        "--limit-s", type=float, default=math.inf, help="start no further part after this many seconds"
    )
    parser.add_argument("--tiny", action="store_true", help="use a tiny model, to check the script")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    notes = Notes(arguments.out, time.monotonic() + arguments.limit_s)
    notes.found |= {"machine": machine(device), "tiny": arguments.tiny}
    if "correctness" in arguments.parts:
        notes.found["correctness"] = correctness(arguments.golden, device)
    if "shipped" in arguments.parts:
        prompts = 1 if arguments.tiny else 100
        notes.take(notes.found, "shipped", partial(shipped_model, device, prompts))
        notes.take(notes.found, f"shipped_{LOWER}", partial(shipped_model, device, prompts, LOWER))
    if "digest" in arguments.parts:
        notes.take(notes.found, "digest", partial(digest_seconds, device, 256 if arguments.tiny else 8192))
    # An option that the device lacks is reported and is no failure.
    checks = notes.found.get("correctness", [])
    passed = all(each["passed"] for each in checks if "unavailable" not in each)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rate = matrix_rate(device, dtype, 256 if arguments.tiny else 8192)
    notes.found["matrix_flops_per_s"] = rate
    notes.found["windows"] = {}
    for window in arguments.windows:
        config = dataclasses.replace(
            TINY if arguments.tiny else preset("longlive-1-3b"),
            local_attn_size=window,
            sink_size=3,
            rotation="absolute",
        )
        into: dict[str, Any] = {}
        notes.found["windows"][str(window)] = into
        if "kernels" in arguments.parts:
            repeats = arguments.repeats
            notes.take(into, "attention_kernels", partial(attention_kernels, config, device, dtype, repeats))
        if {"speed", "profile", "fidelity", "whole"} & set(arguments.parts):
            model = random_transformer(config, device, dtype)
            text = torch.randn(1, config.text_len, config.text_dim, device=device, dtype=dtype)
            if "speed" in arguments.parts:
                speed(model, text, rate, arguments, notes, into)
            if "profile" in arguments.parts and device.type == "cuda":
                into["profile"] = {}
                for name, compiler in (("rows", None), ("rows compiled", COMPILER)):
                    notes.take(into["profile"], name, partial(forward_profile, model, text, "rows", compiler))
            if "fidelity" in arguments.parts:
                measure = partial(configurations, model, text, arguments.batches[0], arguments.repeats)
                notes.take(into, "fidelity", measure)
            if "whole" in arguments.parts:
                whole(model, text, arguments, notes, into)
            # Two models at once leave less room for the second model's sessions.
            del model, text
    if "video" in arguments.parts:
        config = dataclasses.replace(TINY, max_frames=9) if arguments.tiny else preset("self-forcing-1-3b")
        compiler = COMPILER if device.type == "cuda" else "eager"
        decoder = (TINY_DECODERS if arguments.tiny else PUBLIC_DECODERS)["taehv"]
        ways = {"rows": ("rows", None), "compiled": ("rows", compiler), LOWER: (LOWER, compiler)}
        notes.take(notes.found, "video", partial(video, config, decoder, device, dtype, ways))
    notes.save()
    print(json.dumps(notes.found, indent=2))
    return 0 if passed else 1


def correctness(paths: list[Path], device: torch.device) -> list[dict[str, Any]]:
    """Compare float32 with the references, and bfloat16 with our own float32 for both kinds of attention."""
    files = [
        file for path in paths for file in (sorted(path.glob("*.safetensors")) if path.is_dir() else [path])
    ]
    found = []
    for file in files:
        exact = partial(check_file, file, FLOAT32_TOLERANCE, str(device))
        found.append(checked(file, "float32", "reference", exact))
        for name in ("rows", "varlen"):
            half = partial(
                check_type, file, torch.bfloat16, BFLOAT16_TOLERANCE, str(device), KINDS[name].memory
            )
            found.append(checked(file, "bfloat16", f"our float32, attention {name}", half))
    return found


def checked(file: Path, dtype: str, against: str, check: Callable[[], GoldenReport]) -> dict[str, Any]:
    """Make one comparison, or record why it could not be made."""
    about = {"file": file.name, "dtype": dtype, "against": against}
    try:
        report = check()
    except Exception as error:
        if dtype == "float32":
            raise
        return about | {"unavailable": reason(error), "passed": False}
    exact = report.max_abs_error if math.isfinite(report.max_abs_error) else None
    return about | {"passed": report.passed, "max_abs_error": exact, "tolerance": report.tolerance}


def speed(
    model: CausalWanTransformer,
    text: torch.Tensor,
    rate: float,
    arguments: argparse.Namespace,
    notes: Notes,
    into: dict[str, Any],
) -> None:
    """Measure latencies at one window.

    Kinds of attention, and the compiler, are compared with one session. The fastest is used to measure every
    other batch. The kind of lower fidelity is no candidate.
    """
    config, device = model.config, model.patch_embedding.weight.device
    compiler = COMPILER if device.type == "cuda" else "eager"
    options: dict[str, Any] = {}
    into["options"] = options

    def one(size: int, attention: str, compile_with: str | None) -> Callable[[], dict[str, float]]:
        return lambda: dataclasses.asdict(
            batches(model, text, [size], arguments.repeats, attention, compile_with)[size]
        )

    ways: dict[str, tuple[str, str | None]] = {kind: (kind, None) for kind in KINDS}
    usable = {name: way for name, way in ways.items() if notes.take(options, name, one(1, *way))}
    lower = usable.pop(LOWER, None)
    fastest = min(usable, key=lambda name: float(options[name]["chunk_s"]), default="rows")
    compiled = f"{fastest} compiled"
    ways[compiled] = (fastest, compiler)
    if notes.take(options, compiled, one(1, *ways[compiled])):
        fastest = min(fastest, compiled, key=lambda name: float(options[name]["chunk_s"]))
    if lower is not None and notes.take(options, f"{LOWER} compiled", one(1, LOWER, compiler)):
        into["fp8_speedup"] = options[fastest]["chunk_s"] / options[f"{LOWER} compiled"]["chunk_s"]
    into["fastest"] = fastest
    by_batch: dict[str, Any] = {}
    into["batches"] = by_batch
    made = [n for n in arguments.batches if notes.take(by_batch, str(n), one(n, *ways[fastest]))]
    into["floor_s"] = chunk_flop(config) / rate
    naive: dict[str, Any] = {}
    into["naive"] = naive
    for name, cache in (("shift", ShiftedCache), ("clone", ClonedCache)):
        copying = partial(naive_chunk_s, model, text, arguments.repeats, cache)
        notes.take(naive, name, lambda copying=copying: {"chunk_s": copying()})  # type: ignore[misc]
    playing_s = config.frames_per_chunk * config.frames_per_latent / config.fps
    chunk_s = {size: float(by_batch[str(size)]["chunk_s"]) for size in made}
    into["sessions_at_16_fps"] = max((n for n, seconds in chunk_s.items() if seconds <= playing_s), default=0)
    if 1 in chunk_s:
        into["sessions_at_16_fps_one_at_a_time"] = int(playing_s / chunk_s[1])
        into["over_floor"] = chunk_s[1] / into["floor_s"]
    # The naive loops are not compiled and use PyTorch's kernel, so `rows` against them shows the ring alone.
    ring_s = options.get("rows", {}).get("chunk_s")
    for name, key in (("shift", "ring_vs_copy_speedup"), ("clone", "ring_vs_clone_speedup")):
        copies_s = naive.get(name, {}).get("chunk_s")
        if copies_s and ring_s:
            into[key] = copies_s / ring_s
        if copies_s and 1 in chunk_s:
            into[f"fastest_vs_{name}_speedup"] = copies_s / chunk_s[1]
    notes.take(into, "memory", partial(slab_memory, model, text, device))
    notes.take(into, "suspend", partial(suspend, model, text, device, arguments.repeats))


def whole(
    model: CausalWanTransformer,
    text: torch.Tensor,
    arguments: argparse.Namespace,
    notes: Notes,
    into: dict[str, Any],
) -> None:
    """Measure either public decoder, and the whole engine with it.

    The decoders have random weights, because time does not depend on weights. The first measurement gives the
    time to decode several sessions at once, by which the engine chooses how many it decodes at once.
    """
    weight = model.patch_embedding.weight
    timer, sizes = Timer(weight.device), [size for size in arguments.batches if size <= MOST_DECODED]
    latents = torch.zeros(model.config.latent_shape, device=weight.device)
    into["decode_s"], into["decoded"] = {}, {}
    for name, of in (TINY_DECODERS if arguments.tiny else PUBLIC_DECODERS).items():
        decoder = random_decoder(of, model.config, weight.device, weight.dtype)
        measure = partial(decoding, decoder, latents, sizes, timer, arguments.repeats)
        known = into["decode_s"][name] if notes.take(into["decode_s"], name, measure) else None
        models = Models(model, FixedText(text[0].float()), decoder)
        play = partial(playing, models, arguments.batches, arguments.chunks, known)
        if notes.take(into["decoded"], name, play):
            notes.take(into["decoded"][name], "moving", partial(moving, models, arguments.chunks))


def machine(device: torch.device) -> dict[str, Any]:
    """Return a description of the device and the software."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(main())
