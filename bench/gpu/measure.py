"""Correctness, then speed, of the engine on a GPU. Needs torch, numpy and safetensors, and a checkout.

    python bench/gpu/measure.py --golden DIR_OR_FILE... --out results.json

`--tiny` measures a tiny model with the same code, also on a CPU: to see that the script works.
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
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "services" / "worker")]

import torch  # noqa: E402

from turboserve.bench.engine.measure import Batch, Sessions, Timer, batches, naive_chunk_s  # noqa: E402
from turboserve.bench.engine.models import (  # noqa: E402
    PUBLIC_DECODERS,
    DecoderSizes,
    FixedText,
    random_decoder,
    random_transformer,
)
from turboserve.bench.engine.whole import moving, playing  # noqa: E402
from turboserve.worker.engine.engine import Models  # noqa: E402
from turboserve.worker.engine.golden import GoldenReport, check_file, check_type  # noqa: E402
from turboserve.worker.engine.rows import RowsMemory  # noqa: E402
from turboserve.worker.engine.varlen import VarlenMemory  # noqa: E402
from turboserve.worker.model.config import ModelConfig  # noqa: E402
from turboserve.worker.model.taehv import TaehvConfig  # noqa: E402
from turboserve.worker.model.transformer import CausalWanTransformer  # noqa: E402
from turboserve.worker.model.wan_vae_config import WanVaeConfig  # noqa: E402

FLOAT32_TOLERANCE = 1e-4
BFLOAT16_TOLERANCE = 0.2
"""Of latents with a standard deviation of about 1, after all chunks of a reference: against float32."""
ATTENTIONS = {"rows": RowsMemory, "varlen": VarlenMemory}
CONFIG = ModelConfig(
    dim=1536,
    ffn_dim=8960,
    num_heads=12,
    num_layers=30,
    text_dim=4096,
    text_len=512,
    latent_height=60,
    latent_width=104,
)
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
    """Exit status 1 if a reference is not reproduced."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--golden", type=Path, nargs="*", default=[ROOT / "tests" / "data" / "golden"])
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--windows", type=int, nargs="+", default=[12, 21], help="latent frames")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--chunks", type=int, default=8, help="of each session, where the engine decodes too")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    result: dict[str, Any] = {"machine": machine(device), "tiny": arguments.tiny}
    result["correctness"] = correctness(arguments.golden, device)
    save(arguments.out, result)
    # An option that a device lacks is said, and is no failure.
    passed = all(each["passed"] for each in result["correctness"] if "unavailable" not in each)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    side = 256 if arguments.tiny else 8192
    result["matrix_flops_per_s"] = matrix_rate(device, dtype, side)
    result["windows"] = {}
    for window in arguments.windows:
        config = dataclasses.replace(
            TINY if arguments.tiny else CONFIG, local_attn_size=window, sink_size=3, rotation="absolute"
        )
        result["windows"][str(window)] = measured(
            config, device, dtype, arguments, result["matrix_flops_per_s"]
        )
        # After every window, so that running out of memory later loses nothing.
        save(arguments.out, result)
    print(json.dumps(result, indent=2))
    return 0 if passed else 1


def correctness(paths: list[Path], device: torch.device) -> list[dict[str, Any]]:
    """float32 against the references; bfloat16 against our own float32, with either kind of attention."""
    files = [
        file for path in paths for file in (sorted(path.glob("*.safetensors")) if path.is_dir() else [path])
    ]
    found = []
    for file in files:
        exact = partial(check_file, file, FLOAT32_TOLERANCE, str(device))
        found.append(checked(file, "float32", "reference", exact))
        for name, memory in ATTENTIONS.items():
            half = partial(check_type, file, torch.bfloat16, BFLOAT16_TOLERANCE, str(device), memory)
            found.append(checked(file, "bfloat16", f"our float32, attention {name}", half))
    return found


def checked(file: Path, dtype: str, against: str, check: Callable[[], GoldenReport]) -> dict[str, Any]:
    """One comparison, or why it could not be made."""
    about = {"file": file.name, "dtype": dtype, "against": against}
    try:
        report = check()
    except (RuntimeError, ImportError) as error:
        if dtype == "float32":
            raise
        return about | {"unavailable": str(error).splitlines()[0], "passed": False}
    exact = report.max_abs_error if math.isfinite(report.max_abs_error) else None
    return about | {"passed": report.passed, "max_abs_error": exact, "tolerance": report.tolerance}


def measured(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, arguments: argparse.Namespace, rate: float
) -> dict[str, Any]:
    """Everything about one window."""
    model = random_transformer(config, device, dtype)
    text = torch.randn(1, config.text_len, config.text_dim, device=device, dtype=dtype)
    found: dict[int, Batch] = {}
    refused: dict[str, str] = {}
    for size in arguments.batches:
        try:
            found |= batches(model, text, [size], arguments.repeats)
        except torch.OutOfMemoryError as error:
            refused[str(size)] = str(error).splitlines()[0]
    floor_s = chunk_flop(config) / rate
    naive_s = naive_chunk_s(model, text, arguments.repeats)
    playing_s = config.frames_per_chunk * config.frames_per_latent / config.fps
    result = {
        "batches": {str(size): dataclasses.asdict(batch) for size, batch in found.items()},
        "out_of_memory": refused,
        "floor_s": floor_s,
        "naive_chunk_s": naive_s,
        "sessions_at_16_fps": max((size for size, b in found.items() if b.chunk_s <= playing_s), default=0),
        "sessions_at_16_fps_one_at_a_time": int(playing_s / found[1].chunk_s) if 1 in found else None,
        "attention": {"varlen": varlen_batches(model, text, arguments)},
        "decoded": decoded(model, text, device, arguments),
        "memory": slab_memory(model, text, device),
        "suspend": suspend(model, text, device, arguments.repeats),
    }
    if 1 in found:
        result["over_floor"] = found[1].chunk_s / floor_s
        result["ring_vs_copy_speedup"] = naive_s / found[1].chunk_s
    return result


