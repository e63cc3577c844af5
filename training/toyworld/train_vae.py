"""Train the VAE of toyworld. Continues from OUT if it exists.

    python training/toyworld/train_vae.py --out runs/vae.pt --minutes 12

OUT (weights and provenance) is written every minute.

The loss is reconstruction (absolute plus squared error) from latents with noise added, so that the latent
space is smooth and small errors of the transformer do not show. A weak pull to zero keeps the noise
meaningful. At the end the latents are normalized to zero mean and unit deviation per channel.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
from common import MovingAverage, commit, contact_sheet, keep_memory, warmup_cosine, write_png
from torch import Tensor

from turboserve.experiments.toyworld import world
from turboserve.experiments.toyworld.world import random_scene
from turboserve.worker.model.toy_vae import ToyVae

LATENT_NOISE = 0.2
PULL = 3e-4
OFF_LATTICE = 0.3


def draw_clips(rng: random.Random, count: int) -> Tensor:
    """Draw clips of 17 frames [count, 17, 3, 64, 64].

    Half of them change to another scene after the ninth frame.
    """
    return torch.cat([world.render_batch(scenes, places) for scenes, places in draw_scenes(rng, count)], 1)


def draw_scenes(rng: random.Random, count: int) -> list[tuple[list[world.Scene], Tensor]]:
    """Draw the scenes and places of `draw_clips`: of the first 9 frames, and of the other 8."""
    parts: list[tuple[list[world.Scene], list[Tensor]]] = [([], []), ([], [])]
    for _ in range(count):
        old = random_scene(rng, want_held_out=None)
        bodies = tuple(
            world.Body(8.0 * rng.randrange(8), 8.0 * rng.randrange(8), rng.choice((0.0, 0.5)))
            for _ in old.figures
        )
        if rng.random() < OFF_LATTICE:
            bodies = tuple(
                world.Body(rng.random() * 64, rng.random() * 64, rng.random()) for _ in old.figures
            )
        new = random_scene(rng, want_held_out=None) if rng.random() < 0.5 else old
        after = world.switch(old, new, bodies)
        pieces = ((old, bodies, range(-8, 1)), (new, after, range(1, 9)))
        for (scenes, places), (scene, at, frames) in zip(parts, pieces, strict=True):
            scenes.append(scene)
            path = world.centres(scene, at, frames)
            places.append(path.expand(2, -1, -1) if len(path) == 1 else path)
    return [(scenes, torch.stack(places)) for scenes, places in parts]


def reconstruction_loss(made: Tensor, real: Tensor) -> Tensor:
    error = made - real
    return error.abs().mean() + 2.0 * error.square().mean()


@torch.no_grad()
def set_latent_scale(vae: ToyVae, rng: random.Random) -> None:
    """Measure mean and deviation of the raw latents and store them in the module."""
    vae.latent_mean.zero_()
    vae.latent_std.fill_(1.0)
    latents = torch.cat([vae.encode(draw_clips(rng, 16)) for _ in range(20)])
    vae.latent_mean.copy_(latents.mean((0, 1, 3, 4)))
    vae.latent_std.copy_(latents.std((0, 1, 3, 4)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--batch", type=int, default=8, help="clips of 17 frames")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    keep_memory()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    vae = ToyVae(args.width, args.depth).to(memory_format=torch.channels_last)
    optimiser = torch.optim.AdamW(vae.parameters(), lr=args.rate, betas=(0.9, 0.99), weight_decay=1e-4)
    steps, spent = 0, 0.0
    average = MovingAverage(vae, 0.998)
    if args.out.exists():
        saved = torch.load(args.out, weights_only=False)
        vae.load_state_dict(saved["live"])
        optimiser.load_state_dict(saved["optimiser"])
        average.values, average.updates = saved["weights"], saved["steps"]
        steps, spent = saved["steps"], saved["seconds"]
        rng.seed(args.seed + steps)

    def save(final: bool) -> None:
        shown = ToyVae(args.width, args.depth)
        shown.load_state_dict(average.values)
        set_latent_scale(shown, random.Random(1))
        clips = draw_clips(random.Random(2), 6)
        with torch.no_grad():
            made, _ = shown.decode(shown.encode(clips))
        print(
            f"steps {steps} held l1 {float((made - clips).abs().mean()):.5f} "
            f"psnr {float(-10 * (made - clips).square().mean().div(4).log10()):.2f}",
            flush=True,
        )
        pairs = torch.stack((clips, made), 1).flatten(0, 1)[:, ::2]
        write_png(args.out.with_suffix(".png"), contact_sheet(world.to_uint8(pairs), 1))
        weights = shown.state_dict() if final else average.values
        torch.save(
            {
                "weights": weights,
                "scaled": shown.state_dict(),
                "live": vae.state_dict(),
                "optimiser": optimiser.state_dict(),
                "steps": steps,
                "seconds": spent,
                "config": {"width": args.width, "depth": args.depth},
                "provenance": {
                    "script": "training/toyworld/train_vae.py",
                    "commit": commit(),
                    "seed": args.seed,
                    "steps": steps,
                    "batch": args.batch,
                    "wall_minutes": round(spent / 60, 1),
                },
            },
            args.out,
        )

    begun, last_save = time.monotonic() - spent, time.monotonic()
    while spent < args.minutes * 60:
        factor = warmup_cosine(spent / (args.minutes * 60))
        for group in optimiser.param_groups:
            group["lr"] = args.rate * factor
        clips = draw_clips(rng, args.batch)
        raw = vae.encode(clips)
        made, _ = vae.decode(raw + LATENT_NOISE * torch.randn_like(raw))
        loss = reconstruction_loss(made, clips)
        total = loss + PULL * raw.square().mean()
        optimiser.zero_grad(set_to_none=True)
        total.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimiser.step()
        average.update(vae)
        steps += 1
        spent = time.monotonic() - begun
        if steps % 50 == 0:
            print(
                f"steps {steps} minutes {spent / 60:.2f} loss {loss.item():.5f} "
                f"latent rms {raw.detach().square().mean().sqrt().item():.3f}",
                flush=True,
            )
        if time.monotonic() - last_save > 60:
            save(False)
            last_save = time.monotonic()
    save(True)


if __name__ == "__main__":
    main()
