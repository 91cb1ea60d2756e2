"""The router's view of workers: found, proved, lost, met again."""

from __future__ import annotations

import asyncio
import time

import pytest
from fake_workers import (
    DECODE,
    DRAINING,
    LIMIT_S,
    MIXED,
    PREFILL,
    SERVING,
    FakeWorker,
    fleet_over,
    started,
)
from redis_process import RedisServer
from wire import wire_to

from kvstore.metadata import open_store
from kvstore.metadata.base import StoreUnavailable, WorkerRecord
from kvstore.metadata.memory import Store
from protos import inference_pb2
from router import fleet as fleet_module
from router import links
from router.admission import Capacity
from router.fleet import Fleet
from router.links import Incarnation, WorkerLink
from runtime.errors import Unavailable

LOST = inference_pb2.WORKER_STATE_LOST


def p(name: str = "p", **options: str) -> FakeWorker:
    return FakeWorker(PREFILL, name, **options)


def d(name: str = "d", **options: str) -> FakeWorker:
    return FakeWorker(DECODE, name, **options)


class GatedProbe:
    """A probe that waits for the test, or fails for some pairs."""

    def __init__(self, failing: set[str] | None = None) -> None:
        self.failing = failing or set()
        self.pairs: list[tuple[str, str]] = []
        self.called = asyncio.Event()
        self.may_cross = asyncio.Event()

    async def __call__(self, decode: Incarnation, prefill: Incarnation | None) -> None:
        names = (prefill.worker_id if prefill else "", decode.worker_id)
        self.pairs.append(names)
        self.called.set()
        if self.failing & set(names):
            raise Unavailable(f"{names} cannot cross")
        await self.may_cross.wait()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks for workers ten times a second."""
    monkeypatch.setattr(fleet_module, "DISCOVERY_INTERVAL_S", 0.1)


async def test_static_workers_are_found_and_proved() -> None:
    async with fleet_over(p(), d()) as seen:
        await seen.until(lambda fleet: seen.usable_ids() == {"p", "d"})
        assert [worker.worker_id for worker in seen.fleet.incarnations()] == ["p", "d"]
        assert [worker.worker_id for worker in seen.fleet.usable(decodes=True)] == ["d"]
        assert [worker.worker_id for worker in seen.fleet.usable(decodes=False)] == ["p"]
        assert seen.num_changes > 0


async def test_nothing_is_ready_until_a_probe_has_crossed() -> None:
    probe = GatedProbe()
    async with fleet_over(p(), d(), probe=probe, grace_s=60) as seen:
        await probe.called.wait()
        assert probe.pairs == [("p", "d")]
        assert not seen.fleet.is_ready and not seen.usable_ids()
        probe.may_cross.set()
        await seen.until(lambda fleet: fleet.is_ready)
        assert seen.usable_ids() == {"p", "d"}


async def test_a_decode_worker_is_not_proved_alone_while_prefill_may_still_come() -> None:
    probe = GatedProbe()
    probe.may_cross.set()
    async with fleet_over(d(), probe=probe, grace_s=0.5) as seen:
        began_s = time.monotonic()
        await seen.until(lambda fleet: fleet.is_ready)
        assert time.monotonic() - began_s > 0.4 and probe.pairs == [("", "d")]


@pytest.mark.usefixtures("hasty")
async def test_workers_that_load_for_long_get_the_same_time_for_prefill_to_come() -> None:
    """Counted from the first decode worker, not from the router's start, which is long before on a slow machine."""
    store = Store("memory://", 1.0)
    decode = d(layout="another")
    async with fleet_over(p(), decode, store=store, static=False, grace_s=0.5) as seen:
        began_s = time.monotonic()
        prefill_wire, decode_wire = seen.wires
        await store.register_worker(WorkerRecord("p", "prefill", prefill_wire.address, 1), 60)
        await seen.until(lambda fleet: any(w.reported_s > began_s + 0.6 for w in fleet.incarnations()))
        began_s = time.monotonic()
        await store.register_worker(record_of(decode, decode_wire.address), 60)
        await seen.until(lambda fleet: fleet.is_ready)
        assert time.monotonic() - began_s > 0.4


