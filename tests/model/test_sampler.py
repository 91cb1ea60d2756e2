"""The sampler against a slow specification in plain Python, golden numbers, and statistics over fixed seeds."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from engine.batch import SampleRow
from engine.request import SamplingParams
from engine.sampler import (
    NUM_LIKELY,
    LogitsNotFinite,
    adjust,
    choose,
    choose_among_likely,
    draw,
    nucleus_floor,
    sample,
    uniform,
)

VOCAB = 50
GOLDEN = [0.7990078641386918, 0.5730097400670833, 0.5258133003495684, 0.3845527036586238]


def row(sampling: SamplingParams, position: int = 10, **changes: object) -> SampleRow:
    return replace(SampleRow(0, position, sampling), **changes)  # type: ignore[arg-type]


def random_logits(seed: int, vocab: int = VOCAB, scale: float = 3.0) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(vocab, generator=generator) * scale).tolist()


def adjusted_by_definition(logits: list[float], request: SampleRow) -> list[float]:
    """Bias, penalties, suppression, one token at a time."""
    sampling, result = request.sampling, list(logits)
    for token_id, bias in sampling.logit_bias:
        result[token_id] += bias
    for token_id in range(len(result)):
        if token_id in request.prompt_token_ids or token_id in request.output_token_ids:
            penalty = sampling.repetition_penalty
            result[token_id] = result[token_id] / penalty if result[token_id] > 0 else result[token_id] * penalty
        times = request.output_token_ids.count(token_id)
        if times:
            result[token_id] -= sampling.frequency_penalty * times + sampling.presence_penalty
    for token_id in request.suppressed_token_ids:
        result[token_id] = -math.inf
    return result


def kept_by_definition(logits: list[float], sampling: SamplingParams) -> list[float]:
    """Probabilities after temperature and the three filters; 0 where cut off."""
    highest = max(logits)
    weights = [math.exp((logit - highest) / sampling.temperature) for logit in logits]
    if sampling.top_k:
        floor = sorted(weights, reverse=True)[min(sampling.top_k, len(weights)) - 1]
        weights = [weight if weight >= floor else 0.0 for weight in weights]
    if sampling.top_p < 1:
        total, running, floor = sum(weights), 0.0, 0.0
        for weight in sorted(weights, reverse=True):
            running, floor = running + weight, weight
            if running >= sampling.top_p * total:
                break
        weights = [weight if weight >= floor else 0.0 for weight in weights]
    weights = [weight if weight >= sampling.min_p * max(weights) else 0.0 for weight in weights]
    return [weight / sum(weights) for weight in weights]


def choice_by_definition(logits: list[float], request: SampleRow) -> int:
    """The specification: one token."""
    sampling = request.sampling
    adjusted = adjusted_by_definition(logits, request)
    if sampling.temperature == 0:
        return adjusted.index(max(adjusted))
    running, target = 0.0, uniform(sampling.seed, request.position)
    kept = kept_by_definition(adjusted, sampling)
    for token_id, probability in enumerate(kept):
        running += probability
        if running > target:
            return token_id
    return max(token_id for token_id, probability in enumerate(kept) if probability)


def random_request(rng: random.Random) -> SampleRow:
    """Any mixture of settings."""

    def maybe(value: float, off: float) -> float:
        return value if rng.random() < 0.5 else off

    sampling = SamplingParams(
        temperature=maybe(rng.choice([0.05, 0.7, 1.0, 2.5]), 0.0) if rng.random() < 0.3 else rng.uniform(0.2, 2),
        top_p=maybe(rng.uniform(0.05, 0.99), 1.0),
        top_k=int(maybe(rng.randrange(1, VOCAB + 10), 0)),
        min_p=maybe(rng.uniform(0, 0.5), 0.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0),
        seed=rng.randrange(2**64),
        logit_bias=tuple((rng.randrange(VOCAB), rng.uniform(-5, 5)) for _ in range(rng.choice([0, 0, 3]))),
    )
    return SampleRow(
        row=0,
        position=rng.randrange(10_000),
        sampling=sampling,
        suppressed_token_ids=tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 5]))),
        prompt_token_ids=tuple(rng.choices(range(VOCAB), k=8)),
        output_token_ids=tuple(rng.choices(range(VOCAB), k=8)),
    )


def test_random_requests_equal_the_specification_alone_and_in_one_batch() -> None:
    rng = random.Random(1)
    requests = [random_request(rng) for _ in range(400)]
    logits = [random_logits(seed) for seed in range(len(requests))]
    expected = [choice_by_definition(values, request) for values, request in zip(logits, requests, strict=True)]
    together = sample(torch.tensor(logits), requests)
    assert [answer.token_id for answer in together] == expected
    alone = [sample(torch.tensor([logits[index]]), [request])[0].token_id for index, request in enumerate(requests)]
    assert alone == expected
    assert len(set(expected)) > VOCAB // 2


def test_logits_are_left_as_they_are() -> None:
    logits = torch.tensor([random_logits(3)])
    before = logits.clone()
    sample(logits, [random_request(random.Random(2))])
    assert torch.equal(logits, before)


def test_uniform_has_these_values() -> None:
    """Golden: a draw must stay the same between releases, processes and machines."""
    assert [uniform(0, 0), uniform(1, 0), uniform(0, 1), uniform(2**64 - 1, 131_071)] == GOLDEN
    assert all(0 <= uniform(seed, 5) < 1 for seed in range(2000))


def test_uniform_is_uniform_over_seeds_and_over_positions() -> None:
    for numbers in ([uniform(seed, 3) for seed in range(20_000)], [uniform(3, position) for position in range(20_000)]):
        counts = Counter(int(number * 20) for number in numbers)
        # 20 bins of 1,000 expected: chi-square with 19 degrees of freedom is below 43.8 for 999 of 1,000 such sets.
        assert sum((counts[index] - 1000) ** 2 / 1000 for index in range(20)) < 43.8
        assert abs(sum(a * b for a, b in pairwise(numbers)) / len(numbers) - 0.25) < 0.005


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([random_logits(9, vocab=8, scale=1.0)])
    num_draws = 20_000
    sampling = SamplingParams(temperature=0.8)
    requests = [row(replace(sampling, seed=seed)) for seed in range(num_draws)]
    counts = Counter(answer.token_id for answer in sample(logits.expand(num_draws, -1), requests))
    expected = kept_by_definition(logits[0].tolist(), sampling)
    chi_square = sum((counts[i] - num_draws * p) ** 2 / (num_draws * p) for i, p in enumerate(expected))
    assert chi_square < 24.3  # 7 degrees of freedom, 999 of 1,000


def test_same_seed_and_position_same_token_else_not() -> None:
    logits = torch.zeros(1, 1000)

    def tokens(seed: int) -> list[int]:
        sampling = SamplingParams(temperature=1.0, seed=seed)
        return [sample(logits, [row(sampling, position)])[0].token_id for position in range(20)]

    assert tokens(4) == tokens(4)
    assert tokens(4) != tokens(5)
    assert len(set(tokens(4))) > 10


def test_near_ties_do_not_flip_the_draw() -> None:
    """Two tokens change their order of probability by less than rounding shows; the draws stay."""
    logits = torch.tensor([random_logits(5)])
    logits[0, 30] = logits[0, 7]
    nudged = logits.clone()
    nudged[0, 30] = torch.nextafter(logits[0, 7], torch.tensor(math.inf))
    requests = [row(SamplingParams(temperature=1.0, seed=seed)) for seed in range(500)]
    first = sample(logits.expand(500, -1), requests)
    assert first == sample(nudged.expand(500, -1), requests)


def test_draw_never_takes_weight_zero() -> None:
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]] * 4, dtype=torch.float64)
    last = 1 - 2.0**-53
    assert draw(weights, torch.tensor([0.0, 0.2999999, 0.3000001, last], dtype=torch.float64)).tolist() == [1, 1, 3, 3]
    generator = torch.Generator().manual_seed(0)
    many = torch.rand(200, 333, generator=generator, dtype=torch.float64)
    many[:, -40:] = 0
    assert (draw(many, torch.full((200,), last, dtype=torch.float64)) < 333 - 40).all()


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999999, 1 - 1e-16])
@pytest.mark.parametrize("scale", [0.0, 1e-4, 0.5, 5.0])
def test_nucleus_of_a_large_vocabulary(top_p: float, scale: float) -> None:
    """Flat distributions need more than the first look; equal weights stay or go together."""
    generator = torch.Generator().manual_seed(1)
    weights = (torch.randn(5 * NUM_LIKELY, generator=generator, dtype=torch.float64) * scale).exp()
    floor = nucleus_floor(weights, top_p)
    kept = weights[weights >= floor].sum()
    above = weights[weights > floor].sum()
    assert kept >= top_p * weights.sum() * (1 - 1e-12)
    assert above < top_p * weights.sum() * (1 + 1e-12)


def test_ties_at_the_edge_of_top_k_stay_together() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    sampling = SamplingParams(temperature=1.0, top_k=2)
    answers = sample(logits.expand(400, -1), [row(replace(sampling, seed=seed)) for seed in range(400)])
    assert {answer.token_id for answer in answers} == {0, 1, 2}


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=1.0, top_k=1), SamplingParams(temperature=1e-300)]
)
def test_the_highest_wins_and_the_lowest_id_among_equals(sampling: SamplingParams) -> None:
    logits = torch.tensor([[0.0, 1.0, 5.0, -1.0], [3.0, 1.0, 2.0, -1.0]])
    assert [answer.token_id for answer in sample(logits, [row(sampling)] * 2)] == [2, 0]
    tied = torch.tensor([[0.0, 5.0, 5.0, 5.0]])
    assert sample(tied, [row(SamplingParams())])[0].token_id == 1
    assert sample(tied, [row(SamplingParams(logit_bias=((0, 1.0),)))])[0].token_id == 1


def test_min_p_of_one_keeps_the_highest_and_its_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.9]])
    sampling = SamplingParams(temperature=1.0, min_p=1.0)
    answers = sample(logits.expand(100, -1), [row(replace(sampling, seed=seed)) for seed in range(100)])
    assert {answer.token_id for answer in answers} == {1, 2}


def test_adjusted_logits_equal_the_specification() -> None:
    """All of them, where a choice would show only the highest."""
    rng = random.Random(8)
    for seed in range(100):
        request, logits = random_request(rng), random_logits(seed, scale=0.7)
        adjusted = adjust(torch.tensor(logits), request)
        expected = torch.tensor(adjusted_by_definition(logits, request))
        torch.testing.assert_close(adjusted, expected, atol=1e-5, rtol=0)


def test_suppressed_ids_are_never_chosen() -> None:
    logits = torch.tensor([[9.0, 8.0, 1.0, 0.0]])
    greedy = row(SamplingParams(), suppressed_token_ids=(0, 1))
    assert sample(logits, [greedy])[0].token_id == 2
    drawn = [row(SamplingParams(temperature=5.0, seed=s), suppressed_token_ids=(0, 1)) for s in range(200)]
    assert {answer.token_id for answer in sample(logits.expand(200, -1), drawn)} == {2, 3}


def test_logprobs_are_those_of_the_logits_as_they_came() -> None:
    logits = torch.tensor([random_logits(6), random_logits(7), random_logits(8)])
    sampling = SamplingParams(temperature=0.3, top_k=3, repetition_penalty=1.9, seed=3, logprobs=True, top_logprobs=4)
    plain = SamplingParams(temperature=0.3)
    requests = [
        row(sampling, prompt_token_ids=(1, 2, 3)),
        row(plain),
        row(SamplingParams(logprobs=True)),
    ]
    answers = sample(logits, requests)
    for index in (0, 2):
        values = logits[index].double().tolist()
        normaliser = math.log(sum(math.exp(value) for value in values))
        answer = answers[index]
        assert answer.logprob == pytest.approx(values[answer.token_id] - normaliser, abs=1e-5)
    best = sorted(range(VOCAB), key=lambda token_id: -logits[0, token_id])[:4]
    assert [token_id for token_id, _ in answers[0].top_logprobs] == best
    assert answers[0].top_logprobs[0][1] == pytest.approx(float(logits[0].log_softmax(-1)[best[0]]), abs=1e-6)
    assert answers[1].logprob is None and answers[1].top_logprobs == ()
    assert answers[2].top_logprobs == ()


def test_top_logprobs_stop_at_the_vocabulary() -> None:
    answer = sample(torch.tensor([[1.0, 2.0, 2.0]]), [row(SamplingParams(logprobs=True, top_logprobs=20))])[0]
    assert [token_id for token_id, _ in answer.top_logprobs] == [1, 2, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_output_that_is_not_finite_names_its_rows(bad: float) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, 17] = bad
    for sampling in (SamplingParams(), SamplingParams(temperature=1.0)):
        requests = [row(sampling, position) for position in (5, 6, 7)]
        with pytest.raises(LogitsNotFinite, match=r"not finite; token positions: 6$") as caught:
            sample(logits, requests)
        assert caught.value.rows == (requests[1],)


def test_nothing_left_to_choose_is_an_error() -> None:
    with pytest.raises(LogitsNotFinite):
        sample(torch.zeros(1, 3), [row(SamplingParams(), suppressed_token_ids=(0, 1, 2))])


def test_minus_infinity_is_a_logit_like_any_other() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf]])
    answers = [sample(logits, [row(SamplingParams(temperature=t, top_p=0.9, min_p=0.1))])[0] for t in (0.0, 1.0)]
    assert [answer.token_id for answer in answers] == [1, 1]


def test_no_rows_no_samples() -> None:
    assert sample(torch.zeros(0, VOCAB), []) == []


LIKELY = [
    SamplingParams(temperature=0.8, top_k=50, seed=3),
    SamplingParams(temperature=1.5, top_k=NUM_LIKELY - 1, top_p=0.9, seed=4),
    SamplingParams(temperature=1.0, top_k=7, min_p=0.1, seed=5),
    SamplingParams(temperature=0.0),
]


@pytest.mark.parametrize("vocab", [5, 900, 5000])
def test_few_likely_tokens_are_enough_where_top_k_says_so(vocab: int) -> None:
    """What is left on a device changes nothing: the answers are those of the whole vocabulary."""
    generator = torch.Generator().manual_seed(vocab)
    rows = [replace(row(params), position=position) for position in range(60) for params in LIKELY]
    logits = torch.randn(len(rows), vocab, generator=generator) * 3
    chosen = choose_among_likely(logits, rows)
    assert chosen is not None and chosen.tolist() == choose(logits, rows).tolist()
    assert len({*chosen.tolist()}) > min(vocab, 50) // 2


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 0},
        {"top_k": NUM_LIKELY},
        {"logprobs": True},
        {"top_logprobs": 2},
        {"logit_bias": ((3, 1.0),)},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
    ],
)
def test_all_tokens_are_looked_at_where_they_may_matter(changes: dict[str, object]) -> None:
    logits = torch.randn(2, 3000)
    mixed = [row(LIKELY[0]), row(replace(LIKELY[0], **changes))]  # type: ignore[arg-type]
    assert choose_among_likely(logits[:1], mixed[:1]) is not None
    assert choose_among_likely(logits, mixed) is None
    assert choose_among_likely(logits[:1], [row(LIKELY[0], suppressed_token_ids=(5,))]) is None


@pytest.mark.parametrize("params", [LIKELY[0], LIKELY[3]])
def test_ties_that_reach_beyond_the_likely_need_all_tokens(params: SamplingParams) -> None:
    logits = torch.zeros(1, 3000)
    assert choose_among_likely(logits, [row(params)]) is None
    logits[0, :60] = 1
    chosen = choose_among_likely(logits, [row(params)])
    assert chosen is not None and chosen.tolist() == choose(logits, [row(params)]).tolist()
