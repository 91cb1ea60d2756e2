"""`LLM`: the system behind one object, over the tracer's processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from baton import LLM, Config
from engine.batch import SampleRow
from engine.request import SamplingParams
from engine.tracer import expected_tokens
from runtime.errors import BatonError, ConfigError, InvalidArgument


def expected_text(prompt: str, num_tokens: int) -> str:
    """What the tracer answers, greedily, without end-of-sequence."""
    row = SampleRow(0, 0, SamplingParams(temperature=0.0, ignore_eos=True))
    return bytes(token for token in expected_tokens(prompt.encode(), num_tokens, row) if token < 256).decode()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """One system for the tests that only ask."""
    with LLM("tracer", device="cpu", max_batch_size=32) as llm:
        yield llm


def test_one_prompt_gives_its_text(llm: LLM) -> None:
    """With a priority, as in the first line that users try."""
    text = llm.generate("Hello", priority="high", max_tokens=12, temperature=0.0, ignore_eos=True)
    assert text == expected_text("Hello", 12)


def test_several_prompts_give_texts_in_their_order(llm: LLM) -> None:
    """More of them than seats."""
    prompts = [f"prompt {index}" for index in range(100)]
    texts = llm.generate(prompts, max_tokens=8, temperature=0.0, ignore_eos=True)
    assert texts == [expected_text(prompt, 8) for prompt in prompts]


def test_a_stream_comes_in_pieces_and_may_be_left(llm: LLM) -> None:
    """The pieces make the text; a stream that is left early frees its request."""
    pieces = list(llm.stream("Hello", max_tokens=50, temperature=0.0, ignore_eos=True))
    assert len(pieces) > 1 and "".join(pieces) == expected_text("Hello", 50)
    for _ in llm.stream("Hello", max_tokens=20_000, temperature=0.0, ignore_eos=True):
        break
    assert llm.generate("Hello", max_tokens=5, temperature=0.0, ignore_eos=True) == expected_text("Hello", 5)


def test_a_completion_says_who_served_it(llm: LLM) -> None:
    """Two workers, and the usage."""
    completion = llm.complete("Hello", max_tokens=3, ignore_eos=True)
    assert completion.usage.completion_tokens == 3
    assert completion.served_by.prefill_worker_id != completion.served_by.decode_worker_id


def test_bad_input_is_the_callers_error(llm: LLM) -> None:
    """Named as everywhere; one bad prompt of several fails the call."""
    with pytest.raises(InvalidArgument, match="temperature"):
        llm.generate("Hello", temperature=-1.0)
    with pytest.raises(InvalidArgument):
        llm.generate(["fine", ""], max_tokens=2)


def test_options_that_do_not_exist_are_refused() -> None:
    """Before anything starts."""
    with pytest.raises(ConfigError, match="max_bach_size"):
        LLM("tracer", max_bach_size=3)
    with pytest.raises(ConfigError, match="npu:0"):
        LLM("tracer", device="npu:0")


def test_a_model_that_cannot_be_loaded_is_said_at_the_start() -> None:
    """With the child's own words."""
    with pytest.raises(BatonError, match="no such folder"):
        LLM("/nowhere/at/all")


def test_close_leaves_no_process_and_may_be_repeated() -> None:
    """The processes are this one's children."""
    before = _children()
    llm = LLM(config=Config(model="tracer", num_decode=2), model="tracer")
    children = _children() - before
    assert len(children) >= 4
    llm.close()
    llm.close()
    assert not children & _children()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("Hello")


def _children() -> set[int]:
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        children = {int(word) for word in file.read().split()}
    for task in os.listdir("/proc/self/task"):
        # A thread that has ended meanwhile has left its children to others.
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{task}/children", encoding="ascii") as file:
            children |= {int(word) for word in file.read().split()}
    return children