async def test_a_mixed_worker_is_proved_alone() -> None:
    probe = GatedProbe()
    probe.may_cross.set()
    async with fleet_over(p(), FakeWorker(MIXED, "m"), probe=probe, grace_s=60) as seen:
        await seen.until(lambda fleet: fleet.is_ready)
        assert seen.usable_ids() == {"m"} and set(probe.pairs) == {("", "m")}


@pytest.mark.usefixtures("hasty")
async def test_a_sick_prefill_worker_keeps_nobody_from_being_proved() -> None:
    probe = GatedProbe(failing={"a-sick"})
    probe.may_cross.set()
    async with fleet_over(p("a-sick"), p("b"), d(), probe=probe, grace_s=60) as seen:
        await seen.until(lambda fleet: seen.usable_ids() == {"b", "d"})


@pytest.mark.usefixtures("hasty")
async def test_a_sick_decode_worker_keeps_nobody_from_being_proved() -> None:
    probe = GatedProbe(failing={"a-sick"})
    probe.may_cross.set()
    async with fleet_over(p(), d("a-sick"), d("b"), probe=probe, grace_s=60) as seen:
        await seen.until(lambda fleet: seen.usable_ids() == {"p", "b"})


@pytest.mark.usefixtures("hasty")
async def test_with_sick_prefill_workers_alone_decode_serves_alone() -> None:
    probe = GatedProbe(failing={"p"})
    probe.may_cross.set()
    async with fleet_over(p(), d(), probe=probe, grace_s=1) as seen:
        await seen.until(lambda fleet: fleet.is_ready)
        assert seen.usable_ids() == {"d"} and probe.pairs[0] == ("p", "d")


@pytest.mark.usefixtures("hasty")
async def test_a_worker_that_recovers_is_proved_then() -> None:
    probe = GatedProbe(failing={"p"})
    probe.may_cross.set()
    async with fleet_over(p(), d(), probe=probe) as seen:
        await seen.until(lambda fleet: fleet.is_ready)
        probe.failing.clear()
        await seen.until(lambda fleet: seen.usable_ids() == {"p", "d"})


async def test_workers_of_another_model_are_refused_without_haste(caplog: pytest.LogCaptureFixture) -> None:
    other = d("other", fingerprint="another")
    async with fleet_over(p(), d(), other) as seen:
        await seen.until(lambda fleet: fleet.is_ready)
        reported_s = seen.named("d").reported_s
        await seen.until(lambda fleet: seen.named("d").reported_s > reported_s + 1.0)
        assert {worker.worker_id for worker in seen.fleet.incarnations()} == {"p", "d"}
        assert other.num_described <= 5
    told = [record for record in caplog.records if "serves another model" in record.message]
    assert len(told) == 1 and "other" in told[0].getMessage()


async def test_workers_that_do_not_fit_are_not_paired() -> None:
    probe = GatedProbe()
    async with fleet_over(p("a", layout="another"), p("b"), d(), probe=probe, grace_s=60) as seen:
        await probe.called.wait()
        probe.may_cross.set()
        await seen.until(lambda fleet: fleet.is_ready)
        assert probe.pairs == [("b", "d")] and seen.usable_ids() == {"b", "d"}


async def test_a_draining_worker_gets_nothing() -> None:
    only = d()
    async with fleet_over(p(), only) as seen:
        await seen.until(lambda fleet: fleet.is_ready)
        only.state = DRAINING
        only.report()
        await seen.until(lambda fleet: not fleet.is_ready)
        assert not seen.named("d").lost.is_set()
        only.state = SERVING
        only.report()
        await seen.until(lambda fleet: fleet.is_ready)


async def test_load_reports_are_taken_over() -> None:
    only = d()
    async with fleet_over(p(), only) as seen:
        await seen.until(lambda fleet: fleet.is_ready)
        only.load.num_running = 7
        only.report()
        await seen.until(lambda fleet: seen.named("d").load.num_running == 7)


