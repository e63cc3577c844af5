"""Unpack the shipped weights, so that training can continue from them.

    python training/toyworld/unpack.py --out runs

Writes vae.pt, text.pt and dit.pt as the training scripts do, but without the optimizers' moments.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from turboserve.worker.model.toyworld import WEIGHTS, read_toyworld


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    args = parser.parse_args()
    world = read_toyworld(args.weights)
    details = world.details
    made = details["provenance"]
    first, *tuned = made["vae"]
    transformer = world.transformer.state_dict()
    parts = {
        "vae": {
            "scaled": world.vae.state_dict(),
            "config": details["vae"],
            "provenance": first,
            "tuned": tuned,
        },
        "text": {
            "weights": world.text.state_dict(),
            "vocabulary": tuple(details["vocabulary"]),
            "provenance": made["text"],
        },
        "dit": {
            "weights": {name: value.clone() for name, value in transformer.items()},
            "live": transformer,
            "config": json.dumps(details["transformer"]),
            "optimisers": None,
            "steps": made["transformer"]["steps"],
            "seconds": made["transformer"]["wall_minutes"] * 60,
            "provenance": made["transformer"],
        },
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        torch.save(part, args.out / f"{name}.pt")
        print(args.out / f"{name}.pt")


if __name__ == "__main__":
    main()
