"""What a scenario is made of: its data, the services it starts, the phases it measures.

1. A `Run` belongs to one command: it has options and sizes, and collects samples and errors.
2. `Run.service` starts a service with the scenario's options, or takes the one at the address; one short request
   goes first, so that no phase pays for what only happens once.
3. `Service.phase` is a stretch of load: what is sent in it makes rows, and its CPU time is shared by them.
A scenario is a `Scenario` and an async function from a `Run` to rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from baton.bench import system
from baton.bench.asks import Ask, Asks
from baton.bench.load import Load, Outcome
from baton.bench.options import BenchConfig, Sizes, Slo, known, read_slo
from baton.bench.rows import Figure, Row, Window, summarize
from baton.client import AsyncClient
from baton.options import ServeConfig
from baton.supervisor import Change
from runtime import config as configuration
from runtime.errors import ConfigError

DRAIN_TIMEOUT_S = 5.0
WARM_UP = (16, 4)
"""Tokens of prompt and answer of the request that goes first."""
SHOW_EVERY_S = 0.2
PLAIN_EVERY_S = 15.0
"""The same where there is no terminal."""
MIXED = {"num_prefill": 0, "num_decode": 0, "num_mixed": 1}


class Ticker:
    """One line on a terminal that says what is going on; elsewhere a plain one now and then."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._shown_s = 0.0 if self._live else time.monotonic()

    def show(self, text: Callable[[], str]) -> None:
        """Shows `text`, unless something was shown just now."""
        now_s = time.monotonic()
        if now_s - self._shown_s >= (SHOW_EVERY_S if self._live else PLAIN_EVERY_S):
            self._shown_s = now_s
            self._stream.write(f"\r\x1b[2K{text()[:100]}" if self._live else f"{text()}\n")
            self._stream.flush()

    def say(self, text: str) -> None:
        """A line that stays."""
        self.clear()
        self._stream.write(text + "\n")
        self._stream.flush()

    def clear(self) -> None:
        """Takes the line away."""
        if self._live:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()


@dataclass(slots=True)
class Phase:
    """A stretch of load on one service."""

    name: str
    """Shown while it runs."""
    load: Load
    """Sends and remembers."""
    slo: Slo
    """Limits of goodput."""
    started_s: float
    """When it began."""
    cpu_s: float | None = None
    """CPU seconds of all processes of the service, once it is over."""
    router_cpu_s: float | None = None
    """Of its routers alone."""
    machine_busy: float | None = None
    """Part of the time of all CPUs of this machine in which they were busy, with whatever."""

    @property
    def num_tokens(self) -> int:
        """Tokens generated in it."""
        return sum(outcome.num_output_tokens for outcome in self.load.all_outcomes())

    def row(
        self,
        name: str,
        label: str | None = None,
        window: Window | None = None,
        figures: Mapping[str, Figure] | None = None,
    ) -> Row:
        """The row of what was sent under `label`, or of everything."""
        outcomes = self.load.all_outcomes() if label is None else self.load.outcomes.get(label, [])
        return self.row_of(name, outcomes, window, figures)

    def row_of(
        self,
        name: str,
        outcomes: list[Outcome],
        window: Window | None = None,
        figures: Mapping[str, Figure] | None = None,
    ) -> Row:
        """The row of some of what was sent."""
        num_tokens = self.num_tokens
        cpu_s_per_token = None if self.cpu_s is None or not num_tokens else self.cpu_s / num_tokens
        return summarize(name, outcomes, slo=self.slo, cpu_s_per_token=cpu_s_per_token, window=window, figures=figures)


class Service:
    """A service that can be put under load."""

    def __init__(
        self, run: Run, name: str, clients: Sequence[AsyncClient], origin: system.System, vocab_size: int
    ) -> None:
        """`clients` are of its routers, which get requests in turn."""
        self._run = run
        self._name = name
        self.clients = clients
        """One for each of its routers."""
        self._origin = origin
        self.asks = Asks(vocab_size, run.config.seed)
        """Draws prompts; every service of a run draws the same ones."""

    def draw(self) -> list[Ask]:
        """The requests that the sizes call for."""
        run, sizes = self._run, self._run.sizes
        lengths = known(sizes.prompt_tokens), known(sizes.output_tokens)
        return self.asks.of(
            known(sizes.dataset), known(sizes.num_requests), *lengths, run.model, run.config.dataset_file
        )

    @contextlib.asynccontextmanager
    async def phase(self, name: str) -> AsyncIterator[Phase]:
        """Measures what is sent in the block."""
        ticker = self._run.ticker
        load = Load(self.clients, lambda: ticker.show(lambda: _progress(f"{self._name} {name}", phase)))
        phase = Phase(name, load, read_slo(self._run.config.slo), time.monotonic())
        before, machine_before = self._origin.cpu_times_s(), system.machine_times_s()
        yield phase
        after, machine_after = self._origin.cpu_times_s(), system.machine_times_s()
        phase.cpu_s = system.cpu_between_s(before, after)
        phase.router_cpu_s = system.cpu_between_s(before, after, set(self._origin.router_pids()))
        phase.machine_busy = system.busy_between(machine_before, machine_after)
        self._run.note(phase)

    async def warm_up(self) -> None:
        """One short request to each router, whose figures nobody looks at. Raises what it raised."""
        load = Load(self.clients, lambda: None)
        for _ in self.clients:
            outcome = await load.send("warm-up", self.asks.one(*WARM_UP))
            if outcome.finish is None:
                raise ConfigError(f"the service does not answer: {outcome.error}")


