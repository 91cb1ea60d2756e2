"""What `baton profile` can be asked for, and the checks between its options."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from baton.options import ClusterConfig, ServeConfig
from runtime import config as configuration
from runtime.errors import ConfigError

STANDARD_OUTPUT = "-"
DEFAULT_MODEL = "smollm2"
DRAIN_TIMEOUT_S = 2.0
MAX_BATCH = 512
OWN_OPTIONS = ("port", "drain_timeout_s", "max_num_seqs", "max_queue_wait_s", "tenants_file")
"""Of `baton serve`: set here."""


def _in(group: str, **metadata: object) -> dict[str, object]:
    return {"group": group, **metadata}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a device can do."""

    bytes_per_s: float
    """Read from its memory."""
    flops_per_s: float
    """Multiplications and additions."""
    origin: str = "given"
    """Where these numbers come from."""


@dataclass(frozen=True, slots=True)
class ProfileConfig(ClusterConfig):
    """`baton profile [MODEL]`."""

    model: str | None = field(default=None, metadata={"positional": True})
    """What to serve and put under load; default: smollm2."""
    serve: tuple[str, ...] = field(default=(), metadata=_in("Service"))
    """Further options of `baton serve`, without dashes: dtype=bfloat16,quantization=int8. Given again, they add up."""
    address: tuple[str, ...] = field(default=(), metadata=_in("Service"))
    """Workers that run, host:port, as `baton workers` shows them: their steps are profiled, whatever these compute.
    Default: a service is started, profiled and stopped."""

    prompt_tokens: int = field(default=512, metadata=_in("Load", min=2))
    """Tokens of the prompts of which prefill is profiled, one after another."""
    context_tokens: int = field(default=128, metadata=_in("Load", min=2))
    """Tokens of the prompts of the streams of which decode is profiled."""
    batch_sizes: tuple[str, ...] = field(default=("1", "32"), metadata=_in("Load"))
    """Streams at once; decode is profiled with each of these numbers."""

    num_steps: int = field(default=16, metadata=_in("Profile", min=1, max=4096))
    """Steps of each load, or of each worker at --address."""
    max_wait_s: float = field(default=10.0, metadata=_in("Profile", min=0.1, max=60))
    """How long to wait for that many."""
    peaks: tuple[str, ...] = field(default=(), metadata=_in("Profile"))
    """What counts as a device's peak, in GB/s and GFLOP/s: 1600,376000. Default: what each worker measures, which takes
    it about a second, in which it computes no steps."""

    json: str | None = field(default=None, metadata=_in("Output", bare=STANDARD_OUTPUT))
    """File for all figures, step by step; "-", or no value, is standard output, in place of the table."""
    perfetto: Path | None = field(default=None, metadata=_in("Output"))
    """File with every step for https://ui.perfetto.dev."""

    def __post_init__(self) -> None:
        # Not super(): a class with slots is made anew, and that name then means another one.
        ClusterConfig.__post_init__(self)
        read_batch_sizes(self.batch_sizes)
        read_peaks(self.peaks)
        if self.address and (self.model is not None or self.serve):
            raise ConfigError(
                "--address: the workers there run already; MODEL and --serve are for a service started here"
            )
        for flag, path in (("--json", self.json), ("--perfetto", self.perfetto)):
            if path not in (None, STANDARD_OUTPUT) and not Path(path).absolute().parent.is_dir():
                raise ConfigError(f"{flag}: the folder of {str(path)!r} does not exist")

    def serve_config(self) -> ServeConfig:
        """Options of the service that is started. ConfigError for those that cannot be chosen."""
        for word in self.serve:
            name = word.partition("=")[0].replace("-", "_")
            if name in OWN_OPTIONS:
                raise ConfigError(f"--serve: {word!r}: the profile sets {name} itself")
        # A seat for each stream: memory for more of them would be taken before the first step.
        seats = max(read_batch_sizes(self.batch_sizes))
        fixed = ["--port=0", "--max-queue-wait-s=0", f"--drain-timeout-s={DRAIN_TIMEOUT_S}", f"--max-num-seqs={seats}"]
        flags = ["--log-level=error", *fixed, *(f"--{word}" for word in self.serve)]
        argv = [self.model or DEFAULT_MODEL, *flags]
        return configuration.load(ServeConfig, argv, prog="baton profile --serve", description="", env={})


def read_batch_sizes(words: tuple[str, ...]) -> list[int]:
    """The numbers that --batch-sizes names. ConfigError for what is none."""
    sizes = [int(word) if word.isascii() and word.isdigit() else 0 for word in words]
    if not sizes or min(sizes) < 1 or max(sizes) > MAX_BATCH:
        raise ConfigError(f"--batch-sizes: whole numbers from 1 to {MAX_BATCH}, by commas, got {','.join(words)!r}")
    return sizes


def read_peaks(words: tuple[str, ...]) -> Limits | None:
    """What --peaks says; None: nothing. ConfigError for what is no pair of positive numbers."""
    if not words:
        return None
    try:
        values = [float(word) for word in words]
    except ValueError:
        values = []
    if len(values) != 2 or not all(0 < value < float("inf") for value in values):
        raise ConfigError(f"--peaks: GB/s and GFLOP/s, two positive numbers by a comma, got {','.join(words)!r}")
    return Limits(bytes_per_s=1e9 * values[0], flops_per_s=1e9 * values[1])
