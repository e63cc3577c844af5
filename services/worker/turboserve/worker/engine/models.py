"""One replica of all networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from turboserve.worker.engine.backend import Backend
from turboserve.worker.engine.control_encoder import ControlEncoder
from turboserve.worker.engine.interface import Decoder, EngineOptions, TextEncoder
from turboserve.worker.engine.snapshot import state_fingerprint
from turboserve.worker.engine.tensor_backend import TensorBackend
from turboserve.worker.model.transformer import CausalWanTransformer
from turboserve.worker.model.weight_manifest import WeightManifest
from turboserve.worker.model.weights import weight_bytes

COMPILER = "inductor"
"""torch's own compiler, which generates Triton for a GPU and C++ for a CPU."""


@dataclass(frozen=True, eq=False)
class Models:
    """One replica of all networks."""

    transformer: CausalWanTransformer
    text: TextEncoder
    decoder: Decoder
    weights: str = ""
    """`weights_digest` of all three networks; empty where replicas are not compared, as in benchmarks."""

    controls: ControlEncoder | None = None
    """Encodes the model's typed controls. None: it takes none."""
    manifest: WeightManifest | None = None
    """Manifest of the weights of `networks`. None: other workers cannot have the weights from this one."""
    networks: Mapping[str, nn.Module] = field(default_factory=dict)
    """The networks by the names that the manifest's tensors begin with."""
    fast_decoder: Decoder | None = None
    """A second, faster decoder of the same latents, for chunks whose configuration names it. None: there is
    one decoder."""

    @property
    def fingerprint(self) -> str:
        """See `state_fingerprint`."""
        return state_fingerprint(self.transformer.config, self.weights)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights on the device."""
        decoders = sum(each.weight_bytes for each in self.decoders)
        return weight_bytes(self.transformer) + self.text.weight_bytes + decoders

    @property
    def decoders(self) -> tuple[Decoder, ...]:
        """The decoder, and the fast one if there is one."""
        return (self.decoder,) if self.fast_decoder is None else (self.decoder, self.fast_decoder)

    @property
    def cache_bytes(self) -> int:
        """Bytes of one session's decoder cache on the device, whichever decoder has made it."""
        return max(each.cache_bytes for each in self.decoders)

    def backend(self, options: EngineOptions) -> Backend:
        """See `Replica.backend`."""
        compiler = COMPILER if options.compile else None
        return TensorBackend(
            self.transformer,
            self.text,
            self.decoder,
            self.fingerprint,
            options,
            compiler,
            self.controls,
            self.fast_decoder,
        )
