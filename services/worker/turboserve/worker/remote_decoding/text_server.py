"""A text worker: encodes the prompts of other workers' sessions. It keeps nothing of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor

import torch
from torch import Tensor

from turboserve.worker import metrics
from turboserve.worker.engine.interface import TextEncoder
from turboserve.worker.engine.streams import to_host
from turboserve.worker.remote_decoding.frames import (
    TEXT_PURPOSE,
    DecodeChannel,
    DecodeFrame,
    EncodePrompt,
    PromptEmbedding,
    TensorSpec,
)
from turboserve.worker.remote_decoding.role_server import ANSWER_S, RoleServer
from turboserve.worker.transfer.channel import unexpected
from turboserve.worker.transfer.errors import PeerLostError


class TextServer(RoleServer):
    """Encodes one prompt at a time. So an embedding does not depend on other sessions."""

    def __init__(
        self,
        worker: str,
        model: str,
        encoder: TextEncoder,
        key: bytes,
        now: Callable[[], float],
        thread: Executor | None = None,
    ) -> None:
        """See `RoleServer`."""
        super().__init__(TEXT_PURPOSE, worker, model, key, now, thread)
        self._encoder = encoder
        self.encoded = 0

    async def _question(
        self, channel: DecodeChannel, worker: str, capacity: int, question: DecodeFrame
    ) -> None:
        """See `RoleServer._question`."""
        if not isinstance(question, EncodePrompt):
            raise unexpected(question)
        async with self._turn:
            if channel.left:
                raise PeerLostError(f"prompt {question.number}: its worker has not waited")
            began = self._now()
            embedding = await self._on_device(lambda: encode_one(self._encoder, question.prompt))
        metrics.encode_duration.record(self._now() - began)
        self.encoded += 1
        answer = PromptEmbedding(number=question.number, embedding=TensorSpec.of(embedding))
        await channel.post(answer, (embedding,), ANSWER_S)


@torch.inference_mode()
def encode_one(encoder: TextEncoder, prompt: str) -> Tensor:
    """Return the embedding [L, text_dim] of one prompt, on the host."""
    return to_host(encoder.encode([prompt])[0]).contiguous()
