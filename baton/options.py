"""Options of the `baton` subcommands, one frozen dataclass each; `runtime.config.load` fills them.

Flags have the names that `vllm serve` gives them where the meaning is the same. Options left at None are not passed on
to the processes of `serve`, whose own defaults then hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from baton.client import DEFAULT_ADDRESS
from runtime import config as configuration
from runtime.devices import check_device
from runtime.doors import check_cluster, check_exposure, read_token
from runtime.errors import ConfigError
from runtime.tls import check_files


def _in(group: str, **metadata: object) -> dict[str, object]:
    return {"group": group, **metadata}


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """`baton serve MODEL`: the whole system on this machine."""

    model: str = field(metadata={"positional": True})
    """Hugging Face folder, .gguf file, "smollm2" (packaged) or "tracer" (no model: tests everything else)."""
    host: str = field(default="127.0.0.1", metadata=_in("Address"))
    """Where the first router listens; workers and Redis stay on loopback."""
    port: int = field(default=50051, metadata=_in("Address", min=0, max=65535))
    """Port of the first router, further routers take the next ones; 0: any free port."""

    tenants_file: Path | None = field(default=None, metadata=_in("Clients"))
    """TOML file of tenants: hashes of their tokens, names of their certificates, their limits; `baton token` makes
    tokens. Without it all clients are one tenant."""
    tls_cert_file: Path | None = field(default=None, metadata=_in("Clients"))
    """PEM file of the certificate, with its chain, that clients see."""
    tls_key_file: Path | None = field(default=None, metadata=_in("Clients"))
    """PEM file of that certificate's key."""
    tls_client_ca_file: Path | None = field(default=None, metadata=_in("Clients"))
    """PEM file of authorities; every client must have a certificate of one of them."""
    allow_anonymous: bool = field(default=False, metadata=_in("Clients"))
    """Listen on another address than loopback although nothing is asked of clients."""

    served_model_name: str | None = field(default=None, metadata=_in("Model"))
    """The model's public name; default: its folder or file name."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = field(default=None, metadata=_in("Model"))
    """Type of weights, activations and KV."""
    quantization: Literal["none", "int8"] | None = field(default=None, metadata=_in("Model"))
    """"int8" computes linear layers with weights and inputs rounded to 8 bits: faster, and almost as exact."""
    device: str | None = field(default=None, metadata=_in("Model"))
    """Where workers compute: cpu; npu or cuda, a device for each worker, counted from 0; npu:N, cuda:N, all on one."""
    tensor_parallel_size: int | None = field(default=None, metadata=_in("Model", min=1))
    """Processes of each worker that compute the model together, on NPUs with a device each; all workers alike."""
    decode_graphs: bool | None = field(default=None, metadata=_in("Model"))
    """On NPUs, record steps of decode and replay them."""
    max_model_len: int | None = field(default=None, metadata=_in("Model", min=2))
    """Most tokens of prompt and output together; default: what the model and the KV pool hold."""

    num_routers: int = field(default=1, metadata=_in("Processes", min=1))
    """Routers."""
    num_prefill: int = field(default=1, metadata=_in("Processes", min=0))
    """Workers that compute prompts."""
    num_decode: int = field(default=1, metadata=_in("Processes", min=0))
    """Workers that generate."""
    num_mixed: int = field(default=0, metadata=_in("Processes", min=0))
    """Workers that do both for their own requests."""
    redis_url: str | None = field(default=None, metadata=_in("Processes"))
    """A Redis or Valkey to use, redis://host:port/db; default: one is started."""
    redis_password_file: Path | None = field(default=None, metadata=_in("Processes"))
    """File with the password for --redis-url, which may not have it; process lists show URLs."""
    cluster_secret_file: Path | None = field(default=None, metadata=_in("Processes"))
    """File with the secret that routers and workers show each other; default: one is drawn for this run."""
    drain_timeout_s: float = field(default=30.0, metadata=_in("Processes", min=0))
    """How long running requests may take to finish after SIGTERM or Ctrl-C."""
    kv_cache_gpu_mem_utilization: float = field(default=0.6, metadata=_in("Processes", min=0.01, max=0.95))
    """Part of this machine's memory, or of the container's if that is less, that the KV pools of all workers may grow
    to together; of each device's, where workers have one each."""
    lend_cores: bool = field(default=True, metadata=_in("Processes"))
    """Let a worker that has nothing to compute lend its cores to the others, until it has."""

    max_num_queued: int | None = field(default=None, metadata=_in("Routers", min=0))
    """Most requests that wait in a router while every seat is taken; what comes beyond is refused."""
    max_queue_wait_s: float | None = field(default=None, metadata=_in("Routers", min=0))
    """A request whose wait would be longer is refused at once; 0: never."""
    policy: str | None = field(default=None, metadata=_in("Routers"))
    """How workers are picked: session_affinity, prefix_affinity or least_loaded."""
    local_turn_max_tokens: int | None = field(default=None, metadata=_in("Routers", min=0))
    """Of a session's turn at most so many new tokens are prefilled by the decode worker that holds its KV."""
    turn_placement: Literal["fixed", "lent", "measured"] | None = field(default=None, metadata=_in("Routers"))
    """Who computes what is new in a session's turn: by that limit, by it on KV that the holder lends, as measured."""
    session_ttl_s: float | None = field(default=None, metadata=_in("Routers", min=1))
    """How long a session is remembered after its last turn."""

    max_num_seqs: int | None = field(default=None, metadata=_in("Workers", min=1))
    """Most sequences that hold KV blocks at once, a worker."""
    batch_schedule: Literal["dynamic", "static"] | None = field(default=None, metadata=_in("Workers"))
    """"dynamic" is continuous batching; "static" is the baseline that holds a batch until its longest member ends."""
    max_batch_size: int | None = field(default=None, metadata=_in("Workers", min=1))
    """Most sequences that get a token in one decode step; others keep their KV and pause."""
    max_preemptions: int | None = field(default=None, metadata=_in("Workers", min=0))
    """How often a request may be evicted so that one of a higher class gets in."""
    priority_ageing_s: float | None = field(default=None, metadata=_in("Workers", min=0.001))
    """Seconds of waiting that weigh as much as one class of priority."""
    max_queue_latency_ms: float | None = field(default=None, metadata=_in("Workers", min=0))
    """How long a prompt may wait before shorter ones of its class that came later only share with it."""
    target_step_ms: float | None = field(default=None, metadata=_in("Workers", min=0.1))
    """What a step with decoding sequences may take before no more is let in to it."""
    min_step_ms: float | None = field(default=None, metadata=_in("Workers", min=0))
    """What a step takes at least, as on a slower device: for measurements."""
    max_num_tokens: int | None = field(
        default=None, metadata=_in("Workers", min=1, aliases=("--max-num-batched-tokens",))
    )
    """Most tokens computed in one step."""
    chunk_size: int | None = field(default=None, metadata=_in("Workers", min=1))
    """Most tokens of one prompt computed in one step."""
    kv_cache_type: Literal["paged"] | None = field(default=None, metadata=_in("Workers"))
    """How KV is kept: in blocks, reached through block tables. There is no other way."""
    kv_cache_dtype: Literal["auto", "int8"] | None = field(default=None, metadata=_in("Workers"))
    """Type of KV; auto: --dtype; "int8": rounded to 8 bits, about half the memory of bfloat16 and less to read."""
    kv_block_size: int | None = field(default=None, metadata=_in("Workers", min=1, aliases=("--block-size",)))
    """Token positions in a KV block."""
    swap_space_gib: float | None = field(default=None, metadata=_in("Workers", min=0, aliases=("--swap-space",)))
    """GiB of host memory for KV that makes room on a device, a worker that decodes."""
    num_kv_blocks: int | None = field(default=None, metadata=_in("Workers", min=1))
    """Blocks a worker's KV pool may grow to."""
    expected_sequence_tokens: int | None = field(default=None, metadata=_in("Workers", min=1))
    """Tokens that a sequence usually has: memory for as many sequences as a worker may hold is taken at its start."""
    kv_transports: tuple[str, ...] | None = field(default=None, metadata=_in("Workers"))
    """Transports to offer, of shm, grpc, mooncake; default: shm and grpc."""
    trusted_transfer_network: bool = field(default=False, metadata=_in("Workers"))
    """Nobody but workers can reach ports 15000 to 15999, where transport mooncake reads and writes KV for whoever asks;
    without this it is not used."""
    speculation: str | None = field(default=None, metadata=_in("Workers"))
    """Who drafts tokens for decode steps to check, so that one step may yield several: none; ngram, which looks up what
    followed the last tokens earlier in the text; self, the model in 8 bits; draft_model. Answers stay the same."""
    draft_model_path: str | None = field(default=None, metadata=_in("Workers"))
    """Hugging Face folder or .gguf file of the smaller model that drafts."""
    draft_length: int | None = field(default=None, metadata=_in("Workers", min=1, max=15))
    """Most tokens drafted for a sequence and step; fewer or none where they would not pay."""
    acceptance_threshold: float | None = field(default=None, metadata=_in("Workers", min=0, max=1))
    """Part of a sequence's drafts that must come true, else it gets shorter ones."""
    spec_memory_budget_mb: int | None = field(default=None, metadata=_in("Workers", min=0))
    """MiB that drafts may take; where they need more, decoding goes on without."""
    prefill_options: tuple[str, ...] = field(default=(), metadata=_in("Workers"))
    """Options of this section for prefill workers alone: max-num-tokens=1024,chunk-size=256."""
    decode_options: tuple[str, ...] = field(default=(), metadata=_in("Workers"))
    """Options of this section for decode and mixed workers alone: max-batch-size=32,max-num-seqs=64."""

    metrics_port: int | None = field(default=None, metadata=_in("Observability", min=1, max=65535))
    """Port of the first router's GET /metrics, in the format of Prometheus, on loopback; the other routers and then the
    workers, in the order in which they are shown, take the next ones. Default: there is none."""
    page_port: int | None = field(default=None, metadata=_in("Observability", min=1, max=65535))
    """Port of the first router's live page, on loopback; further routers take the next ones. Default: there is none."""
    request_log: Path | None = field(default=None, metadata=_in("Observability"))
    """File that gets a line of JSON for each request that ends, without its text; "-" is standard output."""
    trace: bool = field(default=False, metadata=_in("Observability"))
    """Keep the traces of recent requests in the routers, for `baton trace`."""
    trace_exporter: Literal["none", "console", "otlp"] = field(default="none", metadata=_in("Observability"))
    """Where traces go beside: standard output, or a collector."""
    otlp_endpoint: str | None = field(default=None, metadata=_in("Observability"))
    """Collector for --trace-exporter otlp, http://host:4317."""
    trace_sample_ratio: float = field(default=1.0, metadata=_in("Observability", min=0, max=1))
    """Part of the traces that begin here which are recorded, beside those of requests that failed, lost a worker or
    were slow."""
    trace_slow_first_token_ms: float | None = field(default=None, metadata=_in("Observability", min=0))
    """A request whose first token takes longer is slow."""
    trace_slow_total_ms: float | None = field(default=None, metadata=_in("Observability", min=0))
    """A request that takes longer is slow."""
    trace_text: bool = field(default=False, metadata=_in("Observability"))
    """Write prompts, stop strings and answers into traces."""
    log_level: Literal["debug", "info", "warning", "error"] = field(default="warning", metadata=_in("Observability"))
    """Least severe records that the processes log to standard error."""

    def __post_init__(self) -> None:
        if self.num_decode + self.num_mixed == 0:
            raise ConfigError("--num-decode: at least one decode or mixed worker is needed, got 0 of both")
        if self.port > 0 and self.port + self.num_routers - 1 > 65535:
            raise ConfigError(f"--port: {self.num_routers} routers need ports up to {self.port + self.num_routers - 1}")
        num_workers = self.num_prefill + self.num_decode + self.num_mixed
        if self.metrics_port is not None and self.metrics_port + self.num_routers + num_workers - 1 > 65535:
            raise ConfigError(
                f"--metrics-port: {self.num_routers + num_workers} processes need a port each from there on, "
                f"got {self.metrics_port}"
            )
        if self.redis_url is not None:
            # Wherever it was given: the processes that are started get it on their command lines.
            configuration.check_no_password(self.redis_url, "--redis-url")
        if self.redis_password_file is not None and self.redis_url is None:
            raise ConfigError(
                "--redis-password-file: needs --redis-url; a Redis that is started here gets one by itself"
            )
        if self.device is not None:
            check_device(self.device, self.model)
        check_files("--tls", self.tls_cert_file, self.tls_key_file, self.tls_client_ca_file)
        has_door = self.tenants_file is not None or self.tls_client_ca_file is not None
        check_exposure(self.host, has_door, self.allow_anonymous, "--tenants-file or --tls-client-ca-file")
        read_pool_options("--prefill-options", self.prefill_options)
        read_pool_options("--decode-options", self.decode_options)


