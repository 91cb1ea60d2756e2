"""The queue by itself with tenants' limits: who waits, who is refused, who is in nobody's way."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.inference_pb2 import PRIORITY_HIGH, PRIORITY_NORMAL
from router.admission import CLASSES, Admission, Capacity, Stage, Ticket
from router.tenants import Tenant
from runtime.errors import Overloaded

SMALL = Tenant("small", max_num_running=1, max_num_queued=2)
OTHER = Tenant("other")


@dataclass
class World:
    """Seats, and a clock that stands still unless a test turns it."""

    num_seats: int
    now_s: float = 0.0
    max_queue_wait_s: float = 0.0
    queue: Admission = field(init=False)

    def __post_init__(self) -> None:
        def capacity() -> Capacity:
            num_placed = self.queue.num_placed
            return Capacity(max(0, self.num_seats - num_placed), num_placed, num_ahead=0)

        self.queue = Admission(capacity, 1000, self.max_queue_wait_s, 5.0, lambda: self.now_s)

    def enter(self, tenant: Tenant, priority: int = PRIORITY_NORMAL) -> Ticket:
        return self.queue.enter(priority, None, tenant)


async def test_seats_that_are_free_do_not_lift_a_tenants_limit() -> None:
    world = World(num_seats=8)
    small = [world.enter(SMALL) for _ in range(3)]
    assert [each.stage for each in small] == [Stage.PLACED, Stage.WAITING, Stage.WAITING]
    assert world.enter(OTHER).stage is Stage.PLACED
    world.queue.leave(small[0])
    assert [each.stage for each in small[1:]] == [Stage.PLACED, Stage.WAITING]


async def test_the_next_of_a_tenant_at_its_limit_is_its_first_by_rank() -> None:
    world = World(num_seats=8)
    first, normal = world.enter(SMALL), world.enter(SMALL)
    high = world.enter(SMALL, PRIORITY_HIGH)
    world.queue.leave(first)
    assert (normal.stage, high.stage) == (Stage.WAITING, Stage.PLACED)


async def test_one_too_many_is_refused_by_the_name_of_the_limit_and_leaves_nothing() -> None:
    world = World(num_seats=8)
    small = [world.enter(SMALL) for _ in range(3)]
    with pytest.raises(
        Overloaded, match="small: 2 requests wait, its max_num_queued and max_num_running is 1"
    ) as raised:
        world.enter(SMALL)
    assert raised.value.metadata == {"tenant": "small", "max_num_queued": "2"}
    assert world.queue.num_present == 3
    world.queue.leave(small[2])
    assert world.enter(SMALL).stage is Stage.WAITING


async def test_a_limit_on_waiting_alone_refuses_what_finds_no_seat() -> None:
    world, impatient = World(num_seats=1), Tenant("impatient", max_num_queued=0)
    assert world.enter(impatient).stage is Stage.PLACED
    with pytest.raises(Overloaded, match=r"impatient: 0 requests wait, its max_num_queued$"):
        world.enter(impatient)


async def test_those_held_back_do_not_make_others_waits_look_long() -> None:
    """Two of a slow tenant wait before; for the other tenant it is the next seat."""
    world = World(num_seats=2, max_queue_wait_s=5.0)
    slow = Tenant("slow", max_num_running=1)
    first = world.enter(OTHER)
    world.now_s += 2.0
    world.queue.leave(first)
    running, beside = world.enter(slow), world.enter(OTHER)
    for each in (running, beside):
        world.queue.note_started(each)
    held_back = []
    for _ in range(2):
        world.now_s += 0.25
        held_back.append(world.enter(slow))
    world.now_s += 0.25
    assert [world.queue.expected_wait_s(each) for each in held_back] == [2.0, 4.0]
    with pytest.raises(Overloaded, match=r"the wait would be about 6\.0 s"):
        world.enter(slow)
    assert world.queue.expected_wait_s(world.enter(OTHER)) == 1.25
    world.queue.leave(running)
    assert held_back[0].stage is Stage.PLACED


@settings(deadline=None, max_examples=40)
@given(data=st.data())
async def test_no_limit_is_ever_exceeded_and_no_place_lost(data: st.DataObject) -> None:
    tenants = [
        Tenant("a", max_num_running=1, max_num_queued=3),
        Tenant("b", max_num_running=2),
        Tenant("c", max_num_queued=1),
        OTHER,
    ]
    world, present = World(num_seats=3), list[Ticket]()
    for _ in range(data.draw(st.integers(1, 40))):
        world.now_s += 1
        if present and data.draw(st.booleans()):
            world.queue.leave(present.pop(data.draw(st.integers(0, len(present) - 1))))
        else:
            try:
                present.append(world.enter(data.draw(st.sampled_from(tenants)), data.draw(st.sampled_from(CLASSES))))
            except Overloaded as error:
                assert error.metadata["tenant"] in ("a", "c")
        by_stage = {
            stage: [each.tenant for each in present if each.stage is stage] for stage in (Stage.PLACED, Stage.WAITING)
        }
        placed, waiting = by_stage[Stage.PLACED], by_stage[Stage.WAITING]
        for tenant in tenants:
            assert tenant.max_num_running is None or placed.count(tenant) <= tenant.max_num_running
            assert tenant.max_num_queued is None or waiting.count(tenant) <= tenant.max_num_queued
            may_run = tenant.max_num_running is None or placed.count(tenant) < tenant.max_num_running
            assert not (tenant in waiting and may_run and len(placed) < 3), "a place that nobody has"
    while present:
        world.queue.leave(present.pop())
    assert (world.queue.num_placed, world.queue.num_waiting, world.queue.num_present) == (0, 0, 0)
