"""Every order in which the messages of one request can arrive, and random orders of many requests at once."""

from __future__ import annotations

from pathlib import Path

from every_order import Follower, every_order
from playing import Play
from random_walks import walk
from whole_system import Ask, Size

NUM_WALKS = 120
ONE_PAIR = Size(num_prefill=1, num_decode=1, has_probes=False)
ONE_CHUNK = Size(num_prefill=1, num_decode=1, prefill={"chunk_size": 8}, has_probes=False)
CASES: dict[str, tuple[list[Ask], Size]] = {
    "decode alone": ([Ask()], Size(num_prefill=0, num_decode=1)),
    "three blocks in one chunk": ([Ask()], ONE_CHUNK),
}
DEEP_CASES: dict[str, tuple[list[Ask], Size]] = {
    "three blocks in two chunks": ([Ask()], ONE_PAIR),
    "a stop string in the first token": ([Ask(num_tokens=3, stop=Ask().expected()[1][0])], ONE_CHUNK),
    "a stop string in the second token": ([Ask(num_tokens=3, stop=Ask().expected()[1][1])], ONE_CHUNK),
    "two at a decode worker alone": ([Ask(), Ask(b"abcdx")], Size(num_prefill=0, num_decode=1)),
}
MAX_ORDERS = 20_000


def test_in_every_order_one_request_is_answered_and_everything_given_back(deep: bool) -> None:
    for name, (asks, size) in {**CASES, **(DEEP_CASES if deep else {})}.items():

        def play(follower: Follower, asks: list[Ask] = asks, size: Size = size) -> Play:
            return Play(asks, follower, size=size)

        explored = every_order(play, MAX_ORDERS)
        print(f"\n{name}: {explored}")
        assert explored.is_complete or deep
        assert explored.num_orders > 1


def test_random_walks_of_many_requests_with_faults(deep: bool, first_seed: int, tmp_path: Path) -> None:
    num_walks, num_events, num_again, num_answers = (10 if deep else 1) * NUM_WALKS, 0, 0, 0
    for seed in range(first_seed, first_seed + num_walks):
        play = walk(seed, tmp_path)
        try:
            record = play.run()
        except AssertionError as violation:
            raise AssertionError(f"walk {seed}: {violation}") from violation
        num_events += record.num_events
        num_again += record.num_attempts > 1
        num_answers += len(play.asks)
    print(f"\n{num_walks} walks, {num_answers} requests, {num_events} events, {num_again} walks with new attempts")
    assert num_again > num_walks // 20, "the walks have become too easy"


def test_a_walk_is_the_same_each_time(tmp_path: Path) -> None:
    for seed in range(5):
        first, second = walk(seed, tmp_path), walk(seed, tmp_path)
        assert first.run() == second.run()
        assert first.events == second.events and first.events