SAME_IN_BOTH_POOLS = ("kv_cache_type", "kv_cache_dtype", "kv_block_size")
"""Of the options of workers, those that a handoff needs to be equal."""


def read_pool_options(flag: str, words: tuple[str, ...]) -> dict[str, object]:
    """The values of `words`, "name=value", by field of ServeConfig. ConfigError names `flag` and what is wrong."""
    known: dict[str, configuration.Option] = {}
    for option in configuration.options_of(ServeConfig):
        separate = option.group == "Workers" and option.kind is not tuple and option.name not in SAME_IN_BOTH_POOLS
        for name in (option.flag, *option.aliases) if separate else ():
            assert name is not None
            known[name.removeprefix("--")] = option
    values: dict[str, object] = {}
    for word in words:
        name, equals, text = word.partition("=")
        option_or_none = known.get(name.replace("_", "-"))
        if not equals or option_or_none is None:
            raise ConfigError(f"{flag}: {word!r} is not accepted; give name=value, of: {', '.join(known)}")
        if option_or_none.name in values:
            raise ConfigError(f"{flag}: {name} is given twice")
        values[option_or_none.name] = configuration.parse_text(option_or_none, text, f"{flag}: {name}")
    return values


@dataclass(frozen=True, slots=True)
class CredentialsConfig:
    """What the commands that call a router show it."""

    token_file: Path | None = field(default=None, metadata=_in("Credentials"))
    """File with the token that says which tenant calls."""
    tls_ca_file: Path | None = field(default=None, metadata=_in("Credentials"))
    """PEM file of the authorities that sign the router's certificate; with it the connection is encrypted."""
    tls_cert_file: Path | None = field(default=None, metadata=_in("Credentials"))
    """PEM file of a certificate of one's own, for routers that ask for one."""
    tls_key_file: Path | None = field(default=None, metadata=_in("Credentials"))
    """PEM file of that certificate's key."""
    tls_server_name: str | None = field(default=None, metadata=_in("Credentials"))
    """Name in the router's certificate; default: the host part of the address."""

    def credentials(self) -> dict[str, Any]:
        """Arguments of `Client`. ConfigError where the token cannot be read."""
        return {
            "token": None if self.token_file is None else read_token(self.token_file),
            "tls_ca_file": self.tls_ca_file,
            "tls_cert_file": self.tls_cert_file,
            "tls_key_file": self.tls_key_file,
            "tls_server_name": self.tls_server_name,
        }


