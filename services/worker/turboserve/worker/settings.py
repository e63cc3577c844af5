"""Settings of the worker, read from `TURBOSERVE_…` variables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, model_validator

from turboserve.allocation.classes import SessionClass
from turboserve.config import Seconds
from turboserve.config import Settings as Shared
from turboserve.contracts.fidelity import TIER_ALPHA, TierAlpha
from turboserve.worker.engine.fidelity import AttentionName
from turboserve.worker.engine.fidelity_policy import FIDELITY_POLICIES
from turboserve.worker.engine.gather import GATHER_POLICIES
from turboserve.worker.replicas.models import check_models

ONE_MODEL_ONLY = (
    *("weights", "profile", "fidelity", "fidelity_profile", "host_sessions"),
    *("sequence_parallel_directory", "roles", "text_workers"),
)
"""Settings that a worker of several models does not take: any value but the default, and for `fidelity` any
but `BEST`."""
FILES_OF_A_MODEL = (
    *("model_weights", "checkpoint", "checkpoint_container", "lora", "vae", "fast_vae"),
    *("text_encoder", "rotation"),
)
"""Settings that a worker of several models takes only if these differ in nothing but the size of frames."""
BEST = "best"
"""The policy of configurations that lowers nothing."""
AUTO_SESSIONS = 16
"""Largest number of slabs where no limit is set."""


def check_addresses(text: str) -> str:
    """Return addresses with commas between them. Raises `ValueError` for one that is not `tcp://HOST:PORT`."""
    for address in addresses_of(text):
        parts = urlsplit(address)
        if parts.scheme != "tcp" or not parts.hostname or not parts.port:
            raise ValueError(f"{address} is not tcp://HOST:PORT")
        try:
            parts.hostname.encode("idna")
        except UnicodeError:
            raise ValueError(f"{address} has no valid host name") from None
    return text


def addresses_of(text: str) -> list[str]:
    """Return the addresses between the commas."""
    return [address.strip() for address in text.split(",") if address.strip()]


class Settings(Shared):
    """Settings of one worker: the model, the device, memory, migration and video."""

    worker_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """The worker's id. None: a new id at each start, because the id of a gone worker never returns."""
    pool_member: str | None = None
    """The pool's name for the pool member that this worker is."""
    model: Annotated[str, AfterValidator(check_models)] = "toyworld"
    """The model that the worker serves: `toyworld`, `toyworld-live` (the same weights, with chunks of one
    latent frame), `toyworld-small` (half the parameters, 64×64 pixels), `self-forcing-1-3b`,
    `longlive-1-3b`, or one that another distribution installs. A model that offers several frame sizes is
    served at another one than its own by a name that ends in it: `longlive-1-3b_640x384`. Several names with
    commas between them: the worker serves all of these, and divides its memory among them."""
    model_weights: Path | None = None
    """Weights file of a toyworld model. None: the file that ships with the worker."""
    checkpoint: Path | None = None
    """A public model's transformer: `.pt`, `.safetensors`, an index of several, or a folder with one."""
    checkpoint_container: str | None = None
    """The dictionary of a `.pt` checkpoint to load, such as `generator_ema`. None: the authors' choice."""
    lora: Path | None = None
    """Adapter that is merged into the checkpoint: LongLive's `lora.pt`."""
    vae: Path | None = None
    """A public model's decoder: `Wan2.1_VAE.pth`, a folder of diffusers' `AutoencoderKLWan`, or
    `taew2_1.pth`."""
    fast_vae: Path | None = None
    """A second, faster decoder of a public model, such as `taew2_1.pth` beside Wan's VAE. It decodes the
    chunks whose configuration names it: see `fidelity_profile`. Set it on all workers of the model alike.
    None: `vae` decodes all chunks. Only workers with both roles take it."""
    text_encoder: str | None = None
    """A public model's UMT5: a folder of diffusers, transformers or Wan, or a cached hub model's name."""
    rotation: Literal["absolute", "window"] | None = None
    """How keys carry their position in a public model. `window` lets sessions of a model with a window
    continue without end. None: as the model was published."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of a public model's weights. `auto`: bfloat16 on a GPU, else float32."""
    weights: Literal["disk", "peers"] = "disk"
    """Where a starting worker gets its weights: from its files, or from workers that serve the model, over
    the transfer's network. With `peers`, a ready worker also sends its weights while its viewers can spare
    the time. Set it on all workers alike. The files are needed anyway: they state the networks' sizes, and
    the worker loads them if no other worker sends the weights."""
    weights_digest: str | None = Field(default=None, pattern=r"^[0-9a-f]{32}$")
    """Digest that weights from other workers must have: `weights` in the line `worker joins` of a worker that
    has loaded the same files. `peers` needs it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model. `auto`: a GPU if there is one."""
    torch_threads: int = Field(default=1, ge=1)
    """Threads of one operation on the CPU. More workers are faster than more threads."""
    worker_max_sessions: int | None = Field(default=None, ge=1)
    """K, the number of slots. None: as many as memory holds and the profile keeps in real time. With several
    models: the largest number of sessions of one model, where the worker has no others."""
    memory_bytes: int = Field(default=0, ge=0)
    """Device memory for the models, their workspace and all sessions. 0: the models, plus nine tenths of the
    memory that is then free on a GPU, or plus 2 GiB on a CPU."""
    host_memory_bytes: int | None = Field(default=None, ge=0)
    """Host memory for suspended sessions, page-locked for a GPU. A state that does not fit stays in its slab,
    and its session is paused. None: as many states as there are slabs, at least 1 GiB, and at most half of
    the free memory."""
    host_sessions: int = Field(default=0, ge=0, le=1_000)
    """Number of sessions that may be active beyond the slabs: sessions take turns in the slabs, and the
    states of the others wait in host memory. That memory is taken at the start beside `host_memory_bytes`: a
    state for each, and one more. 0: every active session has a slab."""
    max_lead_s: Seconds = 3.0
    """Largest lead of sessions that set none of their own (`max_lead_s`, up to 60 s): a session generates no
    chunk that starts further ahead of its playhead."""
    tier_report_interval_s: Seconds = 0.25
    """Shortest interval between two load reports because of sessions that changed their tier."""
    profile: Path | None = None
    """File of measured stage latencies, from `turboserve profile engine`. None: the engine learns them."""
    gather_policy: Annotated[str, AfterValidator(GATHER_POLICIES.check)] = "step"
    """Policy that chooses the sessions of a forward: `step` (any sessions at any steps), or an installed one.
    `turboserve-baselines` installs `chunk` (whole chunks together), `fcfs` (one session at a time),
    `stream-deadline` (whole chunks, the video that must be whole first), `tiers` (one session at a time, by
    its tier and credit), `partial-deadlines` and `earliest-fluid-finish` (NeuStream's)."""
    fidelity: Annotated[str, AfterValidator(FIDELITY_POLICIES.check)] = "in-time"
    """Policy that chooses the configuration of each chunk: `best`, `in-time` (lowers the first chunk of a
    session and of a new scene, and the chunks that cost the least quality until all sessions of the worker
    are in time), or an installed one. `turboserve-baselines` installs `bmpr` and `fixed-level`. Under any but
    `best`, equal seeds and prompts give equal videos only in pinned sessions. A worker of several models
    lowers no quality."""
    fidelity_profile: Path | None = None
    """File of measured configurations, from `turboserve profile fidelity`. None: the file that ships with
    a toyworld model, for a CPU. Without a file of the model and the type of device, every chunk is generated
    at the best configuration."""
    fidelity_floor: float | None = Field(default=None, ge=0, le=1)
    """Least quality of a chunk, relative to the best configuration's. None: the floor of the profile, the
    median of all its configurations."""
    attention: AttentionName = "rows"
    """Attention kernel. `rows`, `flash` and `cudnn` compute each session's attention by itself: `rows` by the
    kernel that PyTorch chooses, the other two by the named one. `varlen` computes all sessions of a forward
    in one call; a GPU supports that in bfloat16 only. `fp8` rounds to 8 bits, in all chunks: it needs a GPU
    of compute capability 9.0 or higher and the worker's extra `fp8`. A worker that lacks its kind does not
    start."""
    compile: bool = False
    """Fuse the operations between two attentions with torch's compiler. The start takes a minute longer, and
    on a CPU a C++ compiler is required. Measure first whether it pays."""
    decode_batch: int | None = Field(default=None, ge=1)
    """Largest number of sessions whose chunks are decoded together; measured latencies choose the number.
    For `roles=decode`: those whose chunks wait. None: on a GPU, as many as a twentieth of its memory decodes.
    On a CPU, one: that is as fast there, and a session's frames do not depend on the other sessions, bit for
    bit."""
    roles: Literal["denoise,decode", "denoise", "decode", "text"] = "denoise,decode"
    """What the worker computes. `denoise`: it owns its sessions and publishes their chunks, and has them
    decoded by the decode workers of `decode_workers`. Sessions take less memory then. `decode`: it owns no
    session, and decodes the chunks of such workers, at `transfer_host` and `transfer_port`. `text`: it owns
    no session, and encodes the prompts of workers that name it in `text_workers`, at the same address."""
    text_workers: Annotated[str, AfterValidator(check_addresses)] = ""
    """Addresses of text workers, as in `decode_workers`. A prompt that none of them encodes within
    `decode_timeout_s` is encoded by the worker itself. Empty: the worker encodes all prompts."""
    decode_workers: Annotated[str, AfterValidator(check_addresses)] = ""
    """Addresses of the decode workers, with commas between them: `tcp://10.0.0.7:7500`. For `roles=denoise`.
    A chunk that none of them decodes in time is decoded by the worker itself."""
    decode_key: Annotated[SecretStr, Field(min_length=32)] | None = None
    """Key that workers and decode workers prove to each other: at least 32 random characters, such as those
    of `openssl rand -hex 32`. Needed for each role but `denoise,decode`, and for `text_workers`."""
    decode_timeout_s: Seconds = 1.0
    """Longest time in which a decode worker decodes a chunk, seconds, with the rebuilding of its cache. After
    it, another worker does. A chunk asks two decode workers at most, so that its viewer needs a lead of more
    than twice that. A decode worker that was late is not asked for 2 s, and for up to 30 s if it is late
    again and again."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Decode and suspend on separate threads during denoising. `auto`: on a GPU, on a CPU with more than one
    core, and where other workers decode."""
    transfer_host: str = "127.0.0.1"
    """The one address at which other workers fetch the state of migrating sessions from this worker. It is an
    address, an interface, a network (`10.0.0.0/8`: the machine's first address in it), or `hostname` (the
    address of the machine's own name). Every interface (`0.0.0.0`) is refused. Set it on all workers alike. A
    worker that asks for a state must prove that it holds the migration's key. The state is verified and not
    encrypted: use a network that only workers share."""
    transfer_port: int = Field(default=0, ge=0, le=65_535)
    """Port of the transfer address. 0: any free port."""
    transfer_backends: tuple[Literal["nccl", "gloo", "nixl", "shm"], ...] = ("nccl", "shm", "gloo")
    """Transfer backends, the best first. The first one that both workers can use transfers a state: `nccl`
    needs two GPUs, `shm` one x86-64 machine and one user. `nixl` needs the worker's extra of that name. With
    roles, latents and frames use them as well, but not `nccl`: they are in host memory."""
    tier_alpha: TierAlpha = TIER_ALPHA
    """Width of a tier of playout slack, as a multiple of a chunk's time T: a session is urgent below a credit
    of this many T, and relaxed above twice as many. A worker has room for a rescued session if one with a
    slack of this many T would make no chunk late there. Set it on workers and schedulers alike."""
    sequence_parallel_directory: Path | None = None
    """Directory of sockets by which workers of one host lend each other their devices (sequence parallelism).
    The workers need one user, one network namespace and, with GPUs, one GPU each. None: no loans."""
    sequence_parallel_timeout_s: Seconds = 0.5
    """Longest time of one exchange between two workers in a forward, in seconds. At the worker that lends
    itself, all exchanges of a forward together take at most as long, and its sessions must outlast that."""
    transfer_bytes_per_s: float = Field(default=10e6, gt=0)
    """Assumed transfer rate that limits a copy's time until a rate is measured for the source's host. Four
    times the estimated copy time is added to `migration_timeout_s`."""
    migration_quiesce_max_s: Seconds = 20.0
    """Longest time for which a watched session may be quiesced while the rest of its state is copied. Over a
    slower connection, the session stays on its source."""
    migration_idle_window_s: Seconds = 0.3
    """Idle window required at the handoff, in seconds: a migrating session is quiesced when its next chunk is
    not due for this long. A session that falls behind its viewer is quiesced at the next boundary."""
    migration_idle_window_timeout_s: Seconds = 2.0
    """Time in which the required idle window shrinks linearly to zero, in seconds."""
    worker_tick_s: Seconds = 0.05
    """Interval at which the worker checks whether something must be retried."""
    real_time_margin: float = Field(default=0.6, gt=0, le=1)
    """Share of a chunk's playing time that its generation may take, where K comes from the profile. The rest
    is for packaging, for everything else on the machine, and for catching up. For `roles=decode`: the share
    that the decoding of all sessions may take."""
    video_crf: int = Field(default=18, ge=0, le=51)
    """H.264 quality: lower is better and larger."""
    video_preset: Literal["ultrafast", "superfast", "veryfast", "faster", "fast", "medium"] = "veryfast"
    """H.264 effort."""
    chunk_ttl_s: int = Field(default=86_400, ge=60)
    """Time after which the broker drops a chunk."""
    send_latents: bool = True
    """Whether the clean latents of each chunk are sent to the hot store. Without them, a session whose worker
    fails continues from an empty context, as after a loss of the hot store."""

    @model_validator(mode="after")
    def _peers_need_a_digest(self) -> Settings:
        if self.weights == "peers" and self.weights_digest is None:
            raise ValueError("weights_digest: weights=peers needs the digest of the weights")
        return self

    @model_validator(mode="after")
    def _roles_need_a_key(self) -> Settings:
        if self.decode_key is None and (self.roles != "denoise,decode" or self.text_workers):
            raise ValueError(f"decode_key: roles={self.roles} or text_workers need one")
        if self.roles == "denoise" and not addresses_of(self.decode_workers):
            raise ValueError("decode_workers: roles=denoise needs the address of one")
        if self.roles != "denoise,decode" and self.fast_vae is not None:
            raise ValueError(f"fast_vae: with roles={self.roles}, there is one decoder")
        if self.roles == "denoise" and self.overlap == "off":
            raise ValueError("overlap: roles=denoise needs a thread that waits for decode workers")
        return self

    @model_validator(mode="after")
    def _several_models_need_no_files(self) -> Settings:
        if len(self.models) == 1:
            return self
        names = {SessionClass.of_name(name).model for name in self.models}
        for name in ONE_MODEL_ONLY if len(names) == 1 else (*ONE_MODEL_ONLY, *FILES_OF_A_MODEL):
            # Several models lower no quality, whatever the default is.
            allowed = BEST if name == "fidelity" else type(self).model_fields[name].default
            if name in self.model_fields_set and getattr(self, name) != allowed:
                raise ValueError(f"{name}: the setting is for a worker of one model, not of {self.model}")
        return self

    @property
    def models(self) -> tuple[str, ...]:
        """The names of `model`: the classes that the worker serves."""
        return tuple(self.model.split(","))

    @property
    def sets_fidelity(self) -> bool:
        """Whether `fidelity` was set, also to its default."""
        return "fidelity" in self.model_fields_set

    def by_class(self) -> tuple[Settings, ...]:
        """Return the settings of each class alone, with its part of the host memory. Several classes lower no
        quality. `memory_bytes` stays that of all: their models are not alike."""
        count = len(self.models)
        host_bytes = None if self.host_memory_bytes is None else self.host_memory_bytes // count
        changed: dict[str, Any] = {"host_memory_bytes": host_bytes}
        if count > 1:
            changed["fidelity"] = BEST
        return tuple(self.model_copy(update={"model": name, **changed}) for name in self.models)
