"""Train the transformer of toyworld: flow matching with teacher forcing. Continues from OUT if it exists.

    python training/toyworld/train_dit.py --vae runs/vae.pt --text runs/text.pt --out runs/dit.pt --minutes 80

Every sequence holds clean and noisy copies of a session's chunks (memory.py). The clean ones get a little
noise, because generated context has errors. Most noise levels are those of the four sampling steps. The sink
is positioned just before the rolling frames (as long sessions are served) or where it was, up to 1,000 frames
away.

Each of `--processes` computes on one core with its own clips, and gradients are averaged. On busy cores that
is far faster than threads, which wait for each other in every operation.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
from batches import EARLY, PAIRS_EARLY, PAIRS_LATE, Batches, losses
from common import MovingAverage, commit, contact_sheet, warmup_hold_fall, write_png
from muon import Muon
from parallel import average_gradients, join, spawn
from rollout import Sampler

from data import ClipPool
from turboserve.experiments.toyworld import world
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.toy_text import ToyText
from turboserve.worker.model.toy_vae import ToyVae
from turboserve.worker.model.transformer import CausalWanTransformer

FFN_DIM = 512


def toy_config(dim: int, layers: int) -> ModelConfig:
    """Return the configuration of toyworld's transformer."""
    return ModelConfig(
        dim=dim,
        ffn_dim=FFN_DIM,
        num_heads=dim // 32,
        num_layers=layers,
        text_dim=128,
        text_len=8,
        latent_height=8,
        latent_width=8,
        local_attn_size=9,
        sink_size=3,
        rotation="window",
        learned_positions=True,
    )


def show(model: CausalWanTransformer, text: ToyText, vae: ToyVae, path: Path) -> None:
    """Write a picture of six sessions: three chunks, a prompt switch, two more."""
    before = [
        "a red circle moving left",
        "a green triangle moving right on white",
        "a blue square moving up",
        "a yellow circle moving in circles on navy",
        "a red circle moving left and a blue square moving up on gray",
        "a pink square standing still and a cyan triangle moving down",
    ]
    after = [
        "a blue square moving up",
        "an orange triangle moving down on white",
        "a blue square moving in circles",
        "a yellow circle and a purple square moving right on white",
        "a green triangle moving right on black",
        "a red circle moving up and a yellow circle moving left",
    ]
    sampler = Sampler(model, model.config)
    sessions = sampler.open(text.encode(before).clone(), 7)
    for chunk in range(5):
        if chunk == 3:
            sampler.switch(sessions, text.encode(after).clone())
        sampler.step(sessions)
    with torch.no_grad():
        frames, _ = vae.decode(torch.cat(sessions.latents, 1))
    write_png(path, contact_sheet(world.to_uint8(frames[:, ::4]), 1))


def load_parts(vae_path: Path, text_path: Path) -> tuple[ToyVae, ToyText]:
    saved = torch.load(vae_path, weights_only=False)
    vae = ToyVae(**saved["config"])
    vae.load_state_dict(saved["scaled"])
    words = torch.load(text_path, weights_only=False)
    text = ToyText(words["vocabulary"])
    text.load_state_dict(words["weights"])
    return vae.eval().requires_grad_(False), text.eval().requires_grad_(False)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vae", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=80.0)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rate", type=float, default=2e-3, help="AdamW, of embeddings, norms and the head")
    parser.add_argument("--muon-rate", type=float, default=0.02)
    parser.add_argument("--pool", type=int, default=1500)
    parser.add_argument("--refresh", type=int, default=1, help="clips that each process replaces each step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--stop-file", type=Path, default=None, help="save and stop when this file appears")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    spawn(train, args, args.processes)


