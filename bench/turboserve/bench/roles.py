"""Modules apart: memory of a session with and without its decoder's cache, and workers by role.

- `models.MODEL.session`: bytes of one more session on a worker that decodes, by part, as in its budget.
- `models.MODEL.sessions`: sessions that fit in the given memory, beside weights and workspace; `denoise`: on
  a worker of that role.
- `models.MODEL.state`: bytes that a migration copies at most, and without the cache.
- `split`: with `--profile`, the split of the workers that carries the most sessions; `split.neustream`: that
  of NeuStream's own formula and Algorithm 2, and the sessions that it carries by our measure.

- `paths`: with `--paths`, time and processor time of a chunk's way to a decode worker and back, over the
  connection (`tcp`) and over links of two backends (`roles_paths`). Measured, in turns within one run.
- `batches`: with `--batch N`, the time of a decode of up to N sessions of toyworld on the CPU. Measured.
- `plant`: with `--plant`, the most sessions whose chunks are in time, in virtual time (`roles_plant`).

Sizes are computed by formula, on tensors without memory. Nothing else is measured, and the text encoder's
weights do not count. The latencies of the plant are declared. As shipped, they are those of `longlive-1-3b`
with the Wan VAE on an H100.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Group
from rich.table import Table

from turboserve.bench.report import BenchError

GB = 1e9
PUBLIC = ("self-forcing-1-3b", "longlive-1-3b")


def run(
    memory_gb: Annotated[float, typer.Option(min=1, help="Device memory of a worker, GB.")] = 80.0,
    workers: Annotated[int, typer.Option(min=2, max=1_024, help="Workers that are divided.")] = 8,
    model: Annotated[str, typer.Option(help="Public model of the split.")] = PUBLIC[0],
    decoder: Annotated[str, typer.Option(help="wan or taehv.")] = "wan",
    profile: Annotated[
        Path | None, typer.Option(help="Stage latencies, from `turboserve profile engine`.")
    ] = None,
    plant: Annotated[
        bool,
        typer.Option("--plant", help="Find the most sessions in virtual time, with and without roles."),
    ] = False,
    denoise_s: Annotated[
        float, typer.Option(min=0.001, help="Declared time to denoise one session's chunk, seconds.")
    ] = 0.319,
    decode_s: Annotated[
        float, typer.Option(min=0.001, help="Declared time to decode one session's chunk, seconds.")
    ] = 0.253,
    paths: Annotated[
        bool, typer.Option("--paths", help="Measure the ways of a chunk to a decode worker and back.")
    ] = False,
    chunks: Annotated[int, typer.Option(min=8, help="Chunks on each way.")] = 80,
    batch: Annotated[
        int, typer.Option(min=1, max=16, help="Measure decodes of up to so many sessions on the CPU.")
    ] = 1,
) -> dict[str, Any]:
    """Show what a worker without decoders' caches saves, and how to divide workers into roles."""
    from turboserve.bench.engine.models import PUBLIC_DECODERS

    if model not in PUBLIC:
        raise BenchError(f"--model: {model!r} is not one of {', '.join(PUBLIC)}")
    if decoder not in PUBLIC_DECODERS:
        raise BenchError(f"--decoder: {decoder!r} is not one of {', '.join(PUBLIC_DECODERS)}")
    result: dict[str, Any] = {
        "memory_gb": memory_gb,
        "decoder": decoder,
        "models": {name: _memory(name, decoder, round(memory_gb * GB)) for name in PUBLIC},
    }
    if paths:
        from turboserve.bench.roles_paths import MODELS, measured

        result["paths"] = {name: measured(name, chunks) for name in MODELS}
    if batch > 1:
        from turboserve.bench.roles_paths import batches

        result["batches"] = batches(batch)
    if plant:
        result["plant"] = _plant(model, result["models"][model], workers, denoise_s, decode_s)
    if profile is not None:
        result["split"] = _split(model, result["models"][model], workers, profile)
    return result


def _memory(name: str, decoder: str, total_bytes: int) -> dict[str, Any]:
    import torch

    from turboserve.bench.engine.models import PUBLIC_DECODERS, random_models
    from turboserve.worker.engine.budget import decode_bytes, plan
    from turboserve.worker.model.presets import preset

    models = random_models(preset(name), PUBLIC_DECODERS[decoder], torch.device("meta"), torch.bfloat16)
    both, denoise = (plan(models, total_bytes, decode_apart=apart) for apart in (False, True))
    parts = {
        "slab": both.slab_bytes,
        "decoder_cache": both.decode_cache_bytes,
        "latents": both.state_bytes,
        "row": both.row_bytes,
    }
    own = models.decoder.weight_bytes + decode_bytes(models)
    state = both.slab_bytes + both.state_bytes
    return {
        "session": {**parts, "all": both.session_bytes, "without_cache": denoise.session_bytes},
        "sessions": {
            "both": both.sessions(),
            "denoise": denoise.sessions(),
            "decode": (total_bytes - own) // models.decoder.cache_bytes,
        },
        "state": {"both": state + both.decode_cache_bytes, "denoise": state},
    }


def _plant(
    name: str, memory: Mapping[str, Any], workers: int, denoise_s: float, decode_s: float
) -> dict[str, Any]:
    from turboserve.bench.roles_plant import Plant, compared
    from turboserve.worker.engine.gather import LatencyProfile
    from turboserve.worker.model.presets import preset

    config = preset(name)
    # As measured at 1.3 B: a batch gains nothing.
    once_s = denoise_s / config.chunk_forwards
    forward_s = LatencyProfile({1: once_s, 2: 2 * once_s})
    plant = Plant(forward_s, config.chunk_forwards, decode_s, config.chunk_media_s)
    return compared(plant, workers, memory["sessions"])