def varlen_batches(
    model: CausalWanTransformer, text: torch.Tensor, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Latencies with all rows' attention in one call; `batches` has them row by row. Or why it cannot be."""
    found: dict[str, Any] = {}
    for size in arguments.batches:
        try:
            batch = batches(model, text, [size], arguments.repeats, VarlenMemory)[size]
            found[str(size)] = dataclasses.asdict(batch)
        except (RuntimeError, ImportError) as error:
            found[str(size)] = {"unavailable": str(error).splitlines()[0]}
    return found


def decoded(
    model: CausalWanTransformer, text: torch.Tensor, device: torch.device, arguments: argparse.Namespace
) -> dict[str, Any]:
    """The whole engine, decoding with either public decoder at random weights: time depends on none."""
    dtype = model.patch_embedding.weight.dtype
    found: dict[str, Any] = {}
    for name, sizes in (TINY_DECODERS if arguments.tiny else PUBLIC_DECODERS).items():
        decoder = random_decoder(sizes, model.config, device, dtype)
        models = Models(model, FixedText(text[0].float()), decoder)
        try:
            found[name] = playing(models, arguments.batches, arguments.chunks)
            found[name]["moving"] = moving(models, arguments.chunks)
        except torch.OutOfMemoryError as error:
            found.setdefault(name, {})["out_of_memory"] = str(error).splitlines()[0]
    return found


def chunk_flop(config: ModelConfig) -> float:
    """Arithmetic of a chunk's forwards over a full window: linear layers and both attentions."""
    tokens = config.frames_per_chunk * config.tokens_per_frame
    width = config.dim
    # Keys and values of the prompt are computed once per prompt, not per forward.
    linear = config.num_layers * (6 * width * width + 2 * width * config.ffn_dim)
    keys = config.window_frames * config.tokens_per_frame + config.text_len
    attention = 4 * tokens * keys * width * config.num_layers
    return (len(config.denoising_steps) + 1) * (2.0 * linear * tokens + attention)


def matrix_rate(device: torch.device, dtype: torch.dtype, side: int) -> float:
    """Operations a second of a square product: what the arithmetic floor is computed with."""
    left = torch.randn(side, side, device=device, dtype=dtype)
    right = torch.randn(side, side, device=device, dtype=dtype)
    rounds = 10

    def multiply() -> None:
        for _ in range(rounds):
            torch.mm(left, right)

    return rounds * 2.0 * side**3 / Timer(device).median(multiply, 5)


def slab_memory(model: CausalWanTransformer, text: torch.Tensor, device: torch.device) -> dict[str, int]:
    """Bytes that one session takes on the device, against the formula."""
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    sessions = Sessions(model, 1, text)
    taken = sessions.pool.allocated_bytes
    after = torch.cuda.memory_allocated(device) - before if device.type == "cuda" else taken
    return {"slab_bytes": taken, "allocated_bytes": after, "expected_bytes": sessions.expected_bytes}


def suspend(
    model: CausalWanTransformer, text: torch.Tensor, device: torch.device, repeats: int
) -> dict[str, Any]:
    """Bandwidth between a slab and pinned host memory, on a stream of its own."""
    slab = Sessions(model, 1, text).states[0].slab
    on_device = [slab.keys, slab.values, slab.text_keys, slab.text_values]
    pinned = device.type == "cuda"
    on_host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=pinned) for t in on_device]
    stream = torch.cuda.Stream(device) if pinned else None  # type: ignore[no-untyped-call]
    total = sum(t.numel() * t.element_size() for t in on_device)

    def copied(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Callable[[], None]:
        def copy() -> None:
            with torch.cuda.stream(stream):
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source, non_blocking=True)
            if stream is not None:
                stream.synchronize()

        return copy

    original = [t.clone() for t in on_device]
    out_s = wall(copied(on_host, on_device), repeats)
    for tensor in on_device:
        tensor.zero_()
    if pinned:
        torch.cuda.synchronize(device)
    back_s = wall(copied(on_device, on_host), repeats)
    return {
        "bytes": total,
        "suspend_bytes_per_s": total / out_s,
        "resume_bytes_per_s": total / back_s,
        "bit_equal": all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(original, on_device, strict=True)
        ),
    }


def wall(work: Callable[[], None], repeats: int) -> float:
    """Median seconds of the wall clock."""
    work()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[len(seconds) // 2]


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers were measured on."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def save(path: Path, result: dict[str, Any]) -> None:
    """Write what there is so far."""
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
