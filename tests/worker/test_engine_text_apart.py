"""An engine whose prompts other workers encode: the same video, and no other session waits for an answer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from tests.worker.conftest import Driver, delivered
from tests.worker.state_page_helpers import FAR, SPEC, equal
from turboserve.worker.engine.interface import ChunkReady, Control, SessionSpec
from turboserve.worker.remote_decoding.text_server import encode_one

MakeDriver = Callable[..., Driver]
SECOND = "a blue square"


class Elsewhere:
    """See `RemoteTextEncoder`: answers when the test says so."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.questions: list[tuple[str, Future[Tensor | None]]] = []
        driver.engine.text.remote = self

    def ask(self, prompt: str) -> Future[Tensor | None]:
        answer: Future[Tensor | None] = Future()
        self.questions.append((prompt, answer))
        return answer

    def answer(self, *, fails: bool = False) -> None:
        prompt, answer = self.questions.pop(0)
        text: Any = self.driver.engine.backend.text
        kept = list(text.calls)
        answer.set_result(None if fails else encode_one(text, prompt))
        text.calls[:] = kept


def encoded_here(driver: Driver) -> list[str]:
    text: Any = driver.engine.backend.text
    return [prompt for call in text.calls for prompt in call]


def switched(driver: Driver, remote: Elsewhere | None, *, fails: bool = False) -> list[ChunkReady]:
    """Play two chunks of each of two prompts."""
    driver.engine.admit(SPEC, driver.now)
    found: list[ChunkReady] = []
    for number in range(2):
        if number:
            driver.engine.control("a", Control(number, prompt=SECOND))
        if remote is not None:
            driver.run(lambda _: bool(remote.questions))
            remote.answer(fails=fails)
        found += driver.chunks("a", 2)
    return found


def test_prompts_that_are_encoded_elsewhere_give_the_same_video_bit_for_bit(make_driver: MakeDriver) -> None:
    plain, driver, failing = (make_driver(max_lead_s=FAR, overlap=False) for _ in range(3))
    expected = switched(plain, None)
    assert encoded_here(plain) == [SPEC.prompt, SECOND]
    assert equal(switched(driver, Elsewhere(driver)), expected)
    assert encoded_here(driver) == []
    # Without an answer, the worker encodes the prompt itself, and asks no further time.
    remote = Elsewhere(failing)
    assert equal(switched(failing, remote, fails=True), expected)
    assert encoded_here(failing) == [SPEC.prompt, SECOND]
    assert remote.questions == []


def test_no_other_session_waits_for_an_answer(make_driver: MakeDriver) -> None:
    driver = make_driver(max_lead_s=FAR)
    driver.engine.admit(SPEC, driver.now)
    driver.chunks("a", 1)
    remote = Elsewhere(driver)
    driver.engine.admit(SessionSpec("b", SECOND, seed=12), driver.now)
    events = driver.run(lambda found: len(delivered(found, "a")) >= 3)
    assert delivered(events, "b") == []
    assert [prompt for prompt, _ in remote.questions] == [SECOND]
    remote.answer()
    assert len(driver.chunks("b", 2)) == 2


def test_an_answer_wakes_an_engine_without_other_work(make_driver: MakeDriver) -> None:
    driver = make_driver(max_lead_s=FAR)
    remote = Elsewhere(driver)
    driver.engine.admit(SPEC, driver.now)
    woken: list[bool] = []
    driver.engine.when_done(lambda: woken.append(True))
    while driver.engine.has_work(driver.now):
        driver.engine.step(driver.now)
    assert driver.engine.executors_busy
    assert not driver.engine.has_work(driver.now)
    remote.answer()
    assert woken
    assert driver.engine.has_work(driver.now)
    assert len(driver.chunks("a", 1)) == 1


def test_a_session_that_leaves_while_it_waits_is_no_error(make_driver: MakeDriver) -> None:
    driver = make_driver(max_lead_s=FAR)
    remote = Elsewhere(driver)
    driver.engine.admit(SPEC, driver.now)
    driver.run(lambda _: bool(remote.questions))
    driver.engine.evict("a")
    remote.answer()
    driver.engine.admit(SPEC, driver.now)
    driver.run(lambda _: bool(remote.questions))
    remote.answer()
    assert len(driver.chunks("a", 1)) == 1
    assert not driver.engine.text.asking


def test_two_prompts_take_effect_in_their_order(make_driver: MakeDriver) -> None:
    driver = make_driver(max_lead_s=FAR, overlap=False)
    remote = Elsewhere(driver)
    driver.engine.admit(SPEC, driver.now)
    driver.engine.control("a", Control(1, prompt=SECOND))
    driver.run(lambda _: len(remote.questions) == 2)
    # The second answer comes first.
    remote.questions.reverse()
    remote.answer()
    remote.answer()
    [first] = driver.chunks("a", 1)
    plain = make_driver(max_lead_s=FAR, overlap=False)
    plain.engine.admit(SPEC, plain.now)
    plain.engine.control("a", Control(1, prompt=SECOND))
    [expected] = plain.chunks("a", 1)
    assert torch.equal(first.latents, expected.latents)
