"""Write the animation of README and documentation: clips of toyworld, each with a change of its prompt.

    python tools/animation.py --out docs/toyworld.webp

The clips come from the worker's engine and are not sped up. The needed file is small, so that the repository
stays small: lossy WebP.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from turboserve.experiments.toyworld.quality import Job, generate
from turboserve.experiments.toyworld.world import Scene
from turboserve.worker.replicas.toyworld import load_toyworld

PROMPTS = (
    ("a red balloon rising over the sea", "a yellow sphere moving right at night"),
    (
        "a red ball circling at night and a pink pyramid moving left",
        "a green pyramid rising over misty mountains",
    ),
    ("a purple pyramid moving right over a snow field", "an orange crate falling over the sea"),
)
"""Each clip's prompt, and the one that follows it."""
CHUNKS = 6
GAP = 4
"""Pixels between clips."""
QUALITY = 80


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    nothing = Scene(())
    jobs = [Job(nothing, first, args.seed, nothing, then) for first, then in PROMPTS]
    models = load_toyworld()
    clips = [np.concatenate(played.chunks) for played in generate(models, jobs, CHUNKS)]
    fps = models.transformer.config.fps
    pictures = [Image.fromarray(_beside([clip[n] for clip in clips])) for n in range(len(clips[0]))]
    pictures[0].save(
        args.out,
        save_all=True,
        append_images=pictures[1:],
        duration=round(1_000 / fps),
        loop=0,
        quality=QUALITY,
        method=4,
    )
    print(f"{args.out}: {args.out.stat().st_size} bytes, {len(pictures)} frames")


def _beside(frames: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Return frames [H, W, 3] as one row on white."""
    gap = np.full((frames[0].shape[0], GAP, 3), 255, np.uint8)
    parts = [part for frame in frames for part in (frame, gap)][:-1]
    return np.concatenate(parts, axis=1)


if __name__ == "__main__":
    main()
