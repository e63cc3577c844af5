"""Write the averaged weights of the three networks to the file that ships.

    python training/toyworld/export.py --vae runs/vae.pt --text runs/text.pt --dit runs/dit.pt

Float16 halves the file; `read_toyworld` computes in float32.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from turboserve.experiments.toyworld.scenery import SIZE
from turboserve.worker.model.toy_picture import PIXELS_PER_LATENT
from turboserve.worker.model.toyworld import WEIGHTS, read_toyworld

LIMIT_BYTES = 14_000_000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vae", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--dit", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    args = parser.parse_args()
    vae, text, dit = (torch.load(path, weights_only=False) for path in (args.vae, args.text, args.dit))
    parts = {"transformer": dit["weights"], "vae": vae["scaled"], "text": text["weights"]}
    # The normalization of the latents keeps its full precision: it multiplies everything.
    tensors = {
        f"{part}.{name}": value.contiguous() if "latent_" in name else value.half().contiguous()
        for part, state in parts.items()
        for name, value in state.items()
    }
    config = {
        "name": "toyworld",
        "transformer": {**json.loads(dit["config"]), "pixels_per_latent": PIXELS_PER_LATENT},
        "vae": vae["config"],
        "vocabulary": list(text["vocabulary"]),
        "pixels": SIZE,
        "provenance": {
            "transformer": dit["provenance"],
            "vae": [vae["provenance"], *vae.get("tuned", [])],
            "text": text["provenance"],
        },
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, args.out, {"config": json.dumps(config)})
    size = args.out.stat().st_size
    if size > LIMIT_BYTES:
        raise SystemExit(f"{args.out}: {size} bytes exceed the limit of {LIMIT_BYTES}")
    print(f"{args.out}: {size} bytes, {read_toyworld(args.out).parameters} parameters")


if __name__ == "__main__":
    main()
