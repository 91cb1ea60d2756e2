"""What goes wrong in a run, and where: every kind of fault at every event of the run without faults.

`single_faults` plays that run once and makes a fault of each kind for each of its events at which it means something:
processes that die, vanish, are cut off or drain; each open call that breaks or stalls; each message of a handoff that
lies; each thread's job that fails; time that is lost; attempts given back, leases broken, clients that go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from memory_network import Lane
from playing import Fault, OldestFirst, Play
from whole_system import Ask, Size, System

from engine.worker_service import Role
from protos import worker_pb2

Strike = Callable[[System, Lane], None]
LIES: dict[str, dict[str, Callable[[Any], Any]]] = {
    "KVTransfer/Fetch": {
        "a bit of KV flips": lambda frame: setattr(
            frame, "data", bytes([(frame.data or b"x")[0] ^ 1]) + frame.data[1:]
        ),
        "KV is missing": lambda frame: frame.block_ids.pop(),
    },
    "KVTransfer/Release": {
        "not attested": lambda answer: setattr(answer, "intact", False),
        "another checksum": lambda answer: setattr(answer, "checksum", answer.checksum ^ 1),
        "another epoch": lambda answer: setattr(answer, "epoch", answer.epoch ^ 1),
    },
}
MESSAGES = {"KVTransfer/Fetch": worker_pb2.FetchResponse, "KVTransfer/Release": worker_pb2.ReleaseResponse}


MAX_LATE_EVENTS = 24


class InjectedError(RuntimeError):
    """A job of a thread failed because a test wanted it to."""


# What faults do


def crash(name: str, system: System, lane: Lane, *, silent: bool = False, restart_s: float | None = 0.5) -> None:
    """A process dies."""
    system.crash(name, silent, restart_s)


def drain(name: str, timeout_s: float, system: System, lane: Lane) -> None:
    """A worker is stopped in order."""
    system.drain(name, timeout_s)


def cut_off(name: str, duration_s: float, system: System, lane: Lane) -> None:
    """A process is not reached for a while."""
    system.network.cut_off(system.address(name), duration_s)


def pass_time(duration_s: float, system: System, lane: Lane) -> None:
    """Everything takes that much longer."""
    system.loop.pass_time(duration_s)


def break_call(name: tuple[Any, ...], system: System, lane: Lane) -> None:
    """A call breaks."""
    for call in [call for call in system.network.calls if call.name == name]:
        call.break_()


def stall_call(name: tuple[Any, ...], system: System, lane: Lane) -> None:
    """A call stands still and breaks long after."""
    for call in [call for call in system.network.calls if call.name == name]:
        call.stall()


def evict(name: str, system: System, lane: Lane) -> None:
    """A worker gives everything back."""
    node = system.nodes.get(name)
    if node is not None:
        role: Role = node.running.role
        node.process.do(lambda: role.evict_all("a test wants it"))


def break_leases(name: str, system: System, lane: Lane) -> None:
    """An owner breaks its promises."""
    node = system.nodes.get(name)
    if node is not None:
        leases = node.running.parts.leases
        node.process.do(lambda: [leases.break_(lease) for lease in leases])


def cancel(system: System, lane: Lane) -> None:
    """Clients go away."""
    for reply in system.replies:
        if reply.call is not None:
            system.client.do(reply.call.cancel)


def is_answer(lane: Lane) -> bool:
    """Whether what arrives next is a message to a client, not its call's end."""
    return lane.call is not None and lane is lane.call.to_client and bool(lane.items) and lane.items[0][1] is not None


def lie(method: str, change: Callable[[Any], Any], system: System, lane: Lane) -> None:
    """The message that arrives next, if it is an answer of this method, is not what was sent."""
    if is_answer(lane) and lane.key[2] == method:
        stamp, data, act = lane.items[0]
        message = MESSAGES[method].FromString(data)
        change(message)
        lane.items[0] = (stamp, message.SerializeToString(), act)


def fail_job(system: System, lane: Lane) -> None:
    """What a thread does next fails, if that is what happens next."""

    def fail() -> None:
        raise InjectedError("injected")

    if lane.call is None and lane.items:
        stamp, _, act = lane.items[0]
        lane.items[0] = (stamp, fail, act)


# Where they strike


@dataclass(slots=True)
class _Baseline:
    """The run without faults: which calls were open and what arrived at each of its events."""

    open_calls: list[list[tuple[Any, ...]]] = field(default_factory=list)
    """Before each event."""
    arrivals: list[tuple[str, bool, bool]] = field(default_factory=list)
    """(method, or process of a job; whether a message of it came to the client; whether it is a job)."""
    order: OldestFirst = field(default_factory=OldestFirst)
    play: Play | None = None

    def choose(self, lanes: list[Lane]) -> Lane | None:
        """Notes, and takes the oldest."""
        lane = self.order.choose(lanes)
        assert lane is not None and self.play is not None
        self.open_calls.append(sorted(call.name for call in self.play.network.calls if not call.is_over))
        method = lane.call.name[2] if lane.call is not None else lane.key[0]
        self.arrivals.append((method, is_answer(lane), lane.call is None))
        return lane

    def interrupts(self) -> bool:
        """Never."""
        return False


