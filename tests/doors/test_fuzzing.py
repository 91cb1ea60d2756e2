"""The short form of `tests/tools/fuzz.py`: every port of live processes, some thousand messages each."""

from __future__ import annotations

import io

from fuzz import fuzz

NUM_MESSAGES = 6_000


async def test_no_port_breaks_leaks_or_answers() -> None:
    output = io.StringIO()
    tally = await fuzz(NUM_MESSAGES, seed=1, report=output)
    assert sum(tally.num_messages.values()) >= NUM_MESSAGES
    for kind, count in tally.num_messages.items():
        answered = tally.num_answered[kind]
        assert answered == 0 if "no credential" in kind else 0 < answered < count, (kind, output.getvalue())