async def test_free_seats_are_those_that_no_router_holds() -> None:
    worker, other = FakeWorker(MIXED, "m"), FakeWorker(MIXED, "n")
    other.description.num_seats = 4
    worker.load.num_running, worker.load.num_queued = 30, 2
    async with fleet_over(worker, other) as seen:
        await seen.until(lambda _: seen.usable_ids() == {"m", "n"})
        assert seen.fleet.capacity() == Capacity(num_free=32 + 4, num_assigned=0, num_ahead=8 + 1)
        incarnation = seen.named("m")
        # Two of this router's own since that report; then one that counts them too, and one that ends after it.
        incarnation.num_assigned += 2
        assert (incarnation.num_free, seen.fleet.capacity().num_assigned) == (30, 2)
        worker.load.num_running = 32
        worker.report()
        await seen.until(lambda _: incarnation.load.num_running == 32)
        assert incarnation.num_free == 30
        incarnation.num_assigned -= 1
        assert incarnation.num_free == 31
        # More than there are, as a look-ahead makes it.
        incarnation.num_assigned += 40
        assert seen.fleet.capacity().num_free == 4
        worker.state = DRAINING
        worker.report()
        await seen.until(lambda _: not incarnation.is_serving)
        assert seen.fleet.capacity() == Capacity(num_free=4, num_assigned=41, num_ahead=1)


async def test_a_silent_worker_is_lost_in_time() -> None:
    async with fleet_over(p(), d(), silence_s=0.6) as seen:
        await seen.until(lambda fleet: fleet.is_ready)
        worker = seen.named("d")
        seen.wires[1].freeze()
        began_s = time.monotonic()
        await seen.until(lambda fleet: worker.lost.is_set())
        assert 0.3 < time.monotonic() - began_s < 1.5
        assert worker.state == LOST and not seen.fleet.is_ready


async def test_a_broken_connection_is_a_loss_at_once() -> None:
    async with fleet_over(p(), d(), silence_s=60) as seen:
        await seen.until(lambda fleet: fleet.is_ready)
        worker = seen.named("d")
        seen.wires[1].cut()
        async with asyncio.timeout(1):
            await worker.lost.wait()
        assert worker.state == LOST


async def test_the_same_worker_heard_again_must_be_proved_again() -> None:
    probe = GatedProbe()
    probe.may_cross.set()
    async with fleet_over(p(), d(), probe=probe) as seen:
        await seen.until(lambda fleet: fleet.is_ready)
        first = seen.named("d")
        probe.may_cross.clear()
        seen.wires[1].cut()
        await first.lost.wait()
        await seen.until(lambda fleet: seen.named("d") is not first and seen.named("d").is_serving)
        assert not seen.fleet.is_ready
        probe.may_cross.set()
        await seen.until(lambda fleet: fleet.is_ready)
        assert first.lost.is_set() and seen.named("d").description.epoch == first.description.epoch


async def test_a_new_incarnation_at_the_same_address_is_met() -> None:
    old, new = d("old"), d("new")
    async with fleet_over(p(), old) as seen, started(new) as way:
        await seen.until(lambda fleet: fleet.is_ready)
        first = seen.named("old")
        seen.wires[1].target = way.target
        seen.wires[1].cut()
        await seen.until(lambda fleet: fleet.is_ready and bool(seen.usable_ids() & {"new"}))
        assert first.lost.is_set() and first.state == LOST
        assert seen.named("new").description.epoch == new.epoch


async def test_a_worker_whose_report_comes_before_its_token_stream_is_used_at_once() -> None:
    only = d()
    only.attach_delay_s, only.report_interval_s = 0.3, 60.0
    async with fleet_over(only, silence_s=60) as seen:
        began_s = time.monotonic()
        await seen.until(lambda fleet: fleet.is_ready)
        assert time.monotonic() - began_s < 0.9


async def test_a_report_of_another_epoch_ends_the_incarnation() -> None:
    only = d()
    async with fleet_over(p(), only) as seen:
        await seen.until(lambda fleet: fleet.is_ready)
        first = seen.named("d")
        only.epoch += 1
        only.description.epoch = only.epoch
        await seen.until(lambda fleet: first.lost.is_set())
        await seen.until(lambda fleet: seen.named("d").description.epoch == only.epoch)


