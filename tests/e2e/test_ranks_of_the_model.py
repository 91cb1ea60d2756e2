"""`baton serve` with several ranks a worker: SmolLM2 in three says what it says in one."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from asked import Asked, ask_together
from served import BATON, Served, descendants
from ties import count_near_ties

from baton import Completion

EXIT_LIMIT_S = 60.0


def test_three_ranks_a_worker_answer_like_one_process(
    serve: Callable[..., Served],
    greedy_requests: list[Asked],
    greedy_alone: list[Completion],
    sampled_requests: list[Asked],
    sampled_alone: list[Completion],
    measured: Callable[[str], None],
) -> None:
    """Greedy and sampled at once, in chunks of 64 tokens, handed over through shared memory; then again, from what is
    cached."""
    requests = [*greedy_requests[7::16], *sampled_requests[:2]]
    alone = [*greedy_alone[7::16], *sampled_alone[:2]]
    system = serve("--dtype=float32", "--tensor-parallel-size=3", "--chunk-size=64", "--max-queue-wait-s=60")
    for name in ("prefill-0", "decode-0"):
        assert len(descendants(system.pids[name])) == 2
    num_ties = 0
    for is_cached in (False, True):
        answers = ask_together(system.address, requests)
        assert {answer.served_by.transport for answer in answers} == {"shm"}
        assert all(
            bool(answer.usage.cached_tokens) == is_cached for answer in answers if answer.usage.prompt_tokens > 16
        )
        num_ties += count_near_ties(requests, alone, [answer.token_ids for answer in answers], "three ranks")
    measured(f"three ranks a worker: {num_ties} of {2 * len(requests)} answers part at near-ties")


def test_two_ranks_cannot_share_three_heads(tmp_path: Path) -> None:
    """One clear line, and nothing left running."""
    command = [BATON, "serve", "smollm2", "--tensor-parallel-size=2", "--port=0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=EXIT_LIMIT_S, check=False)
    assert done.returncode == 1
    text = "--tensor-parallel-size: must divide what smollm2 has, num_attention_heads 9, num_key_value_heads 3, "
    assert f"{text}intermediate_size 1536; got 2" in done.stderr


def test_pools_have_one_degree(tmp_path: Path) -> None:
    """Unequal ones could not hand anything over, so it is no option of a pool."""
    command = [BATON, "serve", "smollm2", "--decode-options=tensor-parallel-size=3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=EXIT_LIMIT_S, check=False)
    assert done.returncode != 0 and "--decode-options: 'tensor-parallel-size=3' is not accepted" in done.stderr
