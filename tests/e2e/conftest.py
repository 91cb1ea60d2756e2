"""The system that most tests of this folder share, and answers given one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from asked import Asked, ask_in_turn, prompts, varied_lengths
from served import Served

from baton import Completion

NUM_STREAMS = 64
NUM_SAMPLED = 16


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Starts a system of this test's own."""
    started: list[Served] = []

    def start(*flags: str, model: str = "smollm2") -> Served:
        folder = tmp_path / f"serve-{len(started)}"
        folder.mkdir()
        started.append(Served(folder, *flags, model=model))
        return started[-1]

    yield start
    for served in started:
        served.close()


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory, measured: Callable[[str], None]) -> Iterator[Served]:
    """`baton serve smollm2`, f32, as it comes, but patient: other tests compute on the same cores."""
    served = Served(tmp_path_factory.mktemp("system"), "--dtype=float32", "--max-queue-wait-s=60")
    measured(f"baton serve smollm2: health SERVING after {served.ready_s:.1f} s")
    yield served
    served.close()


@pytest.fixture(scope="session")
def greedy_requests() -> list[Asked]:
    """As many as there are concurrent streams: prompts of 5 to 300 tokens, 4 to 6 new ones, every eighth time 24."""
    found = prompts(varied_lengths(NUM_STREAMS, 300, seed=1), seed=2)
    return [Asked(prompt, max_tokens=24 if index % 8 == 7 else 4 + index % 3) for index, prompt in enumerate(found)]


@pytest.fixture(scope="session")
def sampled_requests() -> list[Asked]:
    """Seeded sampling, temperature 0.8 and top_p 0.95."""
    found = prompts(varied_lengths(NUM_SAMPLED, 300, seed=3), seed=4)
    return [Asked(prompt, max_tokens=6, seed=1000 + index) for index, prompt in enumerate(found)]


@pytest.fixture(scope="session")
def greedy_alone(system: Served, greedy_requests: list[Asked]) -> list[Completion]:
    """Answers given one at a time, without reuse."""
    answers = ask_in_turn(system.address, greedy_requests)
    assert not any(answer.usage.cached_tokens for answer in answers)
    return answers


@pytest.fixture(scope="session")
def sampled_alone(system: Served, sampled_requests: list[Asked]) -> list[Completion]:
    """Answers given one at a time, without reuse."""
    answers = ask_in_turn(system.address, sampled_requests)
    assert not any(answer.usage.cached_tokens for answer in answers)
    return answers
