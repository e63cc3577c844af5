"""Teach the shipped transformer steering and chunks of one latent frame, in minutes on one GPU.

    python training/toyworld/train_steering.py --out runs --seconds 200

Begins with toyworld's weights (or `--weights`), or goes on with those in `--out` (`--go-on`). A transformer
of another size (`--model`, see `sizes.py`) begins anew. Half of each batch has chunks of three latent frames,
the other half chunks of one (`sequences.py`). Processes draw plans of clips; the device renders, encodes and
trains. Text encoder and VAE stay as they are, except for the nine tokens of the directions, which are trained
with the transformer.

Writes dit.pt and text.pt for `export.py`, live.pt to go on from, and trials.json, whose results it prints.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from pathlib import Path
from typing import Any

import torch
from common import commit, warmup_hold_fall
from latents import Pool, Supply
from muon import Muon
from sequences import Batch, Sequences, squared_errors
from sizes import SIZES, transformer_of
from torch import Tensor, nn
from trials import Mapper, Trials, run_trials

from turboserve.worker.model.toy_vae import ToyVae
from turboserve.worker.model.toyworld import WEIGHTS, read_toyworld
from turboserve.worker.model.transformer import CausalWanTransformer

BANDS = ((0.99, 2.0), (0.8, 0.99), (0.0, 0.8))


class Trained(nn.Module):
    """What is trained: the transformer and the tokens of the directions."""

    def __init__(self, transformer: CausalWanTransformer, steering: Tensor) -> None:
        super().__init__()
        self.transformer = transformer
        self.steering = nn.Parameter(steering.clone())


class Trainer:
    """The networks on their device, with optimizers and averaged weights."""

    def __init__(self, trained: Trained, device: torch.device, args: argparse.Namespace) -> None:
        self.trained, self.device = trained, device
        self.rates = (args.muon_rate, args.rate)
        inner = [p for block in trained.transformer.blocks for p in block.parameters() if p.ndim == 2]
        chosen = {id(p) for p in inner}
        self.outer = [p for p in trained.parameters() if id(p) not in chosen]
        self.optimisers: tuple[torch.optim.Optimizer, ...] = (
            Muon(inner, args.muon_rate),
            torch.optim.AdamW(self.outer, lr=args.rate, betas=(0.9, 0.98), weight_decay=0.0),
        )
        self.values = list(trained.parameters())
        self.average = [value.detach().clone() for value in self.values]
        self.decay, self.updates = args.decay, 0
        self.half = False
        self.recent = torch.zeros(2, len(BANDS), 2, device=device)

    def errors(self, batch: Batch) -> Tensor:
        """Return the squared error per frame."""
        cuda = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            return squared_errors(
                self.trained.transformer,
                self.trained.steering,
                batch,
                torch.bfloat16 if cuda else torch.float32,
            )

    def step(self, batch: Batch, progress: float) -> None:
        """Train on one batch."""
        factor = warmup_hold_fall(progress, warmup=0.03, fall=0.4, floor=0.01)
        for optimiser, rate in zip(self.optimisers, self.rates, strict=True):
            for group in optimiser.param_groups:
                group["lr"] = rate * factor
            optimiser.zero_grad(set_to_none=True)
        errors, weight = self.errors(batch), batch["weight"]
        # Sequences with few noisy frames weigh as much as others.
        (errors * weight / weight.sum(1, keepdim=True)).sum(1).mean().backward()
        torch.nn.utils.clip_grad_norm_(self.outer, 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
        self.updates += 1
        decay = min(self.decay, self.updates / (self.updates + 10))
        with torch.no_grad():
            torch._foreach_lerp_(self.average, self.values, 1.0 - decay)
            self._note(errors.detach(), batch)

    def _note(self, errors: Tensor, batch: Batch) -> None:
        sigma = batch["sigma"]
        clean = errors * sigma.square()
        for kind, rows in enumerate(errors.split(len(errors) // 2)):
            part = slice(kind * len(rows), (kind + 1) * len(rows))
            for band, (low, high) in enumerate(BANDS):
                inside = (sigma[part] >= low) & (sigma[part] < high) & (batch["weight"][part] > 0)
                self.recent[kind, band, 0] += (clean[part] * inside).sum()
                self.recent[kind, band, 1] += inside.sum()

    def report(self) -> str:
        """Return the errors of the estimated clean latents since the last call."""
        mean = (self.recent[..., 0] / self.recent[..., 1].clamp(min=1)).tolist()
        self.recent.zero_()
        return " ".join(
            f"{name} " + " ".join(f"{v:.4f}" for v in row)
            for name, row in zip(("three", "one"), mean, strict=True)
        )

    def choose_precision(self, batch: Batch, wanted: str) -> str:
        """Take `wanted`, or the faster of bfloat16 and float32 with TF32 products, and prefer what works."""
        if self.device.type != "cuda":
            return "float32"
        if wanted != "faster":
            self.half = wanted == "bfloat16"
            return wanted
        found: dict[bool, float] = {}
        for half in (False, True):
            self.half = half
            try:
                for repeat in range(6):
                    if repeat == 3:
                        torch.cuda.synchronize()
                        begun = time.monotonic()
                    (self.errors(batch) * batch["weight"]).mean().backward()
                torch.cuda.synchronize()
                found[half] = time.monotonic() - begun
            except RuntimeError as error:
                print(f"half={half}: {error!r}", flush=True)
        self.trained.zero_grad(set_to_none=True)
        self.half = min(found, key=lambda half: found[half])
        print("milliseconds", {half: round(1000 * s / 3, 1) for half, s in found.items()}, flush=True)
        return "bfloat16" if self.half else "float32 with TF32"

    def averaged(self) -> dict[str, Tensor]:
        """Return the averaged values by name, on the CPU."""
        names = [name for name, _ in self.trained.named_parameters()]
        return {name: value.detach().cpu().clone() for name, value in zip(names, self.average, strict=True)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SIZES, default="toyworld")
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="toyworld's, to begin with")
    parser.add_argument("--vae", type=Path, default=None, help="a tuned decoder, for the trials")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--go-on", type=Path, default=None, help="folder with dit.pt and live.pt to resume")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--precision", choices=("faster", "bfloat16", "float32"), default="faster", help="on a GPU"
    )
    parser.add_argument("--seconds", type=float, default=200.0, help="training, without start and trials")
    parser.add_argument("--steps", type=int, default=None, help="stop after this many, for a smoke test")
    parser.add_argument("--batch", type=int, default=192, help="sequences, half of each kind")
    parser.add_argument("--rate", type=float, default=1.5e-3, help="AdamW, of embeddings, norms and the head")
    parser.add_argument("--muon-rate", type=float, default=0.015)
    parser.add_argument("--decay", type=float, default=0.996)
    parser.add_argument("--pool", type=int, default=12288, help="clips of each kind")
    parser.add_argument("--fill", type=int, default=4096, help="clips of each kind before the first step")
    parser.add_argument("--processes", type=int, default=6, help="that draw plans of each kind")
    parser.add_argument("--save-seconds", type=float, default=30.0)
    parser.add_argument("--trial-sessions", type=int, default=200)
    parser.add_argument("--long-chunks", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    begun = time.monotonic()
    device = torch.device(args.device)
    # Threads do not outlive a fork either.
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    args.out.mkdir(parents=True, exist_ok=True)
    world = read_toyworld(args.weights)
    transformer = transformer_of(SIZES[args.model], world)
    before = world.details["provenance"]["transformer"] if transformer is world.transformer else None
    steering, steps, spent = world.text.steering.detach(), 0, 0.0
    if args.go_on is not None:
        live = torch.load(args.go_on / "live.pt", weights_only=False)
        transformer.load_state_dict(live["transformer"])
        steering, steps, spent = live["steering"], live["steps"], live["seconds"]
        before = live["before"]
    # Processes begin before the device does, because a device does not outlive a fork.
    supplies = [Supply(one, args.seed + steps + one, world.text, args.processes) for one in (False, True)]
    judges = multiprocessing.get_context("fork").Pool(2 * args.processes) if args.processes else None
    vae, text = world.vae.to(device), world.text.to(device)
    trained = Trained(transformer.requires_grad_(True), steering).to(device)
    trainer = Trainer(trained, device, args)
    pools = [Pool(supply, vae, text, args.pool, device) for supply in supplies]
    for pool in pools:
        pool.fill(args.fill)
    sequences = Sequences(trained.transformer.config, device, args.seed + steps)

    def draw() -> Batch:
        clips = [pool.draw(args.batch // 2, sequences.generator) for pool in pools]
        three, one = sequences.of_three(clips[0]), sequences.of_one(clips[1])
        return {name: torch.cat((three[name], one[name])) for name in three}

    precision = trainer.choose_precision(draw(), args.precision)
    print(f"ready after {time.monotonic() - begun:.1f} s, {precision}", flush=True)
    started = last_save = last_print = time.monotonic()
    first_step, steps_before, spent_before = steps, steps, spent

    def save() -> None:
        values = trainer.averaged()
        own = {name.removeprefix("transformer."): v for name, v in values.items() if name != "steering"}
        made = {
            "script": "training/toyworld/train_steering.py",
            "commit": commit(),
            "seed": args.seed,
            "steps": steps,
            "batch": args.batch,
            "wall_minutes": round(spent / 60, 2),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        }
        if before is not None:
            made["before"] = before
        config = trained.transformer.config.to_json()
        _store({"weights": own, "config": config, "provenance": made}, args.out / "dit.pt")
        words = {name: value.cpu() for name, value in text.state_dict().items()}
        words["steering"] = values["steering"]
        origin = {
            "weights": words,
            "vocabulary": text.vocabulary,
            "provenance": world.details["provenance"]["text"],
        }
        _store(origin, args.out / "text.pt")
        live = {name: value.cpu() for name, value in trained.transformer.state_dict().items()}
        position = {"steps": steps, "seconds": spent, "before": before}
        _store(
            {"transformer": live, "steering": trained.steering.detach().cpu(), **position},
            args.out / "live.pt",
        )

    while True:
        progress = (time.monotonic() - started) / args.seconds
        if args.steps is not None:
            progress = max(progress, (steps - first_step) / args.steps)
        if progress >= 1.0:
            break
        pools[steps % 2].refresh()
        trainer.step(draw(), progress)
        steps += 1
        now = time.monotonic()
        spent = spent_before + now - started
        if now - last_print > 5 or (steps - steps_before) in (1, 20):
            print(
                f"steps {steps} s {spent:.1f} x0 error {trainer.report()} "
                f"fresh {[pool.refreshed for pool in pools]}",
                flush=True,
            )
            last_print = time.monotonic()
        if now - last_save > args.save_seconds:
            save()
            last_save = time.monotonic()
    if device.type == "cuda":
        torch.cuda.synchronize()
    save()
    for supply in supplies:
        supply.stop()
    with torch.no_grad():
        for value, mean in zip(trainer.values, trainer.average, strict=True):
            value.copy_(mean)
        text.steering.copy_(trained.steering)
    print(f"trained: {steps} steps, {time.monotonic() - begun:.1f} s since the start", flush=True)
    mapper: Mapper = (lambda f, tasks: list(map(f, tasks))) if judges is None else judges.map
    trials = Trials(
        trained.transformer.eval().requires_grad_(False), _decoder(args.vae, vae, device), text, mapper
    )
    run_trials(trials, args.trial_sessions, args.long_chunks, args.out / "trials.json")
    print(f"{time.monotonic() - begun:.1f} s since the start", flush=True)


def _decoder(path: Path | None, vae: ToyVae, device: torch.device) -> ToyVae:
    if path is None or not path.exists():
        return vae
    saved = torch.load(path, weights_only=False)
    tuned = ToyVae(**saved["config"])
    tuned.load_state_dict(saved["scaled"])
    return tuned.to(device).eval().requires_grad_(False)


def _store(value: dict[str, Any], path: Path) -> None:
    torch.save(value, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)


if __name__ == "__main__":
    main()
