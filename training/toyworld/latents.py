"""Plans as tensors on the device: frames, latents, and a pool of clips to draw sequences from."""

from __future__ import annotations

import multiprocessing
import queue
import random
from collections.abc import Callable

import torch
from plans import SINK_GROUPS, Arrays, draw_of_one, draw_of_three, stack
from torch import Tensor

from turboserve.experiments.toyworld import scenery, world
from turboserve.worker.model.toy_text import ToyText
from turboserve.worker.model.toy_vae import ToyVae

Clips = dict[str, Tensor]
DRAWN = 64
"""Plans that a process draws at once."""


class Painter:
    """Draws groups of frames on a device, as `world.render_batch` does for one scene at a time."""

    def __init__(self, device: torch.device) -> None:
        def table(colours: dict[str, tuple[int, int, int]]) -> Tensor:
            return torch.tensor(list(colours.values()), device=device) / 127.5 - 1.0

        self.backgrounds, self.colours = table(world.BACKGROUNDS), table(world.COLOURS)
        self.landscapes = scenery.landscapes().to(device)

    def figures(self, attributes: Tensor, places: Tensor, fine: int = 1) -> list[tuple[Tensor, Tensor]]:
        """Return each figure's paint [n, 3] and coverage [n, frames, 64·fine, 64·fine], the second on top.

        attributes: long [n, 5]; places: [n, frames, 2, 2] in pixels of the world.
        """
        found = []
        for index in range(2):
            shape, colour = attributes[:, 1 + 2 * index], attributes[:, 2 + 2 * index]
            count, frames = places.shape[:2]
            at = places[:, :, index].reshape(-1, 2)
            dx, dy = world.offsets(at, fine)
            kinds = torch.stack([world.distance(name, dx, dy) for name in world.SHAPES])
            row = shape.clamp(min=0).repeat_interleave(frames)
            distance = kinds[row, torch.arange(len(row), device=row.device)]
            alpha = (0.5 - distance * fine).clamp(0.0, 1.0).view(count, frames, *distance.shape[1:])
            alpha = alpha * (shape >= 0).view(-1, 1, 1, 1)
            found.append((self.colours[colour.clamp(min=0)], alpha))
        return found

    def plain(self, attributes: Tensor, places: Tensor) -> Tensor:
        """Draw frames as the encoder sees them: float [n, frames, 3, 64, 64] in -1..1."""
        count, frames = places.shape[:2]
        behind = self.backgrounds[attributes[:, 0]].view(count, 1, 3, 1, 1)
        picture = behind.expand(count, frames, 3, world.PIXELS, world.PIXELS)
        for paint, alpha in self.figures(attributes, places):
            picture = torch.lerp(
                picture, paint.view(-1, 1, 3, 1, 1).expand_as(picture), alpha.unsqueeze(2).expand_as(picture)
            )
        return picture

    def fine(self, attributes: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Draw frames as viewers see them, and the same without figures: [n, frames, 3, 128, 128] each.

        See `scenery.draw_batch`.
        """
        count, frames = places.shape[:2]
        empty = self.landscapes[attributes[:, 0]].unsqueeze(1).expand(-1, frames, -1, -1, -1)
        picture = empty
        for index, (paint, alpha) in enumerate(
            self.figures(attributes, places, scenery.SIZE // world.PIXELS)
        ):
            shades = scenery.light(places[:, :, index].reshape(-1, 2)).unflatten(0, (count, frames))
            lit = ((paint + 1.0) * 127.5).view(count, 1, 3, 1, 1) * shades.unsqueeze(2)
            lit = lit.clamp(0, 255) / 127.5 - 1.0
            picture = torch.lerp(picture, lit, alpha.unsqueeze(2).expand_as(lit))
        return picture, empty


def encode(vae: ToyVae, painter: Painter, attributes: Tensor, places: Tensor) -> Tensor:
    """Encode groups of frames: attributes [n, g, 5], places [n, g, 4, 2, 2] → latents [n, g, 16, 8, 8]."""
    count, groups = attributes.shape[:2]
    frames = painter.plain(attributes.flatten(0, 1), places.flatten(0, 1))
    return vae.encode_groups(frames.unflatten(0, (count, groups)))


def draw_plans(one: bool, seed: int, text: ToyText, count: int) -> Arrays:
    """Draw `count` plans, for chunks of one latent frame or of three."""
    rng = random.Random(seed)
    draw = draw_of_one if one else draw_of_three
    return stack([draw(rng) for _ in range(count)], text, rng)


def _supply(one: bool, seed: int, text: ToyText, plans: multiprocessing.Queue[Arrays]) -> None:
    torch.set_num_threads(1)
    while True:
        plans.put(draw_plans(one, seed, text, DRAWN))
        seed += 1


class Supply:
    """Processes that draw plans of one kind; without processes, each call draws."""

    def __init__(self, one: bool, seed: int, text: ToyText, processes: int) -> None:
        self._draw: Callable[[], Arrays] = self._drawn
        self._one, self._seed, self._text, self._drawn_count = one, seed * 1_000_003, text, 0
        # The processes begin before the device does, because a device does not outlive a fork.
        context = multiprocessing.get_context("fork")
        self._plans: multiprocessing.Queue[Arrays] = context.Queue(64)
        self._processes = [
            context.Process(
                target=_supply,
                args=(one, self._seed + (row + 1) * 10_000_000, text, self._plans),
                daemon=True,
            )
            for row in range(processes)
        ]
        for process in self._processes:
            process.start()

    def next(self, wait: bool) -> Arrays | None:
        """Return further plans, or None if there are none yet and the call does not wait."""
        if not self._processes:
            return self._draw() if wait else None
        try:
            return self._plans.get(timeout=60) if wait else self._plans.get_nowait()
        except queue.Empty:
            return None

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()

    def _drawn(self) -> Arrays:
        self._seed += 1
        return draw_plans(self._one, self._seed, self._text, DRAWN)


class Pool:
    """Encoded clips on the device, of which the oldest are replaced."""

    def __init__(self, supply: Supply, vae: ToyVae, text: ToyText, size: int, device: torch.device) -> None:
        self._supply, self._vae, self._text = supply, vae, text
        self._device, self._painter = device, Painter(device)
        self._size, self._next, self.filled = size, 0, 0
        self._clips: Clips = {}
        self.refreshed = 0

    def fill(self, count: int) -> None:
        """Wait until the pool has `count` clips."""
        while self.filled < min(count, self._size):
            self.refresh(wait=True)

    @torch.no_grad()
    def refresh(self, wait: bool = False) -> bool:
        """Replace the oldest clips by new ones, if there are plans."""
        plans = self._supply.next(wait)
        if plans is None:
            if wait:
                raise RuntimeError("no plans within 60 s: the processes that draw them have ended")
            return False
        moved = {name: torch.from_numpy(value).to(self._device) for name, value in plans.items()}
        fresh = self.encoded(moved)
        if not self._clips:
            self._clips = {
                name: torch.zeros(self._size, *value.shape[1:], dtype=value.dtype, device=self._device)
                for name, value in fresh.items()
            }
        count = len(fresh["starts"])
        rows = (torch.arange(count, device=self._device) + self._next) % self._size
        for name, value in fresh.items():
            self._clips[name][rows] = value
        self._next = (self._next + count) % self._size
        self.filled = min(self._size, self.filled + count)
        self.refreshed += count
        return True

    @torch.no_grad()
    def encoded(self, plans: Clips) -> Clips:
        """Encode plans: adds `latents` [n, 15, 16, 8, 8] and `text` [n, 2, 8, 128], both half precision."""
        latents = encode(self._vae, self._painter, plans["attributes"], plans["places"])
        text = self._text(plans["words"].flatten(0, 1)).unflatten(0, (-1, 2))
        kept = {name: plans[name] for name in ("steer", "starts", "change", "fixed")}
        return {**kept, "latents": latents.half(), "text": text.half()}

    def draw(self, count: int, generator: torch.Generator) -> Clips:
        """Draw clips with repetition; clips without fixed positions are rolled over the torus."""
        rows = torch.randint(self.filled, (count,), generator=generator, device=self._device)
        clips = {name: value[rows] for name, value in self._clips.items()}
        main = clips["latents"][:, SINK_GROUPS:]
        size = main.shape[-1]
        shift = torch.randint(size, (2, count), generator=generator, device=self._device)
        shift = shift * ~clips["fixed"]
        axis = torch.arange(size, device=self._device)
        down, across = ((axis - side[:, None]) % size for side in shift)
        rolled = main.gather(3, down[:, None, None, :, None].expand_as(main))
        rolled = rolled.gather(4, across[:, None, None, None, :].expand_as(main))
        clips["sink"], clips["main"] = clips["latents"][:, :SINK_GROUPS].float(), rolled.float()
        return clips
