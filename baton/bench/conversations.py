"""The scenario of sessions: conversations of five turns, each of which repeats what was said before and adds a little.

A turn is asked three ways that cost the same without reuse: as the whole conversation, as what is new alone
(`append`), and cold, as the same prompt with a first token of its own, which no cache can know.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from baton.bench.asks import Ask
from baton.bench.load import Outcome
from baton.bench.options import Sizes, known
from baton.bench.rows import Figure, Row, spread
from baton.bench.scenario import Phase, Run, Scenario, Service

NUM_TURNS = 5
WAYS = ("whole", "append", "cold")


@dataclass(slots=True)
class Talk:
    """A conversation asked in one way."""

    way: str
    """One of WAYS."""
    session_id: str | None
    """Its session; None where nothing is to be reused."""
    token_ids: tuple[int, ...] = ()
    """What was said so far, by both sides."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A turn and what came of it."""

    outcome: Outcome
    """As the client saw it."""
    num_common: int
    """Tokens of its prompt that were said before in the session."""


async def _sessions(run: Run) -> list[Row]:
    """As many conversations at a time as there may be requests in flight; each way one after the other."""
    num_talking = asyncio.Semaphore(known(run.sizes.max_concurrency))
    asked: defaultdict[str, list[Asked]] = defaultdict(list)

    async def converse(service: Service, phase: Phase, index: int, new: list[tuple[int, ...]]) -> None:
        async with num_talking:
            talks = [Talk(way, None if way == "cold" else f"bench-{run.config.seed}-{index}-{way}") for way in WAYS]
            for turn, ids in enumerate(new, start=1):
                for talk in talks:
                    name = f"{talk.way}-{turn}"
                    asked[name].append(await _say(run, service, phase, name, talk, ids))

    async with run.service() as service:
        new = [list(_new_tokens(run, service)) for _ in range(known(run.sizes.num_requests))]
        async with service.phase("sessions") as phase, asyncio.TaskGroup() as tasks:
            for index, each in enumerate(new):
                tasks.create_task(converse(service, phase, index, each))
    names = [f"{way}-{turn}" for way in WAYS for turn in range(1, NUM_TURNS + 1)]
    return [phase.row(name, name, figures=session_figures(asked, name, phase.load.outcomes[name])) for name in names]


def _new_tokens(run: Run, service: Service) -> Iterator[tuple[int, ...]]:
    """What the user says in each turn."""
    yield service.asks.ids(known(run.sizes.long_prompt_tokens))
    for _ in range(NUM_TURNS - 1):
        yield service.asks.ids(known(run.sizes.prompt_tokens))


async def _say(run: Run, service: Service, phase: Phase, name: str, talk: Talk, new: tuple[int, ...]) -> Asked:
    # A first token of its own for each way, and for each cold turn.
    before = talk.token_ids or service.asks.ids(1)
    output_tokens, num_before = known(run.sizes.output_tokens), len(talk.token_ids)
    if talk.way == "cold":
        ask = Ask((*service.asks.ids(1), *before[1:], *new), output_tokens)
    elif talk.way == "append" and num_before:
        ask = Ask(new, output_tokens, session_id=talk.session_id, session_tokens=num_before)
    else:
        ask = Ask((*before, *new), output_tokens, session_id=talk.session_id)
    outcome = await phase.load.send(name, ask)
    if outcome.is_lost:
        # What a client does then.
        outcome = await phase.load.send(name, Ask((*before, *new), output_tokens, session_id=talk.session_id))
    talk.token_ids = (*before, *new, *outcome.token_ids)
    return Asked(outcome, num_before if talk.session_id else 0)


def session_figures(asked: dict[str, list[Asked]], name: str, sent: list[Outcome]) -> dict[str, Figure]:
    """Of one way and turn: what could have been reused, what of it was not, and the time to the first token by that of
    equal prompts without reuse. `sent` has those for which the session was lost as well."""
    good = [each for each in asked[name] if each.outcome.finish is not None]
    missed = [each.num_common - each.outcome.finish.usage.cached_tokens for each in good if each.outcome.finish]
    figures: dict[str, Figure] = {
        "common_tokens": sum(each.num_common for each in good),
        "most_missed": max([*missed, 0]),
    }
    way, _, turn = name.partition("-")
    if way != "cold":
        mine, cold = _median_ttft_s(asked[name]), _median_ttft_s(asked[f"cold-{turn}"])
        figures["ttft_vs_cold"] = None if mine is None or cold is None else mine / cold
        figures["session_lost"] = sum(each.is_lost for each in sent)
    return figures


def _median_ttft_s(asked: list[Asked]) -> float | None:
    outcomes = [each.outcome for each in asked]
    times = spread([each.message_times_s[0] - each.sent_s for each in outcomes if each.message_times_s])
    return None if times is None else times.p50


CONVERSATIONS = (
    Scenario(
        "sessions",
        "what reuse of a session's KV is worth, turn by turn",
        Sizes(num_requests=6, max_concurrency=1, long_prompt_tokens=1024, prompt_tokens=48, output_tokens=32),
        _sessions,
    ),
)
