"""The same request gets the same tokens however it is served: float32, greedy and seeded sampling.

What is compared with are answers given one at a time, by chunks of at most 512 tokens, over shared memory, without
reuse. `ties.py` says what "the same" means; near-ties are counted and shown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from asked import Asked, ask_in_turn, ask_together
from served import Served
from ties import count_near_ties, logits_after, possible_draws
from transports_here import needs_mooncake

from baton import Completion

CONFIGURATIONS = {
    "chunk 16, grpc": ("grpc", "--chunk-size=16", "--kv-transports=grpc"),
    "chunk 64, mooncake": ("mooncake", "--chunk-size=64", "--kv-transports=mooncake", "--trusted-transfer-network"),
    "mixed": ("", "--num-prefill=0", "--num-decode=0", "--num-mixed=1"),
}
"""How KV comes to decode, and the flags."""
Note = Callable[[str], None]


def test_64_concurrent_streams_equal_one_at_a_time(
    serve: Callable[..., Served],
    greedy_requests: list[Asked],
    greedy_alone: list[Completion],
    sampled_requests: list[Asked],
    sampled_alone: list[Completion],
    measured: Note,
) -> None:
    """64 greedy ones, and the 16 sampled ones beside them, on a system that has nothing cached."""
    requests, alone = [*greedy_requests, *sampled_requests], [*greedy_alone, *sampled_alone]
    answers = ask_together(serve("--dtype=float32").address, requests)
    assert len(answers) == 64 + 16
    # One that was given back and tried again finds its own prompt.
    first_tries = [answer for answer in answers if answer.served_by.num_attempts == 1]
    assert {answer.served_by.transport for answer in first_tries} == {"shm"}
    assert not any(answer.usage.cached_tokens for answer in first_tries)
    ties = count_near_ties(requests, alone, [answer.token_ids for answer in answers], "80 at once")
    measured(f"64 greedy streams and 16 sampled ones against one at a time: {ties} answers part at near-ties")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[needs_mooncake] if "mooncake" in name else []) for name in CONFIGURATIONS],
)
def test_answers_equal_those_given_alone(
    name: str,
    serve: Callable[..., Served],
    requests_and_answers: tuple[list[Asked], list[Completion]],
    measured: Note,
) -> None:
    """8 greedy and 8 sampled requests at once, on a system that has nothing cached."""
    requests, alone = requests_and_answers
    transport, *flags = CONFIGURATIONS[name]
    answers = ask_together(serve("--dtype=float32", *flags).address, requests)
    # One that was given back and tried again finds its own prompt, and may need no other worker.
    first_tries = [answer for answer in answers if answer.served_by.num_attempts == 1]
    assert {answer.served_by.transport for answer in first_tries} == {transport}
    assert not any(answer.usage.cached_tokens for answer in first_tries)
    ties = count_near_ties(requests, alone, [answer.token_ids for answer in answers], name)
    measured(f"equality, {name}: {ties} of {len(requests)} answers part at near-ties")


def test_answers_with_prefix_hits_equal_those_without(
    system: Served, requests_and_answers: tuple[list[Asked], list[Completion]], measured: Note
) -> None:
    """In groups small enough that none loses its cached blocks to another."""
    requests, alone = requests_and_answers
    ties = 0
    for group in (slice(0, 8), slice(8, 16)):
        ask_together(system.address, [replace(request, max_tokens=1) for request in requests[group]])
        answers = ask_together(system.address, requests[group])
        for request, answer in zip(requests[group], answers, strict=True):
            # The last prompt token is always computed, and reuse is by whole blocks of 16.
            assert answer.usage.cached_tokens == (len(request.prompt_token_ids) - 1) // 16 * 16
        token_ids = [answer.token_ids for answer in answers]
        ties += count_near_ties(requests[group], alone[group], token_ids, "prefix hits")
    measured(f"equality, prefix hits: {ties} of 16 answers part at near-ties")


def test_sampled_tokens_are_the_draws_that_seed_and_position_name(
    sampled_requests: list[Asked], sampled_alone: list[Completion]
) -> None:
    """The rule for near-ties itself: from logits computed here it gives what the service said, and hardly more."""
    request, answer = sampled_requests[0], sampled_alone[0]
    for place in (0, request.max_tokens - 1):
        prefix = [*request.prompt_token_ids, *answer.token_ids[:place]]
        possible = possible_draws(logits_after(prefix), request, position=len(prefix))
        assert answer.token_ids[place] in possible and len(possible) <= 2


@pytest.fixture(scope="module")
def requests_and_answers(
    greedy_requests: list[Asked],
    greedy_alone: list[Completion],
    sampled_requests: list[Asked],
    sampled_alone: list[Completion],
) -> tuple[list[Asked], list[Completion]]:
    """The greedy requests of most tokens, and every other sampled one."""
    return [*greedy_requests[7::8], *sampled_requests[::2]], [*greedy_alone[7::8], *sampled_alone[::2]]


def test_kv_in_8_bits_is_handed_over_as_it_is(serve: Callable[..., Served], greedy_requests: list[Asked]) -> None:
    """One at a time, so that all systems run the same steps: then not a bit may differ."""
    requests = greedy_requests[2:8]
    flags = ("--dtype=float32", "--kv-cache-dtype=int8")
    alone = serve(*flags, "--num-prefill=0", "--num-decode=0", "--num-mixed=1")
    expected = ask_in_turn(alone.address, requests)
    assert not any(answer.served_by.transport for answer in expected)
    alone.close()
    for transport in ("shm", "grpc"):
        answers = ask_in_turn(serve(*flags, f"--kv-transports={transport}").address, requests)
        assert {answer.served_by.transport for answer in answers} == {transport}
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
