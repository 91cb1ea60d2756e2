"""A conversation against a scripted router: what is sent, what is taken back, and what is sent again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fake_router import FakeRouter

from baton import Client, Conversation
from runtime.errors import Overloaded


async def talking(address: str, talk: Callable[[Conversation], Any], **options: Any) -> Any:
    """Talks in a thread, since the router lives in this event loop."""

    def run() -> Any:
        with Client(address, timeout_s=20) as client:
            return talk(Conversation(client, **options))

    return await asyncio.to_thread(run)


def say(conversation: Conversation, content: str, **sampling: Any) -> str:
    return "".join(chunk.text for chunk in conversation.say(content, **sampling))


async def test_each_turn_sends_what_is_new(address: str, router: FakeRouter) -> None:
    def talk(conversation: Conversation) -> list[dict[str, str]]:
        assert say(conversation, "one", seed=3) == "kind one "
        assert say(conversation, "two words", max_tokens=9) == "two words "
        assert say(conversation, "three") == "three "
        assert conversation.num_lost == 0 and not conversation.end()
        return conversation.messages

    messages = await talking(address, talk, system="kind", session_id="mine", priority="high")
    assert [each["content"] for each in messages] == [
        "kind",
        "one",
        "kind one ",
        "two words",
        "two words ",
        "three",
        "three ",
    ]
    first, second, third = router.requests
    assert [len(request.messages) for request in router.requests] == [2, 1, 1]
    assert [request.append for request in router.requests] == [False, True, True]
    assert (second.session_tokens, third.session_tokens) == (5, 5), "3 of prompt and the words that were said"
    assert {request.session_id for request in router.requests} == {"mine"}
    assert (first.sampling.seed, second.sampling.max_tokens, third.priority) == (3, 9, first.priority)
    assert router.ended_sessions == ["mine"]


async def test_everything_is_sent_again_where_the_session_is_lost(address: str, router: FakeRouter) -> None:
    def talk(conversation: Conversation) -> None:
        say(conversation, "one")
        router.loses_sessions = True
        assert say(conversation, "two") == "one one two "
        assert conversation.num_lost == 1
        router.loses_sessions = False
        say(conversation, "three")

    await talking(address, talk)
    assert [(request.append, len(request.messages)) for request in router.requests] == [
        (False, 1),
        (True, 1),
        (False, 3),
        (True, 1),
    ]


async def test_a_turn_that_fails_or_is_left_is_taken_back(address: str, router: FakeRouter) -> None:
    def talk(conversation: Conversation) -> list[dict[str, str]]:
        say(conversation, "one")
        before = list(conversation.messages)
        stream = conversation.say("left alone")
        next(stream)
        stream.close()
        assert conversation.messages == before
        router.error = Overloaded("full", 1.0)
        with pytest.raises(Overloaded):
            say(conversation, "refused")
        assert conversation.messages == before
        router.error = None
        say(conversation, "two")
        return before

    before = await talking(address, talk)
    assert (router.requests[-1].append, router.requests[-1].session_tokens) == (True, 4)
    assert len(before) == 2


async def test_conversations_have_sessions_of_their_own(address: str, router: FakeRouter) -> None:
    for _ in range(2):
        await talking(address, lambda conversation: say(conversation, "hi"))
    assert router.requests[0].session_id != router.requests[1].session_id
