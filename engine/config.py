"""Configuration of a worker, of either pool. `runtime.config.load` fills it from file, environment and flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from runtime.devices import check_device, device_kind
from runtime.doors import check_cluster, check_exposure
from runtime.errors import ConfigError


def _in(group: str, **metadata: object) -> dict[str, object]:
    return {"group": group, **metadata}


NPU_BLOCK_SIZE = 128
RANK_DEVICES = ("cpu", "npu")
"""Kinds of devices that several ranks can compute on."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a worker process is told."""

    model: str = field(metadata=_in("Model"))
    """Hugging Face folder, .gguf file, "smollm2" (packaged), or "tracer" (no model: exact tests of everything else)."""
    served_model_name: str | None = field(default=None, metadata=_in("Model"))
    """The model's public name; default: its folder or file name."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = field(default="auto", metadata=_in("Model"))
    """Type of weights, activations and, but for --kv-cache-dtype, KV; auto: the checkpoint's, float32 for GGUF."""
    quantization: Literal["none", "int8"] = field(default="none", metadata=_in("Model"))
    """"int8" computes linear layers with weights and inputs rounded to 8 bits; all workers must be told the same."""
    device: str = field(default="cpu", metadata=_in("Model"))
    """Where to compute: cpu, npu:N (Ascend, docs/npu.md), or cuda:N, which is not optimised."""
    tensor_parallel_size: int = field(default=1, metadata=_in("Model", min=1))
    """Ranks, processes of this worker, that compute the model together: each has a part of every layer's heads and MLP,
    and on NPUs a device of its own, from --device on. Must divide query heads, KV heads and the MLP's inner size. KV
    goes to workers of equal degree alone; on NPUs to none, so that the worker must be mixed."""
    decode_graphs: bool = field(default=True, metadata=_in("Model"))
    """On NPUs, record steps of decode and replay them: fewer launches, some memory, a longer start."""
    max_model_len: int | None = field(default=None, metadata=_in("Model", min=2))
    """Most tokens of prompt and output together; default: the model's context, or what the KV pool holds if less."""

    role: Literal["decode", "mixed"] = field(default="decode", metadata=_in("Worker"))
    """Decode pool only: "mixed" prefills every request itself."""
    worker_id: str | None = field(default=None, metadata=_in("Worker"))
    """Name in logs, traces and listings; default: role and a random suffix."""
    host: str = field(default="127.0.0.1", metadata=_in("Worker"))
    """Address to listen on, and to be reached at unless --advertise-address is given."""
    port: int = field(default=0, metadata=_in("Worker", min=0, max=65535))
    """Port to listen on; 0 takes a free one."""
    advertise_address: str | None = field(default=None, metadata=_in("Worker"))
    """host:port under which routers and other workers reach this worker; default: where it listens."""
    health_port: int | None = field(default=None, metadata=_in("Worker", min=1, max=65535))
    """Port for grpc.health.v1 alone, without TLS, for probes; the other port answers health as well."""
    redis_url: str | None = field(default=None, metadata=_in("Worker", url=True))
    """Where to register, redis://host:port/db; without it routers need static lists. rediss:// for TLS, whose files go
    into the URL: ?ssl_ca_certs=FILE&ssl_certfile=FILE&ssl_keyfile=FILE."""
    redis_password_file: Path | None = field(default=None, metadata=_in("Worker"))
    """File with the password for Redis; it may also stand in the URL, but not on the command line."""
    cpus: str | None = field(default=None, metadata=_in("Worker"))
    """CPU numbers to run on, "0,2-3"; default: all this process may use."""
    drain_timeout_s: float = field(default=30.0, metadata=_in("Worker", min=0))
    """How long SIGTERM waits for running requests before they are given back to the router."""

    step_stall_s: float = field(default=10.0, metadata=_in("Worker", min=0))
    """A step that stands still for so long, or four times what steps of its size lately took if that is more, makes
    routers leave this worker; after ten times that it ends itself. 0: never."""
    cluster_secret_file: Path | None = field(default=None, metadata=_in("Callers"))
    """File with the secret that calls of routers and other workers must carry, one a line: each is accepted, the first
    is sent; read again when it changes."""
    cluster_tls_cert_file: Path | None = field(default=None, metadata=_in("Callers"))
    """PEM file of this worker's certificate, as server and as caller of other workers, with its chain; read again when
    it changes."""
    cluster_tls_key_file: Path | None = field(default=None, metadata=_in("Callers"))
    """PEM file of that certificate's key."""
    cluster_tls_ca_file: Path | None = field(default=None, metadata=_in("Callers"))
    """PEM file of the authorities that sign the certificates of routers and workers, and of no others: every caller
    must have one."""
    cluster_tls_server_name: str | None = field(default=None, metadata=_in("Callers"))
    """Name that the other workers' certificates carry; default: the host part of each address."""
    allow_anonymous: bool = field(default=False, metadata=_in("Callers"))
    """Listen on other addresses than loopback although nothing is asked of callers."""

    batch_schedule: Literal["dynamic", "static"] = field(default="dynamic", metadata=_in("Scheduling"))
    """Decode pool only: "dynamic" is continuous batching; "static" closes a batch and holds it until its longest member
    ends, as a baseline for measurements."""
    max_num_seqs: int = field(default=64, metadata=_in("Scheduling", min=1))
    """Most sequences that hold KV blocks at once: seats."""
    max_batch_size: int | None = field(default=None, metadata=_in("Scheduling", min=1))
    """Decode pool only: most sequences that get a token in one step; those that rank behind keep their KV and pause.
    Default: --max-num-seqs."""
    max_preemptions: int = field(default=3, metadata=_in("Scheduling", min=0))
    """Decode pool only: how often a request may be evicted so that one of a higher class gets in."""
    max_num_tokens: int = field(default=512, metadata=_in("Scheduling", min=1, aliases=("--max-num-batched-tokens",)))
    """Most tokens computed in one step."""
    chunk_size: int = field(default=512, metadata=_in("Scheduling", min=1))
    """Most tokens of one prompt computed in one step; never above --max-num-tokens."""
    max_reserved_tokens: int | None = field(default=None, metadata=_in("Scheduling", min=1))
    """Decode pool only: most tokens reserved for prompts of one prefill worker that has sent nothing of them yet, the
    longest of these apart; default: twice --max-num-tokens."""

    priority_ageing_s: float = field(default=5.0, metadata=_in("Scheduling", min=0.001))
    """Seconds of waiting that weigh as much as one class of priority: what waits longer goes before what is urgent."""

    max_queue_latency_ms: float = field(default=50.0, metadata=_in("Scheduling", min=0))
    """How long a prompt may wait before shorter ones of its class that came later take no more than their half of what
    they share with it: then it goes on beside them, however many come."""
    target_step_ms: float | None = field(default=None, metadata=_in("Scheduling", min=0.1))
    """Decode pool only: no more sequences are admitted, and no longer chunks of prompts computed, than keep a step
    within this, as far as the steps so far tell. What runs is never paused for it; one sequence, and one block of a
    prompt, always go on. Default: no target."""
    min_step_ms: float | None = field(default=None, metadata=_in("Scheduling", min=0))
    """Steps take at least so long, as on a slower device: for measurements of what is around them. Default: as long as
    they take."""
    output_length_quantile: float = field(default=0.9, metadata=_in("Scheduling", min=0.5, max=0.99))
    """Decode pool only: the quantile of learned output lengths up to which admission keeps blocks for those that run.
    Lower: fewer evictions and fewer sequences at once."""

    speculation: str = field(default="none", metadata=_in("Speculation"))
    """Decode pool only: who drafts tokens for steps to check, so that one step may yield several; a name in
    engine/drafters. Answers stay the same. "ngram" looks up what followed the last tokens earlier in the sequence,
    "self" is the model itself in 8 bits, "draft_model" is the one at --draft-model-path."""
    draft_model_path: str | None = field(default=None, metadata=_in("Speculation"))
    """Hugging Face folder or .gguf file of a smaller model with the same vocabulary."""
    draft_length: int = field(default=5, metadata=_in("Speculation", min=1, max=15))
    """Most tokens drafted for a sequence and step, with the one before them no more rows than attention takes on all
    devices; fewer or none where they would not pay."""
    acceptance_threshold: float = field(default=0.0, metadata=_in("Speculation", min=0, max=1))
    """A sequence of whose drafts less than this part comes true gets shorter ones, step by step, and longer ones above
    it. Default: 0, what drafts cost and yield decides alone."""
    spec_memory_budget_mb: int = field(default=4096, metadata=_in("Speculation", min=0))
    """MiB that drafts may take: the KV of all that are being checked, and what the drafter has of its own. With less
    than is needed, and where a drafter cannot be had for another reason, the worker serves without."""

    kv_cache_type: Literal["paged"] = field(default="paged", metadata=_in("KV cache"))
    """How KV is kept: in blocks of --kv-block-size positions, reached through block tables. There is no other way."""
    kv_cache_dtype: Literal["auto", "int8"] = field(default="auto", metadata=_in("KV cache"))
    """Type of KV; auto: --dtype. "int8" rounds each head of each position to 8 bits with a scale of its own, in about
    half the bytes of bfloat16; all workers must be told the same. Not on NPUs."""
    kv_block_size: int | None = field(default=None, metadata=_in("KV cache", min=1, aliases=("--block-size",)))
    """Token positions in a KV block; default: 16, on NPUs 128, where there is no other size."""
    num_kv_blocks: int | None = field(default=None, metadata=_in("KV cache", min=1))
    """Blocks the pool may grow to; default: what --kv-cache-gpu-mem-utilization allows, and no more than --max-num-seqs
    sequences of --max-model-len tokens need."""
    expected_sequence_tokens: int | None = field(default=None, metadata=_in("KV cache", min=1))
    """Tokens of prompt and output that a sequence usually has: memory for --max-num-seqs of them is taken at the start.
    Default: learned; the pool starts small and grows as it is needed, in larger steps up to what is usual, and while
    the worker is idle to 512 tokens for each sequence of a full step."""
    kv_cache_gpu_mem_utilization: float = field(default=0.3, metadata=_in("KV cache", min=0.001, max=0.95))
    """Part of the memory of the device that the KV pool may take, where it is free; on a CPU, of this machine's or of
    the container's if that is less."""
    swap_space_gib: float = field(default=4.0, metadata=_in("KV cache", min=0, aliases=("--swap-space",)))
    """Decode pool only: GiB of host memory for the KV of sequences that give way to others and wait for blocks; without
    room there they are evicted. Only on devices with memory of their own: on a CPU the pool is host memory already."""
    kv_shared_memory_dir: str = field(default="/dev/shm", metadata=_in("KV cache"))
    """Where the pool's file lies, so that workers of this host read it directly; "none" keeps KV private and moves it
    by gRPC."""
    kv_transports: tuple[str, ...] = field(default=("shm", "grpc"), metadata=_in("KV cache"))
    """Transports this worker offers and uses, of those in kvstore/transport. The best that two workers have is taken:
    shm before mooncake before grpc. mooncake needs its package and --trusted-transfer-network."""
    trusted_transfer_network: bool = field(default=False, metadata=_in("KV cache"))
    """The network lets nobody but workers reach this one's ports 15000 to 15999, where transport mooncake reads and
    writes KV for whoever asks."""
    kv_lease_ttl_s: float = field(default=30.0, metadata=_in("KV cache", min=0.1))
    """How long computed KV waits for a silent reader."""

    metrics_port: int | None = field(default=None, metadata=_in("Observability", min=0, max=65535))
    """Port of GET /metrics, in the format of Prometheus, without a credential; 0 takes a free one. Default: there is
    none."""
    metrics_host: str = field(default="127.0.0.1", metadata=_in("Observability"))
    """Address that --metrics-port listens on, whatever --host is."""
    log_level: Literal["debug", "info", "warning", "error"] = field(default="info", metadata=_in("Observability"))
    """Least severe records that are logged."""
    core_board: Path | None = field(default=None, metadata=_in("Supervision", hidden=True))
    """File on which the workers of this machine lend each other cores; see engine/cores.py."""
    core_shares: tuple[str, ...] = field(default=(), metadata=_in("Supervision", hidden=True))
    """CPUs of each of them, "0+1,2+3"."""
    core_slot: int = field(default=0, metadata=_in("Supervision", hidden=True, min=0))
    """Which of them this one is."""
    status_fd: int | None = field(default=None, metadata=_in("Supervision", hidden=True))
    """Inherited descriptor on which this process reports its state."""

    def __post_init__(self) -> None:
        check_device(self.device, self.model)
        self._check_ranks()
        if device_kind(self.device) == "npu" and self.block_size != NPU_BLOCK_SIZE:
            raise ConfigError(
                f"--kv-block-size: on an NPU attention reads blocks of {NPU_BLOCK_SIZE}, got {self.kv_block_size}"
            )
        check_cluster(self)
        has_door = self.cluster_secret_file is not None or self.cluster_tls_ca_file is not None
        remedy = "--cluster-secret-file or --cluster-tls-ca-file"
        check_exposure(self.host, has_door, self.allow_anonymous, remedy)
        if self.chunk_size > self.max_num_tokens:
            raise ConfigError(
                f"--chunk-size: must be at most --max-num-tokens, which is {self.max_num_tokens}; got {self.chunk_size}"
            )
        expected, longest = self.expected_sequence_tokens, self.max_model_len
        if expected is not None and longest is not None and expected > longest:
            raise ConfigError(
                f"--expected-sequence-tokens: must be at most --max-model-len, which is {longest}; got {expected}"
            )
        if self.max_num_seqs > self.max_num_tokens:
            raise ConfigError(
                f"--max-num-seqs: must be at most --max-num-tokens, which is {self.max_num_tokens}, "
                f"because each decodes a token a step; got {self.max_num_seqs}"
            )

    def _check_ranks(self) -> None:
        size = self.tensor_parallel_size
        if size == 1:
            return
        if self.model == "tracer":
            raise ConfigError(
                f"--tensor-parallel-size: the tracer has no layers to share, only 1 is accepted; got {size}"
            )
        if device_kind(self.device) not in RANK_DEVICES:
            kinds = " or ".join(RANK_DEVICES)
            raise ConfigError(
                f"--tensor-parallel-size: on {self.device} only 1 is accepted, more on {kinds}; got {size}"
            )
        if self.device == "cpu" and self.shared_memory_dir is None:
            raise ConfigError(
                f"--kv-shared-memory-dir: {size} ranks share the KV pool, so it must be a folder; got none"
            )
        if self.core_board is not None:
            raise ConfigError(f"--core-board: a worker of {size} ranks lends no cores, got {self.core_board}")

    @property
    def usable_transports(self) -> tuple[str, ...]:
        """Of `kv_transports`, those that reach the whole KV: none where ranks keep theirs in devices of their own."""
        return () if self.tensor_parallel_size > 1 and self.device != "cpu" else self.kv_transports

    @property
    def block_size(self) -> int:
        """Token positions in a KV block."""
        return self.kv_block_size or (NPU_BLOCK_SIZE if device_kind(self.device) == "npu" else 16)

    def cpu_shares(self) -> list[frozenset[int]]:
        """The CPUs of each worker that lends and borrows, by slot."""
        return [frozenset(map(int, share.split("+"))) for share in self.core_shares]

    @property
    def shared_memory_dir(self) -> Path | None:
        """Where the pool's file lies; None for private memory."""
        return None if self.kv_shared_memory_dir == "none" else Path(self.kv_shared_memory_dir)

    @property
    def reached_host(self) -> str:
        """Name or address under which other workers reach this one."""
        return self.host if self.advertise_address is None else self.advertise_address.rpartition(":")[0]

    def cpu_set(self) -> set[int] | None:
        """The CPUs of `cpus`. Raises ConfigError for text that is no list of CPU numbers."""
        if self.cpus is None:
            return None
        numbers: set[int] = set()
        for part in self.cpus.split(","):
            first, dash, last = part.partition("-")
            last = last if dash else first
            if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
                raise ConfigError(f"--cpus: a list such as 0,2-3 is needed, got {self.cpus!r}")
            numbers.update(range(int(first), int(last) + 1))
        return numbers
