"""A worker's questions to text workers.

A connection is made when a prompt needs it, and kept. A prompt asks at most `WORKERS_PER_PROMPT` workers,
each within the time limit: first those that have the fewest prompts of this worker, and none that has failed
just now. Then the worker itself encodes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from zlib import crc32

from torch import Tensor

from turboserve import logs
from turboserve.worker import metrics
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.remote_decoding.frames import (
    TEXT_PURPOSE,
    DecodeChannel,
    DecodeHello,
    EncodePrompt,
    PromptEmbedding,
)
from turboserve.worker.remote_decoding.introduction import introduce
from turboserve.worker.remote_decoding.ports import CONNECT, Connect
from turboserve.worker.transfer.channel import unexpected
from turboserve.worker.transfer.errors import TransferProtocolError
from turboserve.worker.transfer.target import parse_address

WORKERS_PER_PROMPT = 2
REST_S = 5.0
"""Time for which a text worker that has failed is not asked, seconds. Each attempt may take the limit."""

log = logs.get("decoding")


class _TextWorker:
    """One text worker's address and connection. One question at a time."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.turn = asyncio.Lock()
        self.prompts = 0
        """Number of prompts that ask it, or wait for their turn."""
        self.channel: DecodeChannel | None = None
        self.asked = 0
        """Number of questions on all connections."""
        self.rests_until_s = 0.0
        """Time before which it is not asked, on the event loop's clock."""

    def close(self) -> None:
        if self.channel is not None:
            self.channel.abort()
            self.channel = None


class TextClient:
    """See `RemoteTextEncoder`."""

    def __init__(
        self,
        worker: str,
        model: str,
        config: ModelConfig,
        addresses: Sequence[str],
        key: bytes,
        timeout_s: float,
        dtype: str,
        connect: Connect = CONNECT,
    ) -> None:
        """See `DecodeClient`. `addresses`: of the text workers. `dtype`: of embeddings.

        Create it on the event loop.
        """
        self._worker, self._model, self._config, self._dtype = worker, model, config, dtype
        self._key, self._timeout_s, self._connect = key, timeout_s, connect
        # All workers have the same addresses. Not all may ask the first one.
        begin = crc32(worker.encode()) % max(len(addresses), 1)
        self._workers = [_TextWorker(address) for address in (*addresses[begin:], *addresses[:begin])]
        self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()

    def ask(self, prompt: str) -> Future[Tensor | None]:
        """See `RemoteTextEncoder.ask`. Call it on another thread than the event loop's."""
        if self._loop is None or self._loop.is_closed():
            nothing: Future[Tensor | None] = Future()
            nothing.set_result(None)
            return nothing
        return asyncio.run_coroutine_threadsafe(self.encode(prompt), self._loop)

    async def close(self) -> None:
        """Close all connections. Later prompts are encoded by the worker itself."""
        self._loop = None
        for worker in self._workers:
            worker.close()

    async def encode(self, prompt: str) -> Tensor | None:
        """Return the embedding [L, text_dim] on the host. None: no text worker has sent it in time."""
        clock = asyncio.get_running_loop().time
        usable = [worker for worker in self._workers if worker.rests_until_s <= clock()]
        usable.sort(key=lambda worker: worker.prompts)
        for worker in usable[:WORKERS_PER_PROMPT]:
            if (found := await self._asked(worker, prompt)) is not None:
                return found
        metrics.encoded_here.add(1)
        return None

    async def _asked(self, worker: _TextWorker, prompt: str) -> Tensor | None:
        """Return the embedding from one worker. None: it has not sent it in time.

        Then it rests, unless the prompt has waited for others: too many prompts are no fault of the worker.
        """
        clock, waits, has_turn = asyncio.get_running_loop().time, worker.prompts > 0, False
        worker.prompts += 1
        try:
            async with asyncio.timeout(self._timeout_s), worker.turn:
                if worker.rests_until_s > clock():
                    # It has failed at a prompt before this one.
                    return None
                has_turn = True
                return await self._ask(worker, prompt)
        except Exception as error:
            # Whatever goes wrong with a text worker, the worker itself encodes the prompt.
            log.warning("prompt not encoded by worker", address=worker.address, error=repr(error))
            if has_turn:
                # A late answer must not be taken for that of another prompt.
                worker.close()
            if has_turn and not (waits and isinstance(error, TimeoutError)):
                worker.rests_until_s = clock() + REST_S
        except BaseException:
            if has_turn:
                worker.close()
            raise
        finally:
            worker.prompts -= 1
        return None

    async def _ask(self, worker: _TextWorker, prompt: str) -> Tensor:
        if worker.channel is not None and worker.channel.left:
            # It has been restarted, or no prompt has come for a day.
            worker.close()
        if (channel := worker.channel) is None:
            channel = worker.channel = await self._open(worker.address)
        worker.asked += 1
        number = worker.asked
        await channel.post(EncodePrompt(number=number, prompt=prompt), (), self._timeout_s)
        answer = await channel.next(self._timeout_s)
        if not isinstance(answer, PromptEmbedding) or answer.number != number:
            raise unexpected(answer)
        shape = answer.embedding.shape
        fits = len(shape) == 2 and 1 <= shape[0] <= self._config.text_len
        if not fits or shape[1] != self._config.text_dim or answer.embedding.dtype != self._dtype:
            raise TransferProtocolError(f"embedding: {answer.embedding.dtype} {shape}, need {self._dtype}")
        return await channel.payload(answer.embedding, shape, self._timeout_s)

    async def _open(self, address: str) -> DecodeChannel:
        """Connect. Raises `OSError` and `TransferError`."""
        channel = DecodeChannel(*await self._connect(*parse_address(address)))
        hello = DecodeHello(model=self._model, capacity=1)
        welcome, _ = await introduce(channel, TEXT_PURPOSE, self._worker, hello, self._key, self._timeout_s)
        log.info("text worker ready", worker=welcome.worker, address=address)
        return channel
