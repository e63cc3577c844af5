"""Teach the shipped decoder the motions of steering, in a minute on one GPU. The encoder stays as it is.

    python training/toyworld/tune_decoder_steered.py --out runs --seconds 45

As `tune_decoder.py`, with clips from `plans.draw_for_decoder`, drawn and encoded on the device. Begins with
toyworld's weights, also for a decoder of another size (`--model`), whose further parts begin anew. Writes
vae.pt for `export.py` and a picture, vae.png.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import time
from pathlib import Path

import torch
from common import MovingAverage, commit, contact_sheet, warmup_cosine, write_png
from latents import Painter, encode
from plans import Arrays, draw_for_decoder, stack_videos
from sizes import SIZES, at_pixels, vae_config, vae_of
from torch import Tensor
from tune_decoder import LARGEST_NOISE, loss_of

from turboserve.experiments.toyworld import world
from turboserve.worker.model.toy_vae import ToyVae
from turboserve.worker.model.toyworld import WEIGHTS, read_toyworld

GROUPS = 5
HELD_SEED = 987_654_321


def draw(seed: int, count: int) -> Arrays:
    """Draw `count` clips of `GROUPS` groups."""
    rng = random.Random(seed)
    return stack_videos([draw_for_decoder(rng, GROUPS) for _ in range(count)])


def _supply(seed: int, count: int, clips: multiprocessing.Queue[Arrays]) -> None:
    torch.set_num_threads(1)
    while True:
        clips.put(draw(seed, count))
        seed += 1


class Pairs:
    """Clips as latents, and as viewers see them."""

    def __init__(self, vae: ToyVae, device: torch.device) -> None:
        self._vae, self._painter, self._device = vae, Painter(device), device

    @torch.no_grad()
    def of(self, clips: Arrays) -> tuple[Tensor, Tensor, Tensor]:
        """Return latents [n, 5, 16, 8, 8], frames [n, 17, 3, H, W] and the frames without figures.

        H and W are the VAE's, 128 for toyworld.
        """
        attributes, places = (torch.from_numpy(clips[k]).to(self._device) for k in ("attributes", "places"))
        latents = encode(self._vae, self._painter, attributes, places)
        drawn = self._painter.fine(attributes.flatten(0, 1), places.flatten(0, 1))
        sized = (at_pixels(x, self._vae) for x in drawn)
        real, empty = (x.reshape(len(latents), -1, *x.shape[2:])[:, world.GROUP_FRAMES - 1 :] for x in sized)
        return latents, real, empty


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SIZES, default="toyworld")
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="toyworld's, to begin with")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--steps", type=int, default=None, help="stop after this many, for a smoke test")
    parser.add_argument("--batch", type=int, default=48, help="clips of 17 frames")
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--processes", type=int, default=8, help="that draw clips")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    begun = time.monotonic()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device(args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    shipped = read_toyworld(args.weights)
    size = SIZES[args.model]
    config = vae_config(size, shipped)
    context = multiprocessing.get_context("fork")
    clips: multiprocessing.Queue[Arrays] = context.Queue(32)
    processes = [
        context.Process(
            target=_supply, args=(args.seed + (row + 1) * 10_000_000, args.batch, clips), daemon=True
        )
        for row in range(args.processes)
    ]
    for process in processes:
        process.start()
    vae = vae_of(size, shipped).to(device).requires_grad_(False)
    trained = [p for name, p in vae.named_parameters() if name.startswith("decoder")]
    for parameter in trained:
        parameter.requires_grad_(True)
    optimiser = torch.optim.AdamW(trained, lr=args.rate, betas=(0.9, 0.99), weight_decay=1e-4)
    average = MovingAverage(vae, 0.995)
    pairs = Pairs(vae, device)
    held = pairs.of(draw(HELD_SEED, 48))
    shown = ToyVae(**config).to(device).requires_grad_(False)

    def save() -> None:
        shown.load_state_dict(average.values)
        with torch.no_grad():
            made, _ = shown.decode(held[0])
        error = made - held[1]
        print(
            f"steps {steps} s {time.monotonic() - begun:.1f} held loss {loss_of(made, *held[1:]).item():.5f} "
            f"psnr {-10 * error.square().mean().div(4).log10().item():.2f}",
            flush=True,
        )
        both = torch.stack((held[1][:6], made[:6]), 1).flatten(0, 1)[:, ::2]
        write_png(args.out / "vae.png", contact_sheet(world.to_uint8(both).cpu(), 1))
        tuned = {
            "script": "training/toyworld/tune_decoder_steered.py",
            "commit": commit(),
            "seed": args.seed,
            "steps": steps,
            "batch": args.batch,
            "wall_minutes": round((time.monotonic() - begun) / 60, 2),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        }
        first, *others = shipped.details["provenance"]["vae"]
        weights = {name: value.cpu() for name, value in average.values.items()}
        torch.save(
            {
                "scaled": weights,
                "config": config,
                "provenance": first,
                "tuned": [*others, tuned],
            },
            args.out / "vae.pt",
        )

    steps = 0
    save()
    started, progress = time.monotonic(), 0.0
    while progress < 1.0:
        for group in optimiser.param_groups:
            group["lr"] = args.rate * warmup_cosine(progress)
        latents, real, empty = pairs.of(
            clips.get(timeout=60) if processes else draw(args.seed + steps, args.batch)
        )
        scale = LARGEST_NOISE * torch.rand(len(latents), 1, 1, 1, 1, device=device)
        made, _ = vae.decode(latents + scale * torch.randn_like(latents))
        loss = loss_of(made, real, empty)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        average.update(vae)
        steps += 1
        progress = (time.monotonic() - started) / args.seconds
        if args.steps is not None:
            progress = max(progress, steps / args.steps)
        if steps % 200 == 0:
            print(f"steps {steps} s {time.monotonic() - begun:.1f} loss {loss.item():.5f}", flush=True)
    for process in processes:
        process.kill()
    save()


if __name__ == "__main__":
    main()
