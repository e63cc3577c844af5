"""The stage that encodes prompts: here, or by other workers while this one computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Protocol

import torch
from torch import Tensor

from turboserve.static_frozen import statically_frozen
from turboserve.worker.engine.control_encoder import ControlEncoder
from turboserve.worker.engine.gather import LatencyProfile
from turboserve.worker.engine.interface import Event, TextEncoder
from turboserve.worker.engine.pending_control import PendingControl
from turboserve.worker.engine.session import ELSEWHERE, Session
from turboserve.worker.engine.stages import Clock, Fail, Stage, StageOutcome


class RemoteTextEncoder(Protocol):
    """Has prompts encoded by other workers (`remote_decoding.text_client`)."""

    def ask(self, prompt: str) -> Future[Tensor | None]:
        """Return the embedding [L, text_dim] on the host, in time: None if no other worker has sent it."""
        ...


@statically_frozen(eq=False)
class Prompted:
    """A control that waits for its embedding."""

    session: Session
    pending: PendingControl


@statically_frozen(eq=False)
class _AskedPrompt:
    """A prompt that other workers encode."""

    prompted: Prompted
    answer: Future[Tensor | None]


class TextStage(Stage[Prompted, Prompted, Tensor]):
    """Encodes prompts, with the values of controls, to embeddings [L, text_dim].

    With `remote`, a prompt without values is asked of other workers first. Its session waits at the boundary
    for the answer, and no other does. If there is none in time, the stage encodes the prompt.
    """

    def __init__(
        self,
        encoder: TextEncoder,
        controls: ControlEncoder | None,
        device: torch.device,
        clock: Clock,
        max_batch: int,
        profile: LatencyProfile | None = None,
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        """`notify`: called on any thread when an answer of another worker is here."""
        super().__init__(device, clock, profile)
        self._encoder, self._controls = encoder, controls
        self._max_batch = max_batch
        self.remote: RemoteTextEncoder | None = None
        """None: all prompts are encoded here."""
        self._asked: list[_AskedPrompt] = []
        self._device, self._notify = device, notify

    @property
    def asking(self) -> bool:
        """Whether other workers encode prompts."""
        return bool(self._asked)

    @property
    def answered(self) -> bool:
        """Whether `collect` would take an answer."""
        # Each step asks: nearly always, no prompt is elsewhere.
        return bool(self._asked) and any(_is_due(each) for each in self._asked)

    def collect(self) -> None:
        """Give sessions the embeddings that are here. A prompt without one is encoded here."""
        if not self._asked:
            return
        for each in [each for each in self._asked if _is_due(each)]:
            self._asked.remove(each)
            pending, found = each.prompted.pending, each.answer.result()
            if found is not None:
                pending.text = found.to(self._device)
            pending.elsewhere, pending.asked = False, True

    def waiting(self, sessions: Iterable[Session]) -> list[Prompted]:
        """See `Stage.waiting`."""
        return [
            Prompted(session, pending)
            for session in sessions
            if session.controls and session.encoding
            for pending in session.controls
            if not pending.ready and not pending.elsewhere
        ]

    def gather(self, waiting: list[Prompted], now: float) -> list[Prompted]:
        """See `Stage.gather`. Takes prompts in the order of the sessions, as many as pay."""
        if self.remote is not None:
            waiting = [each for each in waiting if not self._asks(self.remote, each)]
        if not waiting:
            return []
        return waiting[: self.profile.best_batch(min(self._max_batch, len(waiting)))]

    def _asks(self, remote: RemoteTextEncoder, prompted: Prompted) -> bool:
        pending = prompted.pending
        prompt, values = prompted.session.conditions(pending)
        if pending.asked or values:
            return False
        pending.elsewhere = True
        answer = remote.ask(prompt)
        self._asked.append(_AskedPrompt(prompted, answer))
        answer.add_done_callback(lambda _: self._notify())
        return True

    @torch.inference_mode()
    def compute(self, batch: list[Prompted]) -> list[Tensor]:
        """See `Stage.compute`. Each embedding has its own memory: sessions keep them for different times."""
        prompts, values = zip(*(each.session.conditions(each.pending) for each in batch), strict=True)
        if self._controls is not None and any(values):
            embedded = self._controls.encode(prompts, values)
        else:
            embedded = self._encoder.encode(prompts)
        return [embedded[0]] if len(batch) == 1 else [row.clone() for row in embedded]

    def scatter(self, outcomes: list[StageOutcome[Prompted, Tensor]], fail: Fail) -> list[Event]:
        """See `Stage.scatter`."""
        failed: dict[str, StageOutcome[Prompted, Tensor]] = {}
        for outcome in outcomes:
            outcome.item.pending.text = outcome.result
            if outcome.error is not None:
                # Several prompts of a session may wait; the session ends once.
                failed.setdefault(outcome.item.session.name, outcome)
        return [fail(outcome.item.session, outcome.error) for outcome in failed.values()]


def _is_due(each: _AskedPrompt) -> bool:
    # A state that is being transferred does not change.
    return each.answer.done() and not isinstance(each.prompted.session.activity, ELSEWHERE)
