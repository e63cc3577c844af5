"""Sequences of 24 latent frames for both sizes of chunks, and the attention among their frames.

Both kinds attend as the KV window does when serving, with teacher forcing: noisy frames see clean ones.

Chunks of three latent frames, as in `memory.py`: c0 n0 cm cm+1 cm+2 nm+1 nm+2 nm+3, three frames each.

Chunks of one latent frame (a window of 9 frames, the session's first one of them as sink):

    place   0   1   2 … 12        13 … 23
    frame  c0  n0   clean 0 … 10  noisy

The clean frames 0 … 10 are frames a … a + 10 of the session. A noisy place shows one of the frames from the
last change on that has its whole window in the sequence. The frames before a change are recached: they attend
to each other in both directions, under the new condition.
"""

from __future__ import annotations

import math

import torch
from latents import Clips
from plans import FRAME_WINDOW
from torch import Tensor
from torch.nn import functional as F

from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.schedule import Schedule
from turboserve.worker.model.toy_text import STEERED
from turboserve.worker.model.transformer import CausalWanTransformer

FRAMES = 24
CHUNK = 3
CLEAN, NOISY = 11, 11
WINDOW = 9
CONTEXT_NOISE = 0.2
AT_THE_STEPS = 0.85
STEP_SHARES = (0.3, 0.2, 0.2, 0.3)
FARTHEST = 1000
FIRST_WEIGHT = 2.0
"""Weight of a session's first frame where chunks have one, relative to other frames."""

Batch = dict[str, Tensor]


