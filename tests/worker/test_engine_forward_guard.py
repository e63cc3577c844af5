"""No forward makes the host wait for a value, and none copies cached keys or values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from turboserve.bench.engine.naive import NaiveLoop
from turboserve.worker.engine.interface import Control, SessionSpec
from turboserve.worker.engine.models import Models
from turboserve.worker.model.config import ModelConfig

aten = torch.ops.aten
WAITS = {aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.nonzero, aten.equal}
READERS = ("attention", "view", "slice", "select", "unbind", "transpose", "permute", "narrow", "detach",
           "as_strided", "squeeze", "split", "alias", "expand", "reshape")  # fmt: skip


class Guard(TorchDispatchMode):
    """Refuses to wait for a value. Refuses reads of guarded memory except by attention, and views of it."""

    def __init__(self, guarded: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.attended = 0
        self._guarded = {tensor.untyped_storage().data_ptr() for tensor in guarded}

    def _held(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage().data_ptr() in self._guarded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet in WAITS:
            raise AssertionError(f"{func} makes the host wait")
        # An in-place operation writes to its first argument.
        read = args[1:] if packet in (aten.copy_, aten.fill_) else args
        if any(self._held(leaf) for leaf in tree_leaves((read, kwargs or {}))):
            name = packet._qualified_op_name.split("::")[1]
            if not any(reader in name for reader in READERS):
                raise AssertionError(f"{func} copies cached keys or values")
            self.attended += "attention" in name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_forward_neither_waits_nor_copies_the_cache(make_driver: Callable[..., Any], rows: int) -> None:
    driver = make_driver(slabs=3, max_lead_s=30.0)
    engine = driver.engine
    for number in range(rows):
        engine.admit(SessionSpec(str(number), "a red circle", number), driver.now)
    driver.run(lambda events: len(events) > 5 * rows)
    for number in range(rows):
        engine.control(str(number), Control(1, prompt="a blue square"))
    guard = Guard([engine.backend.pool._frames, engine.backend.pool._text])
    compute: Callable[[list[Any]], list[Tensor]] = engine.forward.compute
    kinds = set()

    def guarded(batch: list[Any]) -> list[Tensor]:
        kinds.add(type(batch[0].work).__name__)
        with guard:
            return compute(batch)

    engine.forward.compute = guarded
    driver.run(lambda events: len(events) > 4 * rows)
    # Denoising past the window's end, where other caches shift, and the recache after a prompt.
    assert kinds == {"ChunkWork", "RecacheWork"}
    assert guard.attended > 0
    assert all(s.state.ring.end > engine.config.window_frames for s in engine.sessions.values())


def test_the_guard_sees_what_the_naive_loop_does(
    make_models: Callable[..., Models], tiny_config: ModelConfig
) -> None:
    model = make_models(tiny_config).transformer
    text = torch.randn(1, tiny_config.text_len, tiny_config.text_dim)
    noise = torch.randn(len(tiny_config.denoising_steps), *tiny_config.latent_shape)
    loop = NaiveLoop(model, text)
    with pytest.raises(AssertionError, match="makes the host wait"), Guard([]):
        loop.chunk(noise)
    keys = loop._cache._keys[0]
    with pytest.raises(AssertionError, match="copies cached keys"), Guard([keys]):
        keys[:, 3:6].clone()