@dataclass(frozen=True, slots=True)
class TokenConfig:
    """`baton token TENANT`."""

    tenant: str = field(metadata={"positional": True})
    """Name of the tenant that the token is for."""


@dataclass(frozen=True, slots=True)
class WorkersConfig(CredentialsConfig):
    """`baton workers`."""

    address: str = field(default=DEFAULT_ADDRESS, metadata=_in("Router"))
    """A router, host:port."""
    timeout_s: float = field(default=10.0, metadata=_in("Router", min=0))
    """How long to wait for its answer."""


@dataclass(frozen=True, slots=True)
class EndSessionConfig(WorkersConfig):
    """`baton end-session SESSION_ID`."""

    session_id: str = field(kw_only=True, metadata={"positional": True})
    """The session to forget."""


@dataclass(frozen=True, slots=True)
class TraceConfig(WorkersConfig):
    """`baton trace [REQUEST_ID]`."""

    request_id: str | None = field(default=None, kw_only=True, metadata={"positional": True})
    """The request to show; default: a table of the last ones."""
    limit: int = field(default=20, metadata=_in("Output", min=0))
    """Show at most so many; 0: as many as the router keeps."""
    perfetto: Path | None = field(default=None, metadata=_in("Output"))
    """Write a file that https://ui.perfetto.dev opens instead."""


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """What the commands that call workers show them."""

    cluster_secret_file: Path | None = field(default=None, metadata=_in("Credentials"))
    """File with the secret of the cluster, which the worker asks for."""
    cluster_tls_cert_file: Path | None = field(default=None, metadata=_in("Credentials"))
    """PEM file of a certificate of the cluster, for workers that ask for one."""
    cluster_tls_key_file: Path | None = field(default=None, metadata=_in("Credentials"))
    """PEM file of that certificate's key."""
    cluster_tls_ca_file: Path | None = field(default=None, metadata=_in("Credentials"))
    """PEM file of the authorities that sign the workers' certificates; with it the connection is encrypted."""
    cluster_tls_server_name: str | None = field(default=None, metadata=_in("Credentials"))
    """Name in the worker's certificate; default: the host part of the address."""

    def __post_init__(self) -> None:
        check_cluster(self)


