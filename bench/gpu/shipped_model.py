"""The shipped model on a GPU: the engine's own loop, streams and decoder, judged from pixels."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "experiments"))

from turboserve.experiments.toyworld.judge import Verdict, judge  # noqa: E402
from turboserve.experiments.toyworld.quality import CHUNKS_AFTER, CHUNKS_BEFORE, generate, held_out_jobs  # noqa: E402
from turboserve.worker.engine.fidelity import AttentionName  # noqa: E402
from turboserve.worker.replicas.toyworld import load_toyworld  # noqa: E402

SEED = 7


def shipped_model(device: torch.device, prompts: int, attention: AttentionName = "rows") -> dict[str, Any]:
    """Play held-out prompts, each with a switch.

    Returns the shares that the judge finds right in the last two chunks before and after the switch, and the
    rate of chunks.
    """
    jobs = held_out_jobs(prompts, SEED)
    begun = time.monotonic()
    played = generate(load_toyworld(device), jobs, CHUNKS_BEFORE + CHUNKS_AFTER, attention=attention)
    found: dict[str, Any] = {
        "prompts": prompts,
        "chunks_per_s": prompts * (CHUNKS_BEFORE + CHUNKS_AFTER) / (time.monotonic() - begun),
    }
    for suffix, clips, scenes in (
        ("", [each.chunks[1:CHUNKS_BEFORE] for each in played], [job.scene for job in jobs]),
        ("_after_switch", [each.chunks[-2:] for each in played], [job.after or job.scene for job in jobs]),
    ):
        verdicts = [judge(np.concatenate(clip)) for clip in clips]
        for name, check in (
            ("color", Verdict.colours_match),
            ("motion", Verdict.motions_match),
            ("shape", Verdict.shapes_match),
        ):
            right = [check(verdict, scene) for verdict, scene in zip(verdicts, scenes, strict=True)]
            found[name + suffix] = sum(right) / len(right)
    return found
