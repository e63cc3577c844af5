"""Train the decoder that ships: figures at 128×128 before landscapes, for a fixed encoder and its latents.

    python training/toyworld/tune_decoder.py --vae runs/vae.pt --out runs/vae_tuned.pt --minutes 30

The encoder sees plain frames of 64×64, as it was trained. The decoder learns to draw the same scenes with
landscapes and shading (`turboserve.experiments.toyworld.scenery`). The clips are as in sessions, with shapes
on the lattice, and the latents have as much noise as the transformer has errors. New residual blocks at 16×16
begin as the identity. At first only the new last stage learns, then the whole decoder (`--alone`).
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import torch
import train_vae
from common import MovingAverage, commit, contact_sheet, warmup_cosine, write_png
from parallel import average_gradients, join, spawn
from torch import Tensor, nn

from turboserve.experiments.toyworld import scenery, world
from turboserve.worker.model.toy_vae import ToyVae

LARGEST_NOISE = 0.25
OFF_LATTICE = 0.03
PICTURE = {"channels": 48, "frame_channels": 32, "landscapes": len(world.BACKGROUNDS), "size": scenery.SIZE}


def widen(saved: dict[str, Tensor], config: dict[str, Any]) -> ToyVae:
    """Return the VAE with weights `saved`; decoder blocks missing there pass their input on."""
    vae = ToyVae(**config)
    state = vae.state_dict()
    known = {name: value for name, value in saved.items() if name in state}
    for name in state.keys() - known.keys():
        if name.startswith("decoder_fine") and name.endswith(("second.weight", "second.bias")):
            state[name] = torch.zeros_like(state[name])
    state["decoder_out.landscapes"] = scenery.landscapes()
    # Most pixels have no figure.
    opacity = state["decoder_out.out.bias"].view(4, -1)[3]
    opacity.fill_(-2.0)
    vae.load_state_dict(state | known)
    return vae


def loss_of(made: Tensor, real: Tensor, empty: Tensor) -> Tensor:
    """Return the absolute plus squared error; pixels of shapes weigh five times as much.

    `empty`: the frames without figures.
    """
    error = made - real
    drawn = ((real - empty).abs().amax(2, keepdim=True) > 0.02).float()
    weight = 1.0 + 4.0 * drawn
    return (weight * (error.abs() + 2.0 * error.square())).mean()


def draw_pairs(rng: random.Random, count: int, behind: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw clips as the encoder and as viewers see them, and the latter without figures."""
    plain, fine, empty = [], [], []
    for scenes, places in train_vae.draw_scenes(rng, count):
        plain.append(world.render_batch(scenes, places))
        fine.append(scenery.draw_batch(scenes, places, behind))
        empty.append(scenery.without_figures(scenes, places.shape[2], behind))
    return torch.cat(plain, 1), torch.cat(fine, 1), torch.cat(empty, 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vae", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--batch", type=int, default=8, help="clips of 17 frames")
    parser.add_argument("--fine", type=int, default=4)
    parser.add_argument("--alone", type=float, default=0.2, help="share of the time for the last stage alone")
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    spawn(tune, args, args.processes)


def tune(rank: int, args: argparse.Namespace) -> None:
    """Train in process `rank`; process 0 keeps time and saves."""
    join(rank, args.processes)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed + 1000 * rank)
    train_vae.OFF_LATTICE = OFF_LATTICE
    saved = torch.load(args.vae, weights_only=False)
    config = {**saved["config"], "fine": args.fine, "picture": PICTURE}
    vae = widen(saved["scaled"], config)
    behind = scenery.landscapes()
    trained: list[nn.Parameter] = [p for name, p in vae.named_parameters() if name.startswith("decoder")]
    for name, parameter in vae.named_parameters():
        parameter.requires_grad_(name.startswith("decoder_out"))
    optimiser = torch.optim.AdamW(trained, lr=args.rate, betas=(0.9, 0.99), weight_decay=1e-4)
    average = MovingAverage(vae, 0.99)
    torch.manual_seed(args.seed + 1000 * rank)

    def save() -> None:
        shown = ToyVae(**config)
        shown.load_state_dict(average.values)
        plain, clips, empty = draw_pairs(random.Random(2), 6, behind)
        with torch.no_grad():
            made, _ = shown.decode(shown.encode(plain))
        error = made - clips
        print(
            f"steps {steps} held loss {loss_of(made, clips, empty).item():.5f} "
            f"psnr {-10 * error.square().mean().div(4).log10().item():.2f}",
            flush=True,
        )
        pairs = torch.stack((clips, made), 1).flatten(0, 1)[:, ::2]
        write_png(args.out.with_suffix(".png"), contact_sheet(world.to_uint8(pairs), 1))
        tuned = {
            "script": "training/toyworld/tune_decoder.py",
            "commit": commit(),
            "seed": args.seed,
            "steps": steps,
            "batch": args.batch,
            "wall_minutes": round(spent / 60, 1),
        }
        torch.save(
            {
                "scaled": average.values,
                "config": config,
                "provenance": saved["provenance"],
                "tuned": [*saved.get("tuned", []), tuned],
            },
            args.out,
        )

    steps, spent, begun, last = 0, 0.0, time.monotonic(), time.monotonic()
    progress = 0.0
    while progress < 1.0:
        for group in optimiser.param_groups:
            group["lr"] = args.rate * warmup_cosine(progress)
        if progress >= args.alone and not vae.decoder_in.weight.requires_grad:
            for parameter in trained:
                parameter.requires_grad_(True)
        plain, clips, empty = draw_pairs(rng, args.batch // args.processes, behind)
        with torch.no_grad():
            latents = vae.encode(plain)
            scale = LARGEST_NOISE * torch.rand(len(latents), 1, 1, 1, 1)
            latents = latents + scale * torch.randn_like(latents)
        loss = loss_of(vae.decode(latents)[0], clips, empty)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        spent = time.monotonic() - begun
        (progress,) = average_gradients(trained, [spent / (args.minutes * 60)])
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        steps += 1
        if rank:
            continue
        average.update(vae)
        if steps % 50 == 0:
            print(f"steps {steps} minutes {spent / 60:.2f} loss {loss.item():.5f}", flush=True)
        if time.monotonic() - last > 90:
            save()
            last = time.monotonic()
    if rank == 0:
        save()


if __name__ == "__main__":
    main()
