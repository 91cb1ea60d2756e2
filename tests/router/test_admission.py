"""The router's queue by itself: order, bounds, displacement, and places that are never lost."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.inference_pb2 import PRIORITY_HIGH, PRIORITY_LOW, PRIORITY_NORMAL
from router.admission import CLASSES, Admission, Capacity, Stage, Ticket
from runtime.errors import Overloaded, Unavailable

AGEING_S = 5.0
SERVICE_S = 1.0


@dataclass
class World:
    """Seats of one worker that serves what has a place, and a clock that the test turns."""

    num_seats: int
    num_ahead: int = 0
    num_elsewhere: int = 0
    """Seats that another router's requests hold."""
    now_s: float = 100.0
    placed: list[Ticket] = field(default_factory=list)
    """In the order in which they were placed, those that have ended included."""

    def capacity(self) -> Capacity:
        num_assigned = self.queue.num_placed
        return Capacity(max(0, self.num_seats - num_assigned - self.num_elsewhere), num_assigned, self.num_ahead)

    def open(self, max_num_queued: int = 1000, max_queue_wait_s: float = 0.0) -> Admission:
        self.queue = Admission(self.capacity, max_num_queued, max_queue_wait_s, AGEING_S, lambda: self.now_s)
        return self.queue

    def enter(self, priority: int = PRIORITY_NORMAL, time_left_s: float | None = None) -> Ticket:
        ticket = self.queue.enter(priority, time_left_s)
        ticket.placed.add_done_callback(lambda _: self.placed.append(ticket))
        return ticket

    def serve(self, ticket: Ticket, service_s: float = SERVICE_S) -> None:
        """From place to end in one go."""
        self.queue.note_started(ticket)
        self.now_s += service_s
        self.queue.leave(ticket)


def reason(ticket: Ticket) -> Any:
    assert ticket.placed.done()
    return ticket.placed.exception()


async def test_a_freed_place_goes_to_the_first_by_rank() -> None:
    world = World(1)
    queue = world.open()
    holder, low, normal, high = (
        world.enter(each) for each in (PRIORITY_LOW, PRIORITY_LOW, PRIORITY_NORMAL, PRIORITY_HIGH)
    )
    order = []
    for _ in range(4):
        (placed,) = [each for each in (holder, low, normal, high) if each.stage is Stage.PLACED]
        order.append(placed)
        world.serve(placed)
    assert order == [holder, high, normal, low]
    assert (queue.num_placed, queue.num_waiting, queue.num_present) == (0, 0, 0)


async def test_waiting_outweighs_class_and_equals_keep_their_order() -> None:
    world = World(1)
    world.open()
    holder = world.enter()
    low = world.enter(PRIORITY_LOW)
    world.now_s += 2 * AGEING_S + 0.1
    late = [world.enter(PRIORITY_HIGH) for _ in range(2)]
    for expected in (low, *late):
        world.serve(holder)
        assert expected.stage is Stage.PLACED
        holder = expected


async def test_seats_of_other_routers_are_not_given_again() -> None:
    world = World(2, num_elsewhere=1)
    queue = world.open()
    tickets = [world.enter() for _ in range(2)]
    assert [each.stage for each in tickets] == [Stage.PLACED, Stage.WAITING]
    world.num_elsewhere = 0
    queue.place_first()
    assert tickets[1].stage is Stage.PLACED


async def test_a_place_that_is_not_taken_at_a_worker_yet_is_not_given_twice() -> None:
    queue = Admission(lambda: Capacity(num_free=2, num_assigned=0, num_ahead=0), 10, 0.0, AGEING_S)
    tickets = [queue.enter(PRIORITY_NORMAL) for _ in range(4)]
    assert [each.stage for each in tickets] == [Stage.PLACED] * 2 + [Stage.WAITING] * 2


async def test_some_wait_at_the_workers_so_that_no_seat_is_empty() -> None:
    world = World(2, num_ahead=1)
    queue = world.open()
    seated = [world.enter() for _ in range(2)]
    for each in seated:
        queue.note_started(each)
    ahead, behind = world.enter(), world.enter()
    assert (ahead.stage, behind.stage) == (Stage.PLACED, Stage.WAITING)
    queue.note_started(ahead)
    assert behind.stage is Stage.PLACED


