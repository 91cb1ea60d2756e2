"""Conversations with the real model: reuse changes nothing in what it says, and the end of a session frees its KV."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from asked import ANSWER_LIMIT_S, Asked, prompts
from served import Served
from ties import count_near_ties

from baton import Client, Completion, Conversation

BLOCK = 16
ANSWER_TOKENS = 12


def test_a_conversation_by_append_says_what_it_says_without_reuse(
    system: Served, measured: Callable[[str], None]
) -> None:
    options: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": ANSWER_TOKENS}
    said: tuple[int, ...] = ()
    asked: list[Asked] = []
    answers: list[Completion] = []
    with Client(system.address, timeout_s=ANSWER_LIMIT_S) as client:
        for turn, new in enumerate(prompts([300, 24, 40], seed=40)):
            append = {"append": True, "session_tokens": len(said)} if turn else {}
            answers.append(client.complete(prompt_token_ids=new, session_id="append", **append, **options))
            num_common, cached = len(said), answers[-1].usage.cached_tokens
            assert num_common - BLOCK <= cached <= num_common
            assert (answers[-1].served_by.transport == "") == (turn > 0), "the holder computes what is new itself"
            asked.append(Asked((*said, *new), ANSWER_TOKENS))
            said = (*said, *new, *answers[-1].token_ids)
        assert client.end_session("append")
        alone = []
        for request in reversed(asked):
            tokens = request.prompt_token_ids
            options["logprobs"], options["top_logprobs"] = True, 2
            alone.append(client.complete(prompt_token_ids=tokens, session_id="whole", **options))
            if request is asked[-1]:
                assert alone[-1].usage.cached_tokens == 0, "nothing was left of the session"
            client.end_session("whole")
    ties = count_near_ties(asked, alone[::-1], [answer.token_ids for answer in answers], "turns by append")
    measured(f"a conversation by append against its turns alone: {ties} of {len(asked)} answers part at near-ties")


def test_a_prefill_worker_goes_on_from_lent_kv(serve: Callable[..., Served], measured: Callable[[str], None]) -> None:
    """It computes what is new, on what decode has generated, and the answers are those without reuse."""
    system = serve("--dtype=float32", "--turn-placement=lent", "--local-turn-max-tokens=0")
    options: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 40}
    with Client(system.address, timeout_s=ANSWER_LIMIT_S) as client:
        said: tuple[int, ...] = ()
        asked: list[Asked] = []
        answers: list[Completion] = []
        for new in prompts([300, 120, 90], seed=41):
            answers.append(client.complete(prompt_token_ids=(*said, *new), session_id="lent", **options))
            assert len(said) - BLOCK <= answers[-1].usage.cached_tokens <= len(said)
            assert answers[-1].served_by.transport != "", "what is new was handed over"
            asked.append(Asked((*said, *new), 40))
            said = (*said, *new, *answers[-1].token_ids)
        client.end_session("lent")
        options |= {"logprobs": True, "top_logprobs": 2}
        alone = []
        for request in reversed(asked):
            alone.append(client.complete(prompt_token_ids=request.prompt_token_ids, session_id="alone", **options))
            client.end_session("alone")
    ties = count_near_ties(asked, alone[::-1], [answer.token_ids for answer in answers], "turns on lent KV")
    measured(f"turns on lent KV against the same alone: {ties} of {len(asked)} answers part at near-ties")


def test_messages_are_appended_where_the_answer_ended(system: Served) -> None:
    """The template's words between two turns are the same as in a conversation that is sent whole."""
    with Client(system.address, timeout_s=ANSWER_LIMIT_S) as client:
        talk = Conversation(client, system="You are a clerk.")
        usages = []
        for question in ("Name a colour.", "Name another one.", "And a third."):
            chunks = list(talk.say(question, temperature=0.0, max_tokens=32))
            assert chunks[-1].finish is not None
            usages.append(chunks[-1].finish.usage)
        assert talk.num_lost == 0
        for before, after in itertools.pairwise(usages):
            assert before.session_tokens - BLOCK <= after.cached_tokens <= before.session_tokens < after.prompt_tokens
        whole = client.complete(messages=[*talk.messages, {"role": "user", "content": "Thanks."}], max_tokens=1)
        *_, last = talk.say("Thanks.", temperature=0.0, max_tokens=1)
        assert last.finish is not None and last.finish.usage.prompt_tokens == whole.usage.prompt_tokens
        assert talk.end()
