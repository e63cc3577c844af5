"""Settings of the worker, read from `TURBOSERVE_…` variables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from turboserve.config import Seconds
from turboserve.config import Settings as Shared
from turboserve.worker.engine.gather import GATHER_POLICIES

AUTO_SESSIONS = 16
"""Slots at most where no limit is set."""


class Settings(Shared):
    """Which model on which device, and how much of both."""

    worker_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """None: a new one each start, for the id of a worker that was declared gone never comes back."""
    pool_slot: str | None = None
    """The pool's name for the place it runs in."""
    model: Literal["toyworld", "self-forcing-1.3b", "longlive-1.3b"] = "toyworld"
    """What it serves."""
    model_weights: Path | None = None
    """toyworld's weights file; None: those that ship with the worker."""
    checkpoint: Path | None = None
    """A public model's transformer: `.pt`, `.safetensors`, an index of several, or a folder with one of
    them."""
    checkpoint_container: str | None = None
    """Which dictionary of a `.pt` checkpoint to take, such as `generator_ema`; None: as its authors do."""
    lora: Path | None = None
    """Adapter that is merged into the checkpoint: LongLive's `lora.pt`."""
    vae: Path | None = None
    """A public model's decoder: `Wan2.1_VAE.pth`, a folder of diffusers' `AutoencoderKLWan`, or
    `taew2_1.pth`."""
    text_encoder: str | None = None
    """A public model's UMT5: a folder of diffusers, transformers or Wan, or a hub's name that is cached."""
    rotation: Literal["absolute", "window"] | None = None
    """How keys carry their position in a public model; `window` lets sessions of a model with a window go on
    without end. None: as it was published."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of a public model's weights; `auto`: bfloat16 on a GPU, else float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: a GPU if there is one."""
    torch_threads: int = Field(default=1, ge=1)
    """Threads of one operation on the CPU: more workers beat more threads."""
    worker_max_sessions: int | None = Field(default=None, ge=1)
    """Sessions that hold a slot, K; none: as many as memory holds and the profile keeps in real time."""
    memory_bytes: int = Field(default=0, ge=0)
    """Device memory for the models, their workspace and all sessions; 0: nine tenths of what is free; on a
    CPU 2 GiB beside the models."""
    host_memory_bytes: int | None = Field(default=None, ge=0)
    """Memory of the host for suspended sessions, page-locked for a GPU. A state that does not fit stays in
    its slab, and its session paused. None: for as many states as there are slots, 1 GiB at least and half of
    the free memory at most."""
    max_lead_s: Seconds = 3.0
    """A session generates no chunk that starts further ahead of its playhead."""
    profile: Path | None = None
    """Measured latencies of the engine's stages, from `turboserve profile engine`; None: it learns them."""
    gather_policy: Annotated[str, AfterValidator(GATHER_POLICIES.check)] = "step"
    """Policy that chooses the sessions of a forward: `step` (any sessions at any steps), or an installed one.
    `turboserve-baselines` installs `chunk` (whole chunks together) and `fcfs` (one session at a time)."""
    attention: Literal["rows", "flash", "cudnn", "varlen"] = "rows"
    """Each session's attention by itself, by the kernel that PyTorch chooses or by a certain one; or that of
    all sessions of a forward in one call (`varlen`, which a GPU does in bfloat16 alone)."""
    compile: bool = False
    """Have torch's compiler fuse what lies between two attentions: a minute more at the start, and on a CPU a
    C++ compiler. Measure first whether it pays."""
    decode_batch: int | None = Field(default=None, ge=1)
    """Sessions' chunks that are decoded at once at most; how many are, the measured latencies say. None: on a
    GPU as many as a twentieth of its memory decodes; on a CPU one, which is as fast there, and whose pictures
    are the same bit for bit whoever waits beside it."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Decode and suspend on threads of their own while the next chunk is denoised; `auto`: on a GPU, and on a
    CPU with more than one core."""
    transfer_host: str = "127.0.0.1"
    """The one address at which other workers reach this one for the state of sessions that migrate: an
    address, an interface, a network (`10.0.0.0/8`: the machine's first address in it), or `hostname` (the
    address of the machine's own name). Every interface (`0.0.0.0`) is refused. Set it on all workers alike.
    Who asks for a state has to prove the migration's key; what moves is verified and not encrypted, so this
    is for a network of the workers' own."""
    transfer_port: int = Field(default=0, ge=0, le=65_535)
    """0: any that is free."""
    transfer_backends: tuple[Literal["nccl", "gloo", "nixl", "shm"], ...] = ("nccl", "gloo", "shm")
    """How state may travel, the best first; what this machine lacks is left out. `nixl` needs the worker's
    extra of that name."""
    transfer_bytes_per_s: float = Field(default=10e6, gt=0)
    """Pace by which a state's size makes the limit of its copy, where none has come from that host yet. What
    was measured takes its place; four times as long as a copy takes by it is added to `move_limit_s`."""
    move_still_s: Seconds = 20.0
    """A session that is watched stands still for no longer while the rest of its state is copied: on a way
    that is too slow for this, it stays."""
    move_quiet_s: Seconds = 0.3
    """A session that moves stands still at a moment at which its next chunk is not due for this long; the
    longer it waits for one..."""
    move_patience_s: Seconds = 2.0
    """...the less will do, and after this long any."""
    worker_tick_s: Seconds = 0.05
    """How often it looks whether something is to be tried again."""
    real_time_margin: float = Field(default=0.6, gt=0, le=1)
    """Share of a chunk's playing time that making it may take, where K comes from the profile. The rest is
    for packaging, for everything else on the machine, and for catching up."""
    video_crf: int = Field(default=18, ge=0, le=51)
    """H.264 quality: lower is better and larger."""
    video_preset: Literal["ultrafast", "superfast", "veryfast", "faster", "fast", "medium"] = "veryfast"
    """H.264 effort."""
    chunk_ttl_s: int = Field(default=86_400, ge=60)
    """The broker drops a chunk after this long."""