async def test_a_higher_class_goes_to_the_workers_past_full_seats() -> None:
    """There it may take the seat of a lower one, which a router cannot do."""
    world = World(1, num_ahead=1)
    world.open()
    low = [world.enter(PRIORITY_LOW) for _ in range(3)]
    assert [each.stage for each in low] == [Stage.PLACED, Stage.WAITING, Stage.WAITING]
    high = [world.enter(PRIORITY_HIGH) for _ in range(2)]
    assert [each.stage for each in high] == [Stage.PLACED, Stage.WAITING]


async def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    world = World(1)
    queue = world.open(max_num_queued=2)
    world.serve(world.enter(), service_s=3.0)
    kept = [world.enter() for _ in range(3)]
    with pytest.raises(Overloaded) as caught:
        world.enter()
    assert "2 requests wait" in caught.value.message and caught.value.metadata["limit"] == "2"
    assert caught.value.retry_after_s == pytest.approx(12.0)  # four of 3 s each: two wait, one is served, and it
    assert (queue.num_waiting, queue.num_present) == (2, 3)
    assert [each.stage for each in kept] == [Stage.PLACED, Stage.WAITING, Stage.WAITING]


async def test_a_higher_class_displaces_the_last_of_a_lower_one() -> None:
    world = World(1)
    queue = world.open(max_num_queued=3)
    world.enter(PRIORITY_HIGH)
    first, last = world.enter(PRIORITY_LOW), world.enter(PRIORITY_LOW)
    normal = world.enter(PRIORITY_NORMAL)
    high = [world.enter(PRIORITY_HIGH) for _ in range(3)]
    assert isinstance(reason(last), Overloaded) and "higher class" in reason(last).message
    assert isinstance(reason(first), Overloaded) and isinstance(reason(normal), Overloaded)
    assert all(each.stage is Stage.WAITING for each in high)
    for priority in CLASSES:
        with pytest.raises(Overloaded):
            world.enter(priority)
    for each in (first, last, normal):
        queue.leave(each)
    assert queue.num_present == 4


async def test_answers_that_nobody_has_read_count_as_waiting_but_keep_no_seat() -> None:
    world = World(1)
    queue = world.open(max_num_queued=1)
    unread = world.enter()
    queue.give_back(unread)
    assert world.enter().stage is Stage.PLACED
    with pytest.raises(Overloaded):
        world.enter()
    queue.leave(unread)
    assert world.enter().stage is Stage.WAITING


async def test_who_would_wait_too_long_is_refused_at_once() -> None:
    world = World(2)
    world.open(max_queue_wait_s=4.0)
    for _ in range(3):
        world.serve(world.enter(), service_s=2.0)
    seated = [world.enter() for _ in range(2)]
    # Two seats, 2 s each: one place a second. Two that have no token yet are ahead.
    assert [each.stage for each in seated] == [Stage.PLACED] * 2
    waiting = [world.enter() for _ in range(2)]
    with pytest.raises(Overloaded, match=r"about 5\.0 s, at most 4\.0 s") as caught:
        world.enter()
    assert caught.value.retry_after_s == pytest.approx(5.0)
    assert world.enter(PRIORITY_HIGH).stage is Stage.WAITING
    assert all(each.stage is Stage.WAITING for each in waiting)


async def test_seats_that_were_taken_together_come_back_together() -> None:
    world = World(4)
    queue = world.open(max_queue_wait_s=1.0)
    for service_s in (3.0, 5.0):
        world.serve(world.enter(), service_s)
    for seated in [world.enter() for _ in range(4)]:
        queue.note_started(seated)
    # A place a second on the average, but none before 4 s are over.
    with pytest.raises(Overloaded, match=r"about 4\.0 s"):
        world.enter()
    world.now_s += 3.5
    assert world.enter().stage is Stage.WAITING
    world.now_s += 10.0
    with pytest.raises(Overloaded, match=r"about 2\.0 s"):
        world.enter()


async def test_a_deadline_that_cannot_be_kept_is_refused_at_once() -> None:
    world = World(1)
    world.open()
    world.serve(world.enter(), service_s=2.0)
    world.enter()
    with pytest.raises(Overloaded, match=r"at most 1\.0 s"):
        world.enter(time_left_s=1.0)
    assert world.enter(time_left_s=10.0).stage is Stage.WAITING


async def test_nobody_is_refused_for_a_wait_that_is_not_known() -> None:
    world = World(1)
    world.open(max_queue_wait_s=0.001)
    assert [world.enter().stage for _ in range(20)] == [Stage.PLACED] + [Stage.WAITING] * 19