@dataclass(frozen=True, slots=True)
class DrainConfig(ClusterConfig):
    """`baton drain WORKER`."""

    worker: str = field(kw_only=True, metadata={"positional": True})
    """The worker's own address, host:port, as `baton workers` shows it."""
    drain_timeout_s: float = field(default=30.0, metadata=_in("Worker", min=0))
    """How long what runs there may take before it goes on elsewhere; 0: as long as it takes."""
    next_role: Literal["prefill", "decode", "mixed"] | None = field(default=None, metadata=_in("Worker"))
    """The part in which the worker starts again when it is empty; default: it takes nothing any more."""


@dataclass(frozen=True, slots=True)
class AnswerConfig(CredentialsConfig):
    """What `baton generate` and `baton chat` share."""

    address: str = field(default=DEFAULT_ADDRESS, metadata=_in("Router"))
    """A router, host:port."""
    timeout_s: float | None = field(default=None, metadata=_in("Router", min=0))
    """How long an answer may take."""
    priority: Literal["low", "normal", "high"] | None = field(default=None, metadata=_in("Router"))
    """The request's class."""

    temperature: float = field(default=0.7, metadata=_in("Sampling"))
    """0 always takes the likeliest token. (A request that says nothing is sampled at 1.)"""
    top_p: float | None = field(default=None, metadata=_in("Sampling"))
    """Sample from the smallest set of tokens that reaches this probability."""
    top_k: int | None = field(default=None, metadata=_in("Sampling"))
    """Sample from this many likeliest tokens."""
    min_p: float | None = field(default=None, metadata=_in("Sampling"))
    """Sample from tokens at least this many times as likely as the likeliest."""
    presence_penalty: float | None = field(default=None, metadata=_in("Sampling"))
    """Against tokens that occurred in the output."""
    frequency_penalty: float | None = field(default=None, metadata=_in("Sampling"))
    """Against tokens, for each time they occurred in the output."""
    repetition_penalty: float | None = field(default=None, metadata=_in("Sampling"))
    """Against tokens that occurred in prompt or output; 1 is off."""
    max_tokens: int = field(default=512, metadata=_in("Sampling"))
    """Most tokens to generate. (A request that says nothing may fill the model's context.)"""
    min_tokens: int | None = field(default=None, metadata=_in("Sampling"))
    """No end before this many tokens."""
    seed: int | None = field(default=None, metadata=_in("Sampling"))
    """Makes the answer repeatable."""
    stop: tuple[str, ...] | None = field(default=None, metadata=_in("Sampling"))
    """End where one of these appears."""
    ignore_eos: bool | None = field(default=None, metadata=_in("Sampling"))
    """Go on past the model's end-of-sequence tokens."""


@dataclass(frozen=True, slots=True)
class GenerateConfig(AnswerConfig):
    """`baton generate PROMPT`."""

    prompt: str = field(kw_only=True, metadata={"positional": True})
    """The text to go on from; "-" reads standard input."""
    chat: bool = field(default=False, metadata=_in("Output"))
    """Take the prompt as a user's message and lay it out by the model's chat template."""
    session_id: str | None = field(default=None, metadata=_in("Conversation"))
    """A session whose turn this is: what it has in common with the turns before is not computed again."""
    append: bool = field(default=False, metadata=_in("Conversation"))
    """The prompt is only what is new, and goes on after what the session has."""
    stats: bool = field(default=False, metadata=_in("Output"))
    """Print workers, token counts and durations to standard error at the end."""


@dataclass(frozen=True, slots=True)
class ChatConfig(AnswerConfig):
    """`baton chat`."""

    system: str | None = field(default=None, metadata=_in("Conversation"))
    """A system message to begin with."""