def cancel_first(system: System, lane: Lane) -> None:
    """The first client goes away."""
    reply = system.replies[0]
    if reply.call is not None:
        system.client.do(reply.call.cancel)


def be_late(num_events: int, then: Strike, system: System, lane: Lane) -> None:
    """What a thread would do next it does so many events later; meanwhile something else goes wrong."""
    if lane.call is None:
        system.network.overtake(lane, num_events)
    then(system, lane)


def all_decodes_die(system: System, lane: Lane) -> None:
    """No decode worker is left, and none comes again."""
    for name in system.worker_names:
        if name.startswith("decode"):
            system.crash(name, restart_s=None)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is played, and over what."""

    name: str
    """For reports."""
    asks: Sequence[Ask] = (Ask(),)
    """The requests."""
    size: Size = field(default_factory=Size)
    """The system."""
    counts_start: bool = False
    """See `Play`."""

    def play(self, *faults: Fault, **options: Any) -> Play:
        """One run."""
        return Play(self.asks, faults=faults, size=self.size, counts_start=self.counts_start, **options)


TIGHT = Setting(
    "two for the blocks of one",
    [Ask(num_tokens=3), Ask(b"vwxyz", 3)],
    Size(1, 1, decode={"num_kv_blocks": 4}, has_probes=False),
)


def late_jobs(setting: Setting, step: int) -> Iterator[Fault]:
    """Each job of a worker's thread late by 1, 1 + `step`, ... events, while its request goes or is given back."""
    _, baseline = _play_baseline(setting)
    for index, (name, _, is_job) in enumerate(baseline.arrivals):
        if is_job and name != "router":
            for num_events in range(1, MAX_LATE_EVENTS, step):
                text = f"a job of {name} is late by {num_events} events"
                goes, is_evicted = (partial(be_late, num_events, each) for each in (cancel_first, partial(evict, name)))
                yield Fault(f"{text} and its client goes", index, goes, may_fail=True)
                yield Fault(f"{text} and all is given back", index, is_evicted)


def single_faults(setting: Setting) -> Iterator[Fault]:
    """One fault at a time, of every kind and everywhere."""
    play, baseline = _play_baseline(setting)
    used = {event[1] for event in play.events if event[2] in ("Prefill/Run", "Decode/Run")}
    for index, (method, can_lie, is_job) in enumerate(baseline.arrivals):
        for address in sorted(used):
            yield from _faults_of_a_worker(play.system.name_of(address), index, setting.size)
        for call in baseline.open_calls[index]:
            may_fail = call[2] == "Inference/Generate"
            if not may_fail and call[1] not in used:
                continue
            yield Fault(f"{call} breaks", index, partial(break_call, call), may_fail)
            yield Fault(f"{call} stalls", index, partial(stall_call, call), may_fail)
        if can_lie:
            for name, change in LIES.get(method, {}).items():
                yield Fault(name, index, partial(lie, method, change))
        if is_job and method != "router":
            yield Fault(f"a job of {method} fails", index, fail_job, is_logged=True)
        yield Fault("the router dies", index, partial(crash, "router"), may_fail=True)
        yield Fault("all decode workers die for good", index, all_decodes_die, may_fail=True)
        yield Fault("the client goes", index, cancel, may_fail=True)
        yield Fault("a second is lost", index, partial(pass_time, 1.0))
        yield Fault("leases expire", index, partial(pass_time, 2.9))
        yield Fault("a long time is lost", index, partial(pass_time, 6.0))


def _play_baseline(setting: Setting) -> tuple[Play, _Baseline]:
    baseline = _Baseline()
    play = baseline.play = setting.play(chooser=baseline)
    play.run()
    return play, baseline


def _faults_of_a_worker(name: str, index: int, size: Size) -> Iterator[Fault]:
    is_last = name.startswith("decode") and size.num_decode == 1
    yield Fault(f"{name} dies", index, partial(crash, name))
    yield Fault(f"{name} dies for good", index, partial(crash, name, restart_s=None), may_fail=is_last)
    yield Fault(f"{name} vanishes", index, partial(crash, name, silent=True))
    yield Fault(f"{name} drains", index, partial(drain, name, 20.0))
    yield Fault(f"{name} drains without patience", index, partial(drain, name, 0.0))
    yield Fault(f"{name} is cut off for a moment", index, partial(cut_off, name, 1.0))
    yield Fault(f"{name} is cut off", index, partial(cut_off, name, 5.0))
    yield Fault(f"{name} gives all back", index, partial(evict, name))
    if name.startswith("prefill"):
        yield Fault(f"{name} breaks its leases", index, partial(break_leases, name))
