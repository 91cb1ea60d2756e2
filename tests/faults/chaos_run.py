"""A chaos run: real processes under the real supervisor, clients that ask and leave, and misfortune drawn from a seed.

Two prefill workers, two decode workers, two routers, Redis. Each pool has a thread of misfortune of its own: a fault,
then the return of whoever it struck, then the next; so one worker of each pool is always whole. A third one is for
Redis, a fourth floods the pools. In the end every accepted request has finished rightly or was left by its client,
nobody has died of himself, and no worker holds anything. A rolling restart is the same with another order of events:
every process is told to end and comes back.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle

from asked import Asked
from chaos_load import NOT_ACCEPTED, Check, Clients, Gap, Ledger
from chaos_plan import (
    PARTED,
    REDIS_KINDS,
    WORKER_KINDS,
    Fault,
    Move,
    faults,
    flood_requests,
    moves,
    tracer_answer,
    tracer_requests,
)
from chaos_ways import Namespaces, Ways
from cluster import holds_nothing, load_of
from redis_process import RedisServer

from baton import AsyncClient
from baton.supervisor import Change, Supervisor
from baton.topology import ProcessSpec, choose_ports
from protos import inference_pb2
from runtime import huge_pages
from runtime.errors import Unavailable
from runtime.host import OPENMP_SETTING

POOLS = {"prefill": "prefill_svc", "decode": "decode_svc"}
RETURN_LIMIT_S = 180.0
"""How long a worker may take until routers see it serve again."""
EMPTY_LIMIT_S = 15.0
"""How long workers may hold anything after the last answer: calls that were cut off end when packets pass again."""
LOOK_AGAIN_S = 0.1
MAX_AGE_MS = 1500
"""Workers report more often than that."""
DETECTION_S = 4.0
"""For so long after its end a fault may be the cause of a silence."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is played."""

    seed: int
    """Of faults, requests and clients."""
    duration_s: float
    """How long there is misfortune."""
    mean_pause_s: float = 4.0
    """Between the recovery from a fault and the next of its thread."""
    num_clients: int = 12
    """Requests at once, floods not counted."""
    model: str = "tracer"
    """What the workers serve."""
    worker_flags: tuple[str, ...] = ("--num-kv-blocks=640", "--chunk-size=256", "--max-num-seqs=32")
    """Of all workers."""
    speculation: str = "none"
    """Who drafts for the decode workers."""
    has_floods: bool = True
    """Whether the pools are filled now and then."""
    only: str | None = None
    """The one kind of fault there is, of one worker at a time, to measure what it costs; None: all kinds."""
    is_rolling: bool = False
    """A rolling restart instead of misfortune; `duration_s` and pauses mean nothing then."""


@dataclass(slots=True)
class Struck:
    """A fault that has happened."""

    kind: str
    began_s: float
    ended_s: float