async def test_those_that_wait_can_be_told_that_it_is_in_vain() -> None:
    world = World(1)
    queue = world.open()
    held, waiting = world.enter(), world.enter()
    queue.refuse_waiting(Unavailable("no worker"))
    assert isinstance(reason(waiting), Unavailable)
    assert held.stage is Stage.PLACED and queue.num_waiting == 0


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "start", "give back", "leave", "cancel", "seats", "refuse"]), st.integers(0, 99)
    ),
    max_size=60,
)


@settings(deadline=None)
@given(actions=ACTIONS, max_num_queued=st.integers(0, 6), num_ahead=st.integers(0, 2))
def test_no_place_is_lost_and_none_given_out_of_order(
    actions: list[tuple[str, int]], max_num_queued: int, num_ahead: int
) -> None:
    """Whatever is done with tickets, at whatever moment, also twice."""

    async def play() -> None:
        world = World(2, num_ahead)
        queue = world.open(max_num_queued)
        tickets: list[Ticket] = []
        done: dict[str, Callable[[Ticket], object]] = {
            "start": queue.note_started,
            "give back": queue.give_back,
            "leave": queue.leave,
            "cancel": lambda ticket: ticket.placed.cancel(),
        }
        for action, number in actions:
            world.now_s += 0.1
            if action == "enter":
                try:
                    tickets.append(world.enter(CLASSES[number % 3]))
                except Overloaded:
                    assert queue.num_present - queue.num_placed >= max_num_queued
            elif action == "seats":
                world.num_elsewhere = number % 4
                queue.place_first()
            elif action == "refuse":
                queue.refuse_waiting(Unavailable("gone"))
            elif tickets:
                done[action](tickets[number % len(tickets)])
            check(world, tickets, max_num_queued)
        for ticket in tickets:
            queue.leave(ticket)
        assert (queue.num_placed, queue.num_waiting, queue.num_present) == (0, 0, 0)
        await asyncio.sleep(0)
        # Nothing is left that would keep a seat from the next ones.
        world.num_elsewhere = 0
        assert [world.enter().stage for _ in range(2)] == [Stage.PLACED] * 2

    asyncio.run(play())


def check(world: World, tickets: list[Ticket], max_num_queued: int) -> None:
    queue = world.queue
    waiting = [each for each in tickets if each.stage is Stage.WAITING]
    placed = [each for each in tickets if each.stage is Stage.PLACED]
    assert queue.num_waiting == len(waiting) and queue.num_placed == len(placed)
    assert len(waiting) <= max_num_queued
    unstarted = [each for each in placed if not each.is_started]
    first = min(waiting, key=lambda each: each.rank, default=None)
    if first is not None:
        # It waits for a reason: no seat, and enough of its class and above have no token yet.
        assert world.capacity().num_free == 0
        assert sum(each.priority >= first.priority for each in unstarted) >= world.num_ahead


@pytest.mark.parametrize("priority", CLASSES)
async def test_nobody_starves_under_a_stream_of_the_highest_class(priority: int) -> None:
    """High ones come whenever fewer than `num_ahead` wait: who waits is overtaken for its ageing, and no longer."""
    num_seats, num_ahead = 4, 12
    world = World(num_seats)
    queue = world.open()
    drawn = random.Random(3)
    present: dict[Ticket, float] = {}  # with the time of its end, once it is placed
    watched: Ticket | None = None
    began_s, waited_s = world.now_s, math.inf
    while waited_s == math.inf and world.now_s < began_s + 60:
        world.now_s += SERVICE_S / 16
        for each in [each for each, end_s in present.items() if end_s <= world.now_s]:
            queue.leave(each)
            del present[each]
        if watched is None and world.now_s >= began_s + 20:
            watched, asked_s = world.enter(priority), world.now_s
            present[watched] = math.inf
        while queue.num_waiting < num_ahead:
            present[world.enter(PRIORITY_HIGH)] = math.inf
        for each, end_s in present.items():
            if each.stage is Stage.PLACED and end_s == math.inf:
                queue.note_started(each)
                present[each] = world.now_s + SERVICE_S * drawn.uniform(0.5, 1.5)
        if watched is not None and watched.stage is Stage.PLACED:
            waited_s = world.now_s - asked_s
    ageing_s = AGEING_S * (PRIORITY_HIGH - priority)
    assert ageing_s <= waited_s <= ageing_s + (num_ahead / num_seats + 1) * 1.5 * SERVICE_S