@dataclass(slots=True)
class Run:
    """One measurement."""

    config: BenchConfig
    """What was asked for."""
    scenario: Scenario
    """What is measured."""
    sizes: Sizes
    """How much of it."""
    ticker: Ticker
    """Says what is going on."""
    samples: list[system.Sample] = field(default_factory=list)
    """Workers' load over time, if it is drawn."""
    errors: list[str] = field(default_factory=list)
    """Messages of the requests that failed, in all phases."""

    @property
    def model(self) -> str:
        """What is served."""
        return self.config.model or self.scenario.model

    @contextlib.asynccontextmanager
    async def service(self, name: str = "", **options: object) -> AsyncIterator[Service]:
        """A warm service with these options of `baton serve`, or the one at --address."""
        async with contextlib.AsyncExitStack() as stack:
            if self.config.address is not None:
                origin = system.System((self.config.address,), {})
            else:
                serve = self.serve_config(options)
                self.ticker.show(lambda: f"starting {name or self.model}")
                origin = await stack.enter_async_context(system.started(serve, self._on_change))
            shown = self.config.credentials() if self.config.address is not None else {}
            clients = [
                await stack.enter_async_context(AsyncClient(address, timeout_s=self.config.timeout_s, **shown))
                for address in origin.addresses
            ]
            service = Service(self, name, clients, origin, (await clients[0].get_model()).vocab_size)
            await service.warm_up()
            if self.config.address is None:
                await system.until_settled(clients[0])
            if self.config.plot is not None:
                await stack.enter_async_context(_beside(system.poll(clients[0], name, self.samples)))
            yield service

    def serve_config(self, options: Mapping[str, object]) -> ServeConfig:
        """Options of the service: the scenario's, then those of --serve, which may not contradict them."""
        fixed = {"port": 0, "drain_timeout_s": DRAIN_TIMEOUT_S, **options}
        if self.config.role == "mixed":
            fixed.update(MIXED)
        for word in self.config.serve:
            name = word.partition("=")[0].replace("-", "_")
            if name in fixed:
                raise ConfigError(f"--serve: {word!r}: scenario {self.scenario.name} sets {name} itself")
        flags = ["--log-level=error"]  # evictions and the like are what scenarios are about
        flags += [_flag(name.replace("_", "-"), value) for name, value in fixed.items()]
        flags += [f"--{word}" for word in self.config.serve]
        return configuration.load(ServeConfig, [self.model, *flags], prog="baton bench --serve", description="", env={})

    def note(self, phase: Phase) -> None:
        """Remembers the failures of a phase that is over."""
        for outcome in phase.load.all_outcomes():
            if outcome.has_failed:
                self.errors.append(outcome.error)

    def _on_change(self, change: Change) -> None:
        if change.kind == "died":
            self.ticker.say(f"{change.name}: {change.exit_text}; CPU time of this phase is unknown")


@dataclass(frozen=True, slots=True)
class Scenario:
    """Something to measure."""

    name: str
    """What the user types."""
    summary: str
    """What it compares, in a line."""
    sizes: Sizes
    """How much of it by default; what is None it does not have."""
    run: Callable[[Run], Awaitable[list[Row]]]
    """Does it."""
    model: str = "smollm2"
    """What is served by default."""
    needs_own_service: bool = False
    """It compares services, or reads their processes: not for --address."""
    needs_pair: bool = False
    """It is about two pools: not for --role mixed."""

    def check(self, config: BenchConfig) -> None:
        """ConfigError where options and scenario do not go together."""
        if self.needs_own_service and config.address is not None:
            raise ConfigError(f"--address: scenario {self.name} starts its services itself, got {config.address!r}")
        if self.needs_pair and config.role == "mixed":
            raise ConfigError(f"--role: scenario {self.name} is about prefill and decode apart, got 'mixed'")


def _progress(name: str, phase: Phase) -> str:
    outcomes = phase.load.all_outcomes()
    elapsed_s = time.monotonic() - phase.started_s
    return f"{name.strip()}: {len(outcomes)} requests, {phase.num_tokens} tokens in them, {elapsed_s:.0f} s"


@contextlib.asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Work that goes on for as long as the block runs."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def _flag(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={','.join(map(str, value)) if isinstance(value, tuple) else value}"