class Sequences:
    """Converts clips on a device to the transformer's inputs and targets.

    A batch has, for each of 24 frames: latents, timesteps, frame_index, shift (frames by which the frame sees
    the sink later than it was), second (whether it reads the last prompt), sink (whether others see it as the
    sink), flow (the target), sigma and weight (0 for clean frames). mask [B, 24, 24] says which frames a
    frame attends to. text [B, 2, 8, 128] and steer [B, 2] are the conditions.
    """

    def __init__(self, config: ModelConfig, device: torch.device, seed: int) -> None:
        self._device = device
        self.generator = torch.Generator(device).manual_seed(seed)
        schedule = Schedule(config)
        self._steps = torch.tensor(schedule.step_sigmas, device=device)
        self._shares = torch.tensor(STEP_SHARES, device=device)
        self._sigmas = schedule.sigmas.to(device)

    def of_three(self, clips: Clips) -> Batch:
        """Build sequences of chunks of three latent frames."""
        sink, main, starts = clips["sink"], clips["main"], clips["starts"]
        count = len(sink)
        chunks = main.unflatten(1, (4, CHUNK))
        clean = torch.cat((sink[:, None], chunks[:, :3]), 1)
        target = torch.cat((sink[:, None], chunks[:, 1:]), 1)
        sigma = self._draw_sigma(count, 4)
        noisy, flow = self._noised(target.flatten(1, 2), sigma.repeat_interleave(CHUNK, 1))
        noisy, flow = noisy.unflatten(1, (4, CHUNK)), flow.unflatten(1, (4, CHUNK))
        clean = self._blurred(clean)
        zero = torch.zeros_like(sigma)

        def arranged(c: Tensor, n: Tensor) -> Tensor:
            return torch.cat((c[:, :1], n[:, :1], c[:, 1:], n[:, 1:]), 1)

        m = torch.where(starts, 0, self._position(count, FARTHEST // CHUNK))
        order = torch.tensor([0, 0, 0, 1, 2, 1, 2, 3], device=self._device)
        chunk = torch.where(torch.arange(8, device=self._device) < 2, 0, m[:, None] + order)
        frame = (chunk[..., None] * CHUNK + torch.arange(CHUNK, device=self._device)).flatten(1)
        blocks = torch.zeros(count, 8, 8, dtype=torch.bool, device=self._device)
        for place in range(8):
            blocks[:, place, place] = True
        blocks[:, 2:, 0] = True
        for place, before in ((3, 2), (4, 3), (5, 2), (6, 3), (7, 4)):
            blocks[:, place, before] = True
        # In the beginning, place 2 repeats the sink, and no place may see both.
        blocks[:, 2, 0] = blocks[:, 3, 2] = blocks[:, 5, 2] = ~starts
        blocks[:, 2, 2] = True
        changed = clips["change"] > 0
        early = changed & (m <= 2)
        recached = self._rand(count) < torch.where(early, 0.9, 0.3)
        second = torch.ones(count, 8, dtype=torch.bool, device=self._device)
        second[:, 0], second[:, 1] = recached, False
        noise_only = arranged(zero, torch.ones_like(sigma))
        sink_places = torch.zeros(count, 8, dtype=torch.bool, device=self._device)
        sink_places[:, 0] = True
        wide = {"second": second, "sink": sink_places, "weight": noise_only, "sigma": arranged(zero, sigma)}
        spread = {name: value.repeat_interleave(CHUNK, 1) for name, value in wide.items()}
        shift = (chunk - 2).clamp(min=0) * CHUNK
        shift[:, :2] = 0
        return {
            **spread,
            "latents": arranged(clean, noisy).flatten(1, 2),
            "flow": arranged(torch.zeros_like(flow), flow).flatten(1, 2),
            "timesteps": spread["sigma"] * 1000,
            "frame_index": frame,
            "shift": shift.repeat_interleave(CHUNK, 1),
            "mask": blocks.repeat_interleave(CHUNK, 1).repeat_interleave(CHUNK, 2),
            "text": clips["text"].float(),
            "steer": clips["steer"],
        }

    def of_one(self, clips: Clips) -> Batch:
        """Build sequences of chunks of one latent frame."""
        sink, main = clips["sink"][:, :1], clips["main"]
        starts, change = clips["starts"], clips["change"]
        count = len(main)
        steps = torch.arange(CLEAN, device=self._device)
        first = torch.where(starts, change.clamp(min=1), change.clamp(min=FRAME_WINDOW - 1))
        shown = first[:, None] + steps % (MAIN_FRAMES - first[:, None])
        target = torch.cat(
            (sink, main.gather(1, shown[:, :, None, None, None].expand(-1, -1, *main.shape[2:]))), 1
        )
        sigma = self._draw_sigma(count, 1 + NOISY)
        noisy, flow = self._noised(target, sigma)
        clean = self._blurred(torch.cat((sink, main[:, :CLEAN]), 1))
        a = torch.where(starts, 0, self._position(count, FARTHEST))
        relative = torch.cat((torch.zeros_like(shown[:, :2]), steps.expand(count, -1), shown), 1)
        own = torch.tensor([True, True] + [False] * (FRAMES - 2), device=self._device)
        frame = torch.where(own, 0, a[:, None] + relative)
        recached = (relative < change[:, None]) & ~own
        recached[:, 2 + CLEAN :] = False
        # The newest frame at the time of a frame's last forward.
        newest = torch.where(recached, change[:, None] - 1, relative)
        shift = torch.where(own, 0, (a[:, None] + newest + 1 - WINDOW).clamp(min=0))
        mask = self._mask(relative, newest, starts, change)
        weight = torch.ones(count, FRAMES, device=self._device)
        weight[:, 0], weight[:, 1], weight[:, 2 : 2 + CLEAN] = 0.0, FIRST_WEIGHT, 0.0
        second = torch.ones(count, FRAMES, dtype=torch.bool, device=self._device)
        early = (change > 0) & (a + change <= WINDOW)
        second[:, 0], second[:, 1] = early | (self._rand(count) < 0.3), False
        is_sink = torch.zeros(count, FRAMES, dtype=torch.bool, device=self._device)
        is_sink[:, 0] = True
        levels = torch.cat((torch.zeros(count, 1, device=self._device), sigma[:, :1]), 1)
        levels = torch.cat((levels, torch.zeros(count, CLEAN, device=self._device), sigma[:, 1:]), 1)

        def arranged(c: Tensor, n: Tensor) -> Tensor:
            return torch.cat((c[:, :1], n[:, :1], c[:, 1:], n[:, 1:]), 1)

        return {
            "latents": arranged(clean, noisy),
            "flow": arranged(torch.zeros_like(clean), flow),
            "sigma": levels,
            "timesteps": levels * 1000,
            "frame_index": frame,
            "shift": shift,
            "mask": mask,
            "weight": weight,
            "second": second,
            "sink": is_sink,
            "text": clips["text"].float(),
            "steer": clips["steer"],
        }

    def _mask(self, relative: Tensor, newest: Tensor, starts: Tensor, change: Tensor) -> Tensor:
        count = len(relative)
        mask = torch.zeros(count, FRAMES, FRAMES, dtype=torch.bool, device=self._device)
        clean = slice(2, 2 + CLEAN)
        keys, queries = relative[:, None, clean], relative[:, :, None]
        inside = (keys <= newest[:, :, None]) & (keys > newest[:, :, None] - FRAME_WINDOW)
        # A noisy frame sees itself in place of its clean copy.
        noisy = torch.arange(FRAMES, device=self._device).view(1, -1, 1) >= 2 + CLEAN
        mask[:, :, clean] = inside & ~(noisy & (keys == queries))
        mask[:, :, 0] = True
        # Frame 0 of a session is the sink, which no frame may see twice.
        mask[:, :, 2] &= ~starts[:, None]
        mask[:, :2] = False
        recached = starts[:, None] & (relative[:, clean] < change[:, None]) & (relative[:, clean] > 0)
        mask[:, 0, clean] = recached
        mask |= torch.eye(FRAMES, dtype=torch.bool, device=self._device)
        mask[:, 2, 0] &= ~starts
        return mask

    def _draw_sigma(self, count: int, units: int) -> Tensor:
        drawn = torch.multinomial(self._shares, count * units, replacement=True, generator=self.generator)
        fixed = self._steps[drawn].view(count, units)
        free = self._sigmas[(self._rand(count, units) * (len(self._sigmas) - 1)).long()]
        return torch.where(self._rand(count, units) < AT_THE_STEPS, fixed, free)

    def _noised(self, target: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        noise = torch.randn(target.shape, generator=self.generator, device=self._device)
        wide = sigma[:, :, None, None, None]
        return torch.lerp(target, noise, wide.expand_as(target)), noise - target

    def _blurred(self, clean: Tensor) -> Tensor:
        """Add noise to clean units: generated context has errors."""
        level = CONTEXT_NOISE * self._rand(*clean.shape[:2]).view(*clean.shape[:2], *[1] * (clean.ndim - 2))
        return clean + level * torch.randn(clean.shape, generator=self.generator, device=self._device)

    def _position(self, count: int, farthest: int) -> Tensor:
        near = torch.tensor([1, 1, 2, 3], device=self._device)
        index = torch.randint(5, (count,), generator=self.generator, device=self._device)
        far = torch.randint(1, farthest, (count,), generator=self.generator, device=self._device)
        return torch.where(index < 4, near[index.clamp(max=3)], far)

    def _rand(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self._device)


MAIN_FRAMES = CLEAN + 1


class SequenceMemory:
    """`Memory` of one batch of sequences. See `Sequences` for the batch."""

    def __init__(
        self, config: ModelConfig, text: list[tuple[Tensor, Tensor]], batch: Batch, dtype: torch.dtype
    ) -> None:
        tokens = config.tokens_per_frame
        self._dtype, self._scale = dtype, 1 / math.sqrt(config.head_dim)
        self._text = text
        self._bias = _bias(batch["mask"], dtype, tokens, tokens)
        prompts = torch.stack((~batch["second"], batch["second"]), -1)
        self._text_bias = _bias(prompts, dtype, tokens, config.text_len)
        self._sink = batch["sink"].repeat_interleave(tokens, 1)[:, :, None, None].to(dtype)
        self._turn = _turns(-batch["shift"], config).repeat_interleave(tokens, 1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Memory`. Queries turned back read the sink as if it had been turned forward."""
        back = torch.view_as_real(
            torch.view_as_complex(q.float().unflatten(-1, (-1, 2))) * self._turn
        ).flatten(-2)
        q, k, back = (x.to(self._dtype) for x in (q, k, back))
        seen_as_sink = k * self._sink
        out = _attention(
            torch.cat((q, back), -1),
            torch.cat((k - seen_as_sink, seen_as_sink), -1),
            F.pad(v.to(self._dtype), (0, v.shape[-1])),
            self._bias,
            self._scale,
        )
        return out[..., : v.shape[-1]].to(v.dtype)

    def attend_text(self, layer: int, q: Tensor) -> Tensor:
        """See `Memory`."""
        k, v = (torch.cat(x.chunk(2), 1).to(self._dtype) for x in self._text[layer])
        return _attention(q.to(self._dtype), k, v, self._text_bias, self._scale).to(q.dtype)


def conditioned(batch: Batch, steering: Tensor) -> Tensor:
    """Return the embeddings of both conditions, [2·B, 8, 128], first conditions first."""
    text, steer = batch["text"], batch["steer"]
    rows = steering[steer.clamp(min=0)]
    token = torch.where((steer >= 0)[..., None], rows, text[:, :, STEERED])
    steered = torch.cat((text[:, :, :STEERED], token[:, :, None], text[:, :, STEERED + 1 :]), 2)
    return steered.transpose(0, 1).flatten(0, 1)


def squared_errors(model: CausalWanTransformer, steering: Tensor, batch: Batch, dtype: torch.dtype) -> Tensor:
    """Return the squared error of the flow, per frame [B, 24]; of use where the weight is not 0."""
    memory = SequenceMemory(model.config, model.project_text(conditioned(batch, steering)), batch, dtype)
    flow = model(batch["latents"], batch["timesteps"], batch["frame_index"], memory)
    return (flow.float() - batch["flow"]).square().mean((2, 3, 4))


def _turns(frames: Tensor, config: ModelConfig) -> Tensor:
    """Return rotations by some frames [B, F], complex64 [B, F, 1, head_dim / 2]."""
    pairs = config.head_dim // 2
    time_pairs = pairs - 2 * (pairs // 3)
    exponents = torch.arange(0, 2 * time_pairs, 2, dtype=torch.float64, device=frames.device) / (
        2 * time_pairs
    )
    angles = frames.to(torch.float64).unsqueeze(-1) * config.rotation_theta**-exponents
    angles = F.pad(angles, (0, pairs - time_pairs)).unsqueeze(2)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def _bias(seen: Tensor, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    zero = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    bias = zero.masked_fill(~seen, float("-inf"))
    return bias.repeat_interleave(rows, 1).repeat_interleave(columns, 2).unsqueeze(1)


def _attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    bias = bias.expand(-1, q.shape[1], -1, -1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale).transpose(1, 2)
