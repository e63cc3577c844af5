"""Train the decoder further for a fixed encoder, so that the transformer's latents stay the same.

    python training/toyworld/tune_decoder.py --vae runs/vae.pt --out runs/vae_tuned.pt --minutes 15

The clips are as in sessions, with shapes on the lattice, and the latents have as much noise as the
transformer has errors. New residual blocks at 16×16 begin as the identity.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
import train_vae
from common import MovingAverage, commit, contact_sheet, warmup_cosine, write_png
from parallel import average_gradients, join, spawn
from torch import Tensor, nn

from turboserve.experiments.toyworld import world
from turboserve.worker.model.toy_vae import ToyVae

LARGEST_NOISE = 0.25
OFF_LATTICE = 0.03


def widen(saved: dict[str, Tensor], config: dict[str, int]) -> ToyVae:
    """Return the VAE with weights `saved`; decoder blocks missing there pass their input on."""
    vae = ToyVae(**config)
    state = vae.state_dict()
    for name in state.keys() - saved.keys():
        if name.endswith(("second.weight", "second.bias")):
            state[name] = torch.zeros_like(state[name])
    vae.load_state_dict(state | saved)
    return vae


def loss_of(made: Tensor, real: Tensor) -> Tensor:
    """Return the absolute plus squared error; pixels of shapes weigh five times as much."""
    error = made - real
    plain = real.flatten(3).median(-1, keepdim=True).values.unsqueeze(-1)
    drawn = ((real - plain).abs().amax(2, keepdim=True) > 0.1).float()
    weight = 1.0 + 4.0 * drawn
    return (weight * (error.abs() + 2.0 * error.square())).mean()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vae", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--batch", type=int, default=8, help="clips of 17 frames")
    parser.add_argument("--fine", type=int, default=4)
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
    config = {**saved["config"], "fine": args.fine}
    vae = widen(saved["scaled"], config).to(memory_format=torch.channels_last)
    for name, parameter in vae.named_parameters():
        parameter.requires_grad_(name.startswith("decoder"))
    trained: list[nn.Parameter] = [p for p in vae.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=args.rate, betas=(0.9, 0.99), weight_decay=1e-4)
    average = MovingAverage(vae, 0.99)
    torch.manual_seed(args.seed + 1000 * rank)

    def save() -> None:
        shown = ToyVae(**config)
        shown.load_state_dict(average.values)
        clips = train_vae.draw_clips(random.Random(2), 6)
        with torch.no_grad():
            made, _ = shown.decode(shown.encode(clips))
        error = made - clips
        print(
            f"steps {steps} held l1 {error.abs().mean().item():.5f} "
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
        clips = train_vae.draw_clips(rng, args.batch // args.processes)
        with torch.no_grad():
            latents = vae.encode(clips)
            scale = LARGEST_NOISE * torch.rand(len(latents), 1, 1, 1, 1)
            latents = latents + scale * torch.randn_like(latents)
        loss = loss_of(vae.decode(latents)[0], clips)
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
