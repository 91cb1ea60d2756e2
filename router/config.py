"""Configuration of a router. `runtime.config.load` fills it from file, environment and flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from runtime.doors import check_cluster, check_exposure
from runtime.tls import check_files


def _in(group: str, **metadata: object) -> dict[str, object]:
    return {"group": group, **metadata}


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """What a router process is told."""

    model: str = field(metadata=_in("Model"))
    """Hugging Face folder, .gguf file, "smollm2" or "tracer": the tokenizer and chat template are read from it."""
    served_model_name: str | None = field(default=None, metadata=_in("Model"))
    """The model's public name; default: its folder or file name."""

    host: str = field(default="127.0.0.1", metadata=_in("Router"))
    """Address to listen on."""
    port: int = field(default=50051, metadata=_in("Router", min=0, max=65535))
    """Port to listen on; 0 takes a free one."""
    router_id: str | None = field(default=None, metadata=_in("Router"))
    """Name in logs and traces, unique among routers; default: router and a random suffix."""
    drain_timeout_s: float = field(default=30.0, metadata=_in("Router", min=0))
    """How long SIGTERM waits for running requests."""
    health_port: int | None = field(default=None, metadata=_in("Router", min=1, max=65535))
    """Port for grpc.health.v1 alone, without TLS, for probes; the other port answers health as well."""

    tenants_file: Path | None = field(default=None, metadata=_in("Clients"))
    """TOML file of tenants: hashes of their tokens, names of their certificates, their limits; read again when it
    changes. Without it all clients are one tenant."""
    tls_cert_file: Path | None = field(default=None, metadata=_in("Clients"))
    """PEM file of the certificate, with its chain, that clients see; read again when it changes."""
    tls_key_file: Path | None = field(default=None, metadata=_in("Clients"))
    """PEM file of that certificate's key."""
    tls_client_ca_file: Path | None = field(default=None, metadata=_in("Clients"))
    """PEM file of authorities; every client must have a certificate of one of them."""
    allow_anonymous: bool = field(default=False, metadata=_in("Clients"))
    """Listen on other addresses than loopback although nothing is asked of clients."""

    redis_url: str | None = field(default=None, metadata=_in("Workers", url=True))
    """Where workers register and sessions are remembered, redis://host:port/db; rediss:// for TLS, whose files go into
    the URL: ?ssl_ca_certs=FILE&ssl_certfile=FILE&ssl_keyfile=FILE."""
    redis_password_file: Path | None = field(default=None, metadata=_in("Workers"))
    """File with the password for Redis; it may also stand in the URL, but not on the command line."""
    cluster_secret_file: Path | None = field(default=None, metadata=_in("Workers"))
    """File with the secret that calls to workers carry, one a line, the first is sent; read again when it changes."""
    cluster_tls_cert_file: Path | None = field(default=None, metadata=_in("Workers"))
    """PEM file of the certificate that workers ask for, with its chain."""
    cluster_tls_key_file: Path | None = field(default=None, metadata=_in("Workers"))
    """PEM file of that certificate's key."""
    cluster_tls_ca_file: Path | None = field(default=None, metadata=_in("Workers"))
    """PEM file of the authorities that sign the workers' certificates, and of no others."""
    cluster_tls_server_name: str | None = field(default=None, metadata=_in("Workers"))
    """Name that the workers' certificates carry; default: the host part of each address."""
    prefill_workers: tuple[str, ...] = field(default=(), metadata=_in("Workers"))
    """host:port of prefill workers that are there without registering, separated by commas."""
    decode_workers: tuple[str, ...] = field(default=(), metadata=_in("Workers"))
    """host:port of decode and mixed workers that are there without registering, separated by commas."""
    policy: str = field(default="session_affinity", metadata=_in("Workers"))
    """How a worker is picked among those that can serve, a file of router/policies: session_affinity, prefix_affinity
    or least_loaded."""
    local_prefill_max_tokens: int = field(default=0, metadata=_in("Workers", min=0))
    """Prompts of at most so many tokens are prefilled by the decode worker itself."""
    local_turn_max_tokens: int = field(default=256, metadata=_in("Workers", min=0))
    """Of a session's turn at the decode worker that holds its KV, at most so many new tokens are prefilled there; where
    more is new a prefill worker computes what it has not cached."""
    turn_placement: Literal["fixed", "lent", "measured"] = field(default="fixed", metadata=_in("Workers"))
    """Who computes what is new in a session's turn. fixed: by --local-turn-max-tokens. lent: the same, and a prefill
    worker takes the KV of earlier turns from the holder. measured: whichever of these is cheapest by what workers
    measure, counting what running streams wait."""
    worker_silence_s: float = field(default=3.0, metadata=_in("Workers", min=0.5))
    """A worker not heard for so long is taken for lost; its requests go on elsewhere."""
    worker_wait_s: float = field(default=60.0, metadata=_in("Workers", min=0))
    """How long a request that lost its worker waits for another."""

    max_num_queued: int = field(default=1024, metadata=_in("Requests", min=0))
    """Most requests that wait while every seat is taken; beyond it RESOURCE_EXHAUSTED, for the lowest class first."""
    max_queue_wait_s: float = field(default=10.0, metadata=_in("Requests", min=0))
    """A request whose wait would be longer, at the rate at which others end now, is refused at once; 0: never."""
    priority_ageing_s: float = field(default=5.0, metadata=_in("Requests", min=0.001))
    """Seconds of waiting that weigh as much as one class of priority, as at the workers."""
    client_stall_s: float = field(default=60.0, metadata=_in("Requests", min=0.1))
    """A client that has taken nothing for so long, with its window full, is cut off."""
    session_ttl_s: float = field(default=3600.0, metadata=_in("Requests", min=1))
    """How long a session is remembered after its last turn."""

    metrics_port: int | None = field(default=None, metadata=_in("Observability", min=0, max=65535))
    """Port of GET /metrics, in the format of Prometheus, without a credential; 0 takes a free one. Default: there is
    none."""
    metrics_host: str = field(default="127.0.0.1", metadata=_in("Observability"))
    """Address that --metrics-port listens on, whatever --host is."""
    trace: bool = field(default=False, metadata=_in("Observability"))
    """Keep the traces of recent requests in memory, for `baton trace`."""
    trace_exporter: Literal["none", "console", "otlp"] = field(default="none", metadata=_in("Observability"))
    """Where traces go beside: standard output, or a collector; what workers did is part of them."""
    otlp_endpoint: str | None = field(default=None, metadata=_in("Observability"))
    """Collector for --trace-exporter otlp, http://host:4317."""
    trace_sample_ratio: float = field(default=1.0, metadata=_in("Observability", min=0, max=1))
    """Part of the traces that begin here which are recorded; a caller's decision is followed. Those of requests that
    failed, lost a worker or were slow are recorded in any case."""
    trace_slow_first_token_ms: float = field(default=5000.0, metadata=_in("Observability", min=0))
    """A request whose first token takes longer is slow."""
    trace_slow_total_ms: float = field(default=60000.0, metadata=_in("Observability", min=0))
    """A request that takes longer is slow."""
    trace_text: bool = field(default=False, metadata=_in("Observability"))
    """Write prompts, stop strings and answers into traces; whoever sees traces can read them."""
    page_port: int | None = field(default=None, metadata=_in("Observability", min=0, max=65535))
    """Port of the live page, for browsers: the workers, their load and the requests of this router, without a
    credential; 0 takes a free one. Default: there is none."""
    page_host: str = field(default="127.0.0.1", metadata=_in("Observability"))
    """Address that --page-port listens on, whatever --host is."""
    metric_exporter: Literal["none", "console", "otlp"] = field(default="none", metadata=_in("Observability"))
    """Where the gen_ai.* metrics of OpenTelemetry go beside --metrics-port; "otlp" sends them to --otlp-endpoint."""
    request_log: Path | None = field(default=None, metadata=_in("Observability"))
    """File that gets a line of JSON for each request that ends, without its text; "-" is standard output."""
    log_level: Literal["debug", "info", "warning", "error"] = field(default="info", metadata=_in("Observability"))
    """Least severe records that are logged."""
    status_fd: int | None = field(default=None, metadata=_in("Supervision", hidden=True))
    """Inherited socket on which this process reports its state."""

    def __post_init__(self) -> None:
        check_cluster(self)
        check_files("--tls", self.tls_cert_file, self.tls_key_file, self.tls_client_ca_file)
        has_door = self.tenants_file is not None or self.tls_client_ca_file is not None
        check_exposure(self.host, has_door, self.allow_anonymous, "--tenants-file or --tls-client-ca-file")