async def test_a_link_that_ends_leaves_no_task_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that ends while the token stream is being opened."""
    only = d()
    before = asyncio.all_tasks()
    async with started(only) as wire:
        attaching = asyncio.Event()
        link = WorkerLink(wire.address, "r", 5.0, lambda _: bool(attaching.set()) or True, lambda: None)
        monkeypatch.setattr(links.Incarnation, "deliver", lambda *_: None)
        running = asyncio.create_task(link.run())
        await attaching.wait()
        running.cancel()
        await asyncio.wait([running])
    async with asyncio.timeout(LIMIT_S):
        while left := {task for task in asyncio.all_tasks() - before if "links.py" in repr(task)}:
            await asyncio.wait(left)
    assert link.current is None


# Discovery


def record_of(worker: FakeWorker, address: str) -> WorkerRecord:
    role = {PREFILL: "prefill", DECODE: "decode"}[worker.description.role]
    return WorkerRecord(worker.description.worker_id, role, address, worker.epoch)


@pytest.mark.usefixtures("hasty")
async def test_workers_are_found_in_the_store_and_stay_without_it(own_valkey: RedisServer) -> None:
    store = open_store(own_valkey.url)
    try:
        prefill, decode = p(), d()
        async with fleet_over(prefill, decode, store=store, static=False) as seen:
            for worker, wire in zip((prefill, decode), seen.wires, strict=True):
                await store.register_worker(record_of(worker, wire.address), 60)
            await seen.until(lambda fleet: seen.usable_ids() == {"p", "d"})
            await store.unregister_worker("d", decode.epoch)
            await store.unregister_worker("p", prefill.epoch)
            assert await store.list_workers() == []
            reported_s = seen.named("d").reported_s
            await seen.until(lambda fleet: seen.named("d").reported_s > reported_s + 0.5)
            assert seen.usable_ids() == {"p", "d"}
            own_valkey.kill()
            with pytest.raises(StoreUnavailable):
                await store.list_workers()
            reported_s = seen.named("d").reported_s
            await seen.until(lambda fleet: seen.named("d").reported_s > reported_s + 0.5)
            assert seen.usable_ids() == {"p", "d"}
    finally:
        await store.close()


@pytest.mark.usefixtures("hasty")
async def test_a_worker_that_is_silent_and_not_listed_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "FORGET_S", 0.5)
    store, decode = Store("memory://", 1.0), d()
    async with fleet_over(decode, store=store, static=False) as seen:
        (wire,) = seen.wires
        await store.register_worker(record_of(decode, wire.address), 60)
        await seen.until(lambda fleet: fleet.is_ready)
        await wire.stop()
        await seen.until(lambda fleet: not fleet.is_ready)
        # Listed still: looked for.
        began_s = time.monotonic()
        await seen.until(lambda fleet: time.monotonic() > began_s + 0.8)
        assert [worker.state for worker in seen.fleet.incarnations()] == [LOST]
        await store.unregister_worker("d", decode.epoch)
        await seen.until(lambda fleet: not fleet.incarnations())


@pytest.mark.usefixtures("hasty")
async def test_a_lost_worker_is_looked_for_while_the_store_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "FORGET_S", 0.2)

    class Away(Store):
        is_away = False

        async def list_workers(self) -> list[WorkerRecord]:
            if self.is_away:
                raise StoreUnavailable("away")
            return await super().list_workers()

    store, decode = Away("memory://", 1.0), d()
    async with fleet_over(decode, store=store, static=False, silence_s=0.5) as seen:
        (wire,) = seen.wires
        await store.register_worker(record_of(decode, wire.address), 60)
        await seen.until(lambda fleet: fleet.is_ready)
        store.is_away = True
        wire.freeze()
        await seen.until(lambda fleet: not fleet.is_ready)
        began_s = time.monotonic()
        await seen.until(lambda fleet: time.monotonic() > began_s + 0.6)
        wire.thaw()
        await seen.until(lambda fleet: fleet.is_ready)


async def test_a_fleet_without_workers_is_not_ready() -> None:
    async with wire_to("127.0.0.1:1") as wire:
        fleet = Fleet("r", "tracer", [wire.address], None, 1.0, GatedProbe(), lambda: None)
        running = asyncio.create_task(fleet.run())
        async with asyncio.timeout(LIMIT_S):
            await wire.accepted.acquire()
            await wire.accepted.acquire()
        assert not fleet.is_ready and fleet.incarnations() == []
        running.cancel()
        await asyncio.wait([running])
