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
from sizes import LATENTS, SIZES

from turboserve.worker.model.toy_vae import ToyVae
from turboserve.worker.model.toyworld import read_toyworld

LIMIT_BYTES = 14_000_000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vae", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--dit", type=Path, required=True)
    parser.add_argument("--model", choices=SIZES, default="toyworld")
    parser.add_argument("--out", type=Path, default=None, help="by default the file that ships")
    args = parser.parse_args()
    out: Path = args.out or SIZES[args.model].weights
    vae, text, dit = (torch.load(path, weights_only=False) for path in (args.vae, args.text, args.dit))
    parts = {"transformer": dit["weights"], "vae": vae["scaled"], "text": text["weights"]}
    # The normalization of the latents keeps its full precision: it multiplies everything.
    tensors = {
        f"{part}.{name}": value.contiguous() if "latent_" in name else value.half().contiguous()
        for part, state in parts.items()
        for name, value in state.items()
    }
    pixels = ToyVae(**vae["config"]).pixels_per_latent
    config = {
        "name": args.model,
        "transformer": {**json.loads(dit["config"]), "pixels_per_latent": pixels},
        "vae": vae["config"],
        "vocabulary": list(text["vocabulary"]),
        "pixels": LATENTS * pixels,
        "provenance": {
            "transformer": dit["provenance"],
            "vae": [vae["provenance"], *vae.get("tuned", [])],
            "text": text["provenance"],
        },
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out, {"config": json.dumps(config)})
    size = out.stat().st_size
    if size > LIMIT_BYTES:
        raise SystemExit(f"{out}: {size} bytes exceed the limit of {LIMIT_BYTES}")
    print(f"{out}: {size} bytes, {read_toyworld(out).parameters} parameters")


if __name__ == "__main__":
    main()
