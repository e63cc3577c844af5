"""Train the text encoder of toyworld: each summary token must name its attribute. About two minutes.

    python training/toyworld/train_text.py --out runs/text.pt

Sentences come from `prompts.phrase`. Random unknown words are mixed in, so that the encoder learns to ignore
them.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
from common import commit, keep_memory, warmup_cosine
from torch import Tensor, nn
from torch.nn import functional as F

from turboserve.experiments.toyworld.prompts import describe, phrase, vocabulary
from turboserve.experiments.toyworld.world import BACKGROUNDS, COLOURS, MOTIONS, SHAPES, Scene, random_scene
from turboserve.worker.model.toy_text import SUMMARY, ToyText

NONE = 0
ABSENT_MOTION = "still"
_TABLES = {"shape": SHAPES, "colour": tuple(COLOURS), "motion": MOTIONS, "background": tuple(BACKGROUNDS)}


def labels(scene: Scene) -> list[int]:
    """Return, per summary token, the index of its attribute; 0 is "no such figure"."""
    found: list[int] = []
    for i in range(2):
        for kind in ("shape", "colour", "motion"):
            present = i < len(scene.figures)
            found.append(1 + _TABLES[kind].index(getattr(scene.figures[i], kind)) if present else NONE)
    return [*found, 1 + _TABLES["background"].index(scene.background), len(scene.figures)]


def with_strangers(text: str, rng: random.Random) -> str:
    """Insert random unknown words between the others."""
    words = text.split(" ")
    for _ in range(rng.choice((0, 0, 1, 2, 3))):
        stranger = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 9)))
        words.insert(rng.randint(0, len(words)), stranger)
    return " ".join(words)


def draw(rng: random.Random, count: int, held_out: bool) -> tuple[list[str], Tensor]:
    scenes = [random_scene(rng, 0.6, held_out) for _ in range(count)]
    texts = [phrase(scene, rng, held_out) if rng.random() < 0.9 else describe(scene) for scene in scenes]
    if not held_out:
        texts = [with_strangers(text, rng) for text in texts]
    return texts, torch.tensor([labels(scene) for scene in scenes])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=2.5)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    keep_memory()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    words = vocabulary()
    text = ToyText(words)
    heads = nn.ModuleList(nn.Linear(128, 9) for _ in SUMMARY)
    optimiser = torch.optim.AdamW([*text.parameters(), *heads.parameters()], lr=args.rate, weight_decay=0.01)

    def logits(texts: list[str]) -> Tensor:
        summary = text(text.tokenize(texts))
        return torch.stack([head(summary[:, i]) for i, head in enumerate(heads)], 1)

    begun, spent, steps, accuracy = time.monotonic(), 0.0, 0, 0.0
    while spent < args.minutes * 60:
        factor = warmup_cosine(spent / (args.minutes * 60))
        for group in optimiser.param_groups:
            group["lr"] = args.rate * factor
        texts, wanted = draw(rng, args.batch, False)
        loss = F.cross_entropy(logits(texts).flatten(0, 1), wanted.flatten(), label_smoothing=0.02)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(text.parameters(), 1.0)
        optimiser.step()
        steps += 1
        spent = time.monotonic() - begun
        if steps % 100 == 0:
            with torch.no_grad():
                texts, wanted = draw(random.Random(5), 512, True)
                right = (logits(texts).argmax(-1) == wanted).all(1)
            accuracy = right.float().mean().item()
            print(
                f"steps {steps} minutes {spent / 60:.2f} loss {loss.item():.4f} exact {accuracy:.4f}",
                [texts[i] for i in (~right).nonzero().flatten().tolist()[:3]],
                flush=True,
            )
    torch.save(
        {
            "weights": text.state_dict(),
            "vocabulary": words,
            "provenance": {
                "script": "training/toyworld/train_text.py",
                "commit": commit(),
                "seed": args.seed,
                "steps": steps,
                "wall_minutes": round(spent / 60, 1),
                "held_out_exact": accuracy,
            },
        },
        args.out,
    )


if __name__ == "__main__":
    main()