def _split(name: str, memory: Mapping[str, Any], workers: int, profile: Path) -> dict[str, Any]:
    from turboserve.allocation.roles import (
        RoleCapacity,
        best_split,
        chunks_per_s,
        in_turns,
        neustream_chunks_per_s,
        neustream_split,
        partial_slos,
    )
    from turboserve.worker.engine.profile_file import InvalidProfileError, ProfileFile
    from turboserve.worker.engine.snapshot import fingerprint
    from turboserve.worker.model.presets import preset

    config = preset(name)
    try:
        stages = ProfileFile.read(profile, model=fingerprint(config), device="cuda").stages
        rates = {
            "denoise": chunks_per_s(stages["forward"], config.chunk_forwards),
            "decode": chunks_per_s(stages["decode"]),
        }
    except (InvalidProfileError, KeyError) as error:
        raise BenchError(f"--profile: {error}") from error
    rates["both"] = in_turns(rates["denoise"], rates["decode"])
    roles = {role: RoleCapacity(rates[role], memory["sessions"][role]) for role in rates}
    best = best_split(workers, roles["denoise"], roles["decode"], roles["both"], config.chunk_media_s)
    latency_s = {"denoise": stages["forward"], "decode": stages["decode"]}
    visits = {"denoise": config.chunk_forwards, "decode": 1}
    slos = partial_slos({role: each[1] for role, each in latency_s.items()}, visits, config.chunk_media_s)
    theirs = {role: neustream_chunks_per_s(latency_s[role], slos[role], visits[role]) for role in slos}
    split = neustream_split(workers, theirs)
    carried = min(roles[role].of(split[role], config.chunk_media_s) for role in split)
    return {
        "model": name,
        "neustream": {"chunks_per_s": theirs, "partial_slo_s": slos, **split, "sessions": carried},
        "workers": workers,
        "chunks_per_s": rates,
        "all_do_both": roles["both"].of(workers, config.chunk_media_s),
        "best": vars(best),
    }


def table(result: Mapping[str, Any]) -> Group:
    """Format the result of `run`."""
    return Group(sizes_table(result), *_paths(result), *_batches(result))


def _paths(result: Mapping[str, Any]) -> list[Table]:
    shown = []
    for name, one in result.get("paths", {}).items():
        sizes = f"{one['latent_bytes'] / 1e6:.2f} MB of latents, {one['frame_bytes'] / 1e6:.2f} MB of frames"
        title = f"A chunk of {name} to a decode worker and back: {sizes}"
        made = Table(
            "path",
            "median, ms",
            "P95, ms",
            "processor, ms",
            "median to tcp",
            "processor to tcp",
            title=title,
            title_justify="left",
            box=box.SIMPLE,
        )
        for path, each in one["paths"].items():
            ratio = one["to_tcp"].get(path, {"median_s": 1.0, "processor_s": 1.0})
            times = (each[key] * 1e3 for key in ("median_s", "p95_s", "processor_s"))
            ratios = (ratio[key] for key in ("median_s", "processor_s"))
            made.add_row(path, *(f"{value:.2f}" for value in times), *(f"{value:.2f}" for value in ratios))
        shown.append(made)
    return shown


def _batches(result: Mapping[str, Any]) -> list[Table]:
    if (found := result.get("batches")) is None:
        return []
    title = f"Decodes of {found['model']} on the CPU; at once are decoded: {found['chosen']}"
    made = Table("sessions", "ms", "gain over one by one", title=title, title_justify="left", box=box.SIMPLE)
    for count, seconds in found["seconds"].items():
        made.add_row(count, f"{seconds * 1e3:.1f}", f"{found['gain'][count]:.2f}")
    return [made]


def sizes_table(result: Mapping[str, Any]) -> Table:
    """Format sizes, split and plant."""
    shown = Table(
        "model",
        "session, GB",
        "of it decoder's cache",
        "without it",
        f"sessions in {result['memory_gb']:g} GB",
        "without it",
        title=f"Memory, decoder {result['decoder']}",
        title_justify="left",
        box=box.SIMPLE,
    )
    for name, one in result["models"].items():
        session, sessions = one["session"], one["sessions"]
        sizes = (session[key] / GB for key in ("all", "decoder_cache", "without_cache"))
        counts = (str(sessions[key]) for key in ("both", "denoise"))
        shown.add_row(name, *(f"{size:.2f}" for size in sizes), *counts)
    if (split := result.get("split")) is not None:
        best = split["best"]
        shown.caption = (
            f"{split['workers']} workers of {split['model']}: {best['denoise']} that denoise and "
            f"{best['decode']} that decode carry {best['sessions']} sessions; "
            f"if all do both, {split['all_do_both']}; NeuStream's formula divides them into "
            f"{split['neustream']['denoise']} and {split['neustream']['decode']}, which carry "
            f"{split['neustream']['sessions']}"
        )
    if (plant := result.get("plant")) is not None:
        each = plant["sessions_per_worker"]
        carried = f"{each['both']:.2f} if all do both, {each['split']:.2f} with the best split"
        shown.title = f"{shown.title}; sessions a worker in virtual time: {carried}"
    return shown