@dataclass(slots=True)
class Outcome:
    """How it went."""

    ledger: Ledger
    """What clients saw, and all violations."""
    struck: list[Struck] = field(default_factory=list)
    """The faults."""
    num_near_ties: int = 0
    """Answers of a real model that part from the undisturbed one's where two tokens are equally likely."""
    num_handoffs_lost: int = 0
    """As the workers that are left count them."""
    empty_after_s: float = 0.0
    """From the last answer until no worker held anything."""

    def causes(self, gap: Gap) -> str:
        """The faults of workers that may have caused a silence, two of a kind by two names."""
        ended_s = gap.began_s + gap.length_s
        found = [s.kind for s in self.struck if s.began_s <= ended_s and gap.began_s <= s.ended_s + DETECTION_S]
        return " and ".join(sorted(kind for kind in found if kind in WORKER_KINDS or kind in PARTED)) or "none"

    def report(self) -> dict[str, object]:
        """For people and programs. Delays are the silences less what it took to compute again."""
        delays: dict[str, list[float]] = {}
        for gap in self.ledger.gaps:
            delays.setdefault(self.causes(gap), []).append(max(0.0, gap.length_s - gap.recompute_s))
        alone = {cause: sorted(found) for cause, found in delays.items() if " and " not in cause}
        return {
            "faults": dict(Counter(struck.kind for struck in self.struck)),
            "requests": dict(self.ledger.counts),
            "violations": self.ledger.violations,
            "added_delay_s": {
                cause: {"count": len(found), "median": round(found[len(found) // 2], 3), "max": round(found[-1], 3)}
                for cause, found in sorted(alone.items())
            },
            "longest_gap_s": round(self.ledger.longest_gap_s, 3),
            "near_ties": self.num_near_ties,
            "handoffs_lost": self.num_handoffs_lost,
            "empty_after_s": round(self.empty_after_s, 3),
        }


class ChaosRun:
    """One run."""

    def __init__(self, settings: Settings, ways: Ways) -> None:
        self._settings = settings
        self._ways = ways
        self._redis = RedisServer(ways.hub)
        self._supervisor = Supervisor(self._on_change, drain_timeout_s=5.0, backoff_first_s=0.2, stable_s=3.0)
        self._pids: dict[str, int] = {}
        self._expected_deaths: set[int] = set()
        self._addresses: dict[str, str] = {}
        self.outcome = Outcome(Ledger())
        """So far."""
        self._routers: list[AsyncClient] = []
        self._started = asyncio.Event()
        """Set at the next start of a process."""
        self._calm = asyncio.Event()
        """Set when there is no more misfortune."""

    async def run(self, requests: list[Asked], prepare: Callable[[AsyncClient], Awaitable[Check]]) -> Outcome:
        """Plays it. `prepare` is called when all is well, and says how answers are checked."""
        try:
            await self._ways.open()
            await asyncio.to_thread(self._redis.start)
            await self._start()
            # Routers that end refuse what they have not accepted in every way in which a connection can break.
            refusal = "" if self._settings.is_rolling else NOT_ACCEPTED
            clients = Clients(self._routers, await prepare(self._routers[0]), self.outcome.ledger, refusal)
            async with asyncio.TaskGroup() as group:
                for number in range(self._settings.num_clients):
                    drawn = moves(self._settings.seed, number, len(requests))
                    group.create_task(clients.follow(drawn, requests, self._calm))
                group.create_task(self._roll() if self._settings.is_rolling else self._misfortune(clients))
            await self._all_empty()
        finally:
            for router in self._routers:
                await router.close()
            await self._supervisor.stop()
            await asyncio.to_thread(self._redis.kill)
            await self._ways.close()
        return self.outcome

    # Processes

    async def _start(self) -> None:
        settings, hub = self._settings, self._ways.hub
        shared = (f"--model={settings.model}", f"--redis-url={self._redis.url}", "--log-level=error")
        workers = [await self._worker(pool, i, shared) for pool in POOLS for i in (0, 1)]
        ports = choose_ports(2)
        flags = [f"--{pool}-workers={','.join(self._addresses[f'{pool}-{i}'] for i in (0, 1))}" for pool in POOLS]
        routers = [
            ProcessSpec(
                f"router-{i}",
                (
                    *_python("router"),
                    f"--host={hub}",
                    "--allow-anonymous",
                    f"--port={port}",
                    *shared,
                    *flags,
                    "--max-queue-wait-s=0",
                ),
                gates_readiness=True,
            )
            for i, port in enumerate(ports)
        ]
        await self._supervisor.start([*workers, *routers])
        self._routers = [AsyncClient(f"{hub}:{port}") for port in ports]
        for pool in POOLS:
            await self._all_serve(pool)

    async def _worker(self, pool: str, index: int, shared: tuple[str, ...]) -> ProcessSpec:
        name = f"{pool}-{index}"
        host, port, address = await self._ways.lead_to(name)
        self._addresses[name] = address
        argv = [
            *_python(POOLS[pool]),
            f"--host={host}",
            "--allow-anonymous",
            f"--port={port}",
            f"--advertise-address={address}",
            f"--worker-id={name}",
            "--drain-timeout-s=1",
            *shared,
            *self._settings.worker_flags,
            *([f"--speculation={self._settings.speculation}"] if pool == "decode" else []),
        ]
        # As `baton serve` starts them: threads of all workers on all cores would wait for each other most of the time.
        cpus = sorted(os.sched_getaffinity(0))
        own = frozenset({cpus[index % len(cpus)]})
        command, environment = self._ways.command_line(name, argv), (huge_pages.MALLOC_SETTING, OPENMP_SETTING)
        return ProcessSpec(name, command, cpus=own, environment=environment, stop_rank=1)

    def _on_change(self, change: Change) -> None:
        if change.kind == "started":
            self._pids[change.name] = change.pid
            self._started.set()
            self._started = asyncio.Event()
        elif change.kind == "died" and change.pid not in self._expected_deaths:
            self.outcome.ledger.violations.append(f"{change.name} ended by itself: {change.exit_text}")

    async def _all_serve(self, pool: str) -> None:
        """Waits until every router sees both workers of a pool serve, as the processes that they are now."""
        names = {f"{pool}-{index}" for index in (0, 1)}
        try:
            async with asyncio.timeout(RETURN_LIMIT_S):
                for router in self._routers:
                    # A router says what it sees when it is asked, and only then.
                    while not names <= await _serving(router):  # noqa: ASYNC110
                        await asyncio.sleep(LOOK_AGAIN_S)
        except TimeoutError as error:
            seen = [await router.workers() for router in self._routers]
            raise AssertionError(f"{names} do not serve after {RETURN_LIMIT_S} s; routers see {seen}") from error

    # Misfortune

    async def _misfortune(self, clients: Clients) -> None:
        settings = self._settings
        seed, pause_s = settings.seed, settings.mean_pause_s
        try:
            async with asyncio.TaskGroup() as group:
                if settings.only is not None:
                    pools = cycle(POOLS)
                    drawn = faults(seed, "both pools", {settings.only: 1}, pause_s)
                    group.create_task(self._thread(drawn, lambda fault: self._strike(next(pools), fault)))
                    return
                for pool in POOLS:
                    drawn = faults(seed, pool, self._kinds(pool), pause_s)
                    group.create_task(self._thread(drawn, partial(self._strike, pool)))
                group.create_task(self._thread(faults(seed, "redis", REDIS_KINDS, 2 * pause_s), self._strike_redis))
                if settings.has_floods:
                    drawn = faults(seed, "floods", {"flood": 1}, 2 * pause_s)
                    group.create_task(self._thread(drawn, partial(self._flood, clients)))
        finally:
            self._calm.set()

    def _kinds(self, pool: str) -> dict[str, int]:
        """What may befall workers of a pool."""
        return WORKER_KINDS | PARTED if pool == "prefill" and isinstance(self._ways, Namespaces) else WORKER_KINDS

    async def _thread(self, drawn: Iterator[Fault], strike: Callable[[Fault], Awaitable[None]]) -> None:
        ends_s = time.monotonic() + self._settings.duration_s
        for fault in drawn:
            if time.monotonic() + fault.pause_s >= ends_s:
                return
            await asyncio.sleep(fault.pause_s)
            struck = Struck(fault.kind, time.monotonic(), float("inf"))
            self.outcome.struck.append(struck)
            await strike(fault)
            struck.ended_s = time.monotonic()

    async def _strike(self, pool: str, fault: Fault) -> None:
        """A worker is struck, and is there again when this returns."""
        name = f"{pool}-{fault.target}"
        pid = self._pids[name]
        if fault.kind in ("kill", "drain"):
            await self._end(name, signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM)
        elif fault.kind == "stop":
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(fault.duration_s)
            os.kill(pid, signal.SIGCONT)
        elif fault.kind == "cut":
            await self._ways.cut(name)
            await asyncio.sleep(fault.duration_s)
            await self._ways.mend(name)
        else:
            assert isinstance(self._ways, Namespaces), "a proxy cannot part two workers from each other alone"
            await self._ways.part(name, "decode-0")
            await asyncio.sleep(fault.duration_s)
            await self._ways.join(name, "decode-0")
        await self._all_serve(pool)

    async def _end(self, name: str, how: signal.Signals) -> None:
        """Returns when another process has taken its place."""
        pid = self._pids[name]
        self._expected_deaths.add(pid)
        os.kill(pid, how)
        try:
            async with asyncio.timeout(RETURN_LIMIT_S):
                while self._pids[name] == pid:
                    await self._started.wait()
        except TimeoutError as error:
            raise AssertionError(f"{name} is not back {RETURN_LIMIT_S} s after {how.name}") from error

    async def _roll(self) -> None:
        """Every process ends in order and comes back: one after another of each kind, the kinds side by side."""
        async with asyncio.TaskGroup() as group:
            for kind in ("router", *POOLS):
                group.create_task(self._roll_kind(kind))
        await asyncio.to_thread(self._redis.kill)
        await asyncio.to_thread(self._redis.start)
        self._calm.set()

    async def _roll_kind(self, kind: str) -> None:
        for index in (0, 1):
            struck = Struck(f"restart of {kind}-{index}", time.monotonic(), float("inf"))
            self.outcome.struck.append(struck)
            await self._end(f"{kind}-{index}", signal.SIGTERM)
            for pool in POOLS if kind == "router" else (kind,):
                await self._all_serve(pool)
            struck.ended_s = time.monotonic()

    async def _strike_redis(self, fault: Fault) -> None:
        if fault.kind == "redis killed":
            await asyncio.to_thread(self._redis.kill)
            await asyncio.sleep(fault.duration_s)
            await asyncio.to_thread(self._redis.start)
        elif fault.kind == "redis flushed":
            await asyncio.to_thread(self._redis.flush)
        else:
            self._redis.freeze()
            await asyncio.sleep(fault.duration_s)
            self._redis.thaw()

    async def _flood(self, clients: Clients, fault: Fault) -> None:
        """More than the pools hold comes at once; half of it leaves again."""
        asks = [
            clients.ask(asked, Move(0, None, fault.duration_s if index % 2 else None))
            for index, asked in enumerate(flood_requests(self._settings.seed))
        ]
        await asyncio.gather(*asks)

    async def _all_empty(self) -> None:
        began_s = time.monotonic()
        for name, address in self._addresses.items():
            try:
                report = await load_of(address, holds_nothing, EMPTY_LIMIT_S)
                self.outcome.num_handoffs_lost += report.load.num_handoffs_lost
            except AssertionError as error:
                self.outcome.ledger.violations.append(f"{name} is not empty: {error}")
        self.outcome.empty_after_s = time.monotonic() - began_s


async def _serving(router: AsyncClient) -> set[str]:
    """Names of the workers that a router sees serve; none while it cannot take requests."""
    try:
        await router.get_model()
        statuses = await router.workers()
    except Unavailable:
        return set()
    serving = inference_pb2.WORKER_STATE_SERVING
    return {each.worker_id for each in statuses if each.state == serving and each.report_age_ms < MAX_AGE_MS}


def _python(module: str) -> list[str]:
    return [sys.executable, "-P", "-m", module]


async def play_tracer(settings: Settings, ways: Ways) -> Outcome:
    """A run over the tracer, whose answers must be right bit for bit."""
    requests = tracer_requests(settings.seed)
    answers = {asked: tracer_answer(asked) for asked in (*requests, *flood_requests(settings.seed))}

    def check(asked: Asked, tokens: Sequence[int]) -> None:
        assert list(tokens) == answers[asked], "not the tracer's answer"

    async def prepare(_: AsyncClient) -> Check:
        return check

    return await ChaosRun(settings, ways).run(requests, prepare)