def train(rank: int, args: argparse.Namespace) -> None:
    """Train in process `rank`; process 0 keeps time, averages weights and saves."""
    join(rank, args.processes)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed + 1000 * rank)
    vae, text = load_parts(args.vae, args.text)
    config = toy_config(args.dim, args.layers)
    model = CausalWanTransformer(config)
    if rank == 0:
        print("parameters", sum(p.numel() for p in model.parameters()), flush=True)
    inner = [p for block in model.blocks for p in block.parameters() if p.ndim == 2]
    chosen = {id(p) for p in inner}
    outer = [p for p in model.parameters() if id(p) not in chosen]
    optimisers = (
        Muon(inner, args.muon_rate),
        torch.optim.AdamW(outer, lr=args.rate, betas=(0.9, 0.98), weight_decay=0.0),
    )
    rates = (args.muon_rate, args.rate)
    average = MovingAverage(model, 0.99)
    steps, spent = 0, 0.0
    if args.out.exists():
        saved = torch.load(args.out, weights_only=False)
        model.load_state_dict(saved["live"])
        # Weights unpacked from the shipped file come without moments.
        for optimiser, state in zip(
            optimisers, saved["optimisers"] or (), strict=saved["optimisers"] is not None
        ):
            optimiser.load_state_dict(state)
        average.values, average.updates = saved["weights"], saved["steps"]
        steps, spent = saved["steps"], saved["seconds"]
        rng.seed(args.seed + steps + 1000 * rank)
    torch.manual_seed(args.seed + steps + 1000 * rank)
    share = args.batch // args.processes
    progress = spent / (args.minutes * 60)
    pair = PAIRS_EARLY if progress < EARLY else PAIRS_LATE
    pool = ClipPool(vae, rng, args.pool // args.processes, pair)
    batches = Batches(pool, text, config, rng)

    def save() -> None:
        torch.save(
            {
                "weights": average.values,
                "live": model.state_dict(),
                "config": config.to_json(),
                "optimisers": [optimiser.state_dict() for optimiser in optimisers],
                "steps": steps,
                "seconds": spent,
                "provenance": {
                    "script": "training/toyworld/train_dit.py",
                    "commit": commit(),
                    "seed": args.seed,
                    "steps": steps,
                    "batch": args.batch,
                    "wall_minutes": round(spent / 60, 1),
                },
            },
            args.out.with_suffix(".tmp"),
        )
        args.out.with_suffix(".tmp").rename(args.out)

    begun, last_save, last_show = time.monotonic() - spent, time.monotonic(), time.monotonic()
    recent = torch.zeros(2, 3, 2)
    stopped = 0.0
    while not stopped:
        pool.pair = PAIRS_EARLY if progress < EARLY else PAIRS_LATE
        for optimiser, rate in zip(optimisers, rates, strict=True):
            for group in optimiser.param_groups:
                group["lr"] = rate * warmup_hold_fall(progress)
        batch = batches.draw(share)
        each = losses(model, batch)
        for optimiser in optimisers:
            optimiser.zero_grad(set_to_none=True)
        each.mean().backward()
        spent = time.monotonic() - begun
        over = spent > args.minutes * 60 or (args.stop_file is not None and args.stop_file.exists())
        progress, stopped = average_gradients([*inner, *outer], [spent / (args.minutes * 60), float(over)])
        torch.nn.utils.clip_grad_norm_(outer, 1.0)
        for optimiser in optimisers:
            optimiser.step()
        pool.refresh(args.refresh)
        steps += 1
        if rank:
            continue
        average.update(model)
        for row, columns in enumerate((slice(0, 1), slice(1, 4))):
            sigma, clean = batch["sigma"][:, columns], (each.detach() * batch["sigma"].square())[:, columns]
            for i, (low, high) in enumerate(((0.99, 2.0), (0.8, 0.99), (0.0, 0.8))):
                inside = (sigma >= low) & (sigma < high)
                recent[row, i] += torch.tensor([clean[inside].sum(), inside.sum()])
        if steps % 25 == 0:
            mean = recent[..., 0] / recent[..., 1].clamp(min=1)
            print(
                f"steps {steps} minutes {spent / 60:.2f} loss {each.mean().item():.4f} x0 error: first chunk",
                *(f"{v:.4f}" for v in mean[0].tolist()),
                "later",
                *(f"{v:.4f}" for v in mean[1].tolist()),
                flush=True,
            )
            recent.zero_()
        if time.monotonic() - last_save > 120:
            save()
            last_save = time.monotonic()
        if time.monotonic() - last_show > 300:
            shown = CausalWanTransformer(config)
            shown.load_state_dict(average.values)
            show(shown, text, vae, args.out.with_suffix(".png"))
            last_show = time.monotonic()
    if rank == 0:
        save()


if __name__ == "__main__":
    main()
