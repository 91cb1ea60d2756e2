"""Which processes `baton serve` runs: a pure function from its options, ports and CPUs to command lines.

Owns the split of cores between the pools and the choice of free ports. Starts nothing.
"""

from __future__ import annotations

import itertools
import random
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from baton.options import ServeConfig, read_pool_options
from runtime import devices, huge_pages
from runtime.errors import Unavailable
from runtime.host import OPENMP_SETTING
from runtime.rpc import format_address

LOOPBACK = "127.0.0.1"
PORT_RANGE = range(20_000, 32_000)
"""Below the ports that systems give to outgoing connections, so that none takes ours before its process binds it."""

WORKER_OPTIONS = (
    "served_model_name",
    "dtype",
    "quantization",
    "tensor_parallel_size",
    "decode_graphs",
    "max_model_len",
    "max_num_seqs",
    "batch_schedule",
    "max_batch_size",
    "max_preemptions",
    "priority_ageing_s",
    "max_queue_latency_ms",
    "target_step_ms",
    "min_step_ms",
    "max_num_tokens",
    "chunk_size",
    "kv_cache_type",
    "kv_cache_dtype",
    "kv_block_size",
    "num_kv_blocks",
    "swap_space_gib",
    "expected_sequence_tokens",
    "speculation",
    "draft_model_path",
    "draft_length",
    "acceptance_threshold",
    "spec_memory_budget_mb",
    "kv_transports",
    "trusted_transfer_network",
)
ROUTER_OPTIONS = (
    "served_model_name",
    "max_num_queued",
    "max_queue_wait_s",
    "priority_ageing_s",
    "policy",
    "local_turn_max_tokens",
    "turn_placement",
    "session_ttl_s",
    "request_log",
    "tenants_file",
    "tls_cert_file",
    "tls_key_file",
    "tls_client_ca_file",
    "allow_anonymous",
    "trace",
    "trace_exporter",
    "otlp_endpoint",
    "trace_sample_ratio",
    "trace_slow_first_token_ms",
    "trace_slow_total_ms",
    "trace_text",
)
SHARED_OPTIONS = ("cluster_secret_file", "redis_password_file", "log_level")


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to keep running."""

    name: str
    """Shown to the user, unique."""
    argv: tuple[str, ...]
    """Command line, without --status-fd."""
    gates_readiness: bool = False
    """Whether the system is ready only when this process says so."""
    cpus: frozenset[int] = frozenset()
    """CPUs it may use; empty: all."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that it gets beside those of this process, where they are not set already."""
    stop_rank: int = 0
    """At shutdown, processes of a lower rank end before those of a higher one are told to."""


@dataclass(frozen=True, slots=True)
class Topology:
    """All processes and where clients connect."""

    processes: tuple[ProcessSpec, ...]
    """In the order they are started and shown."""
    addresses: tuple[str, ...]
    """Of the routers, host:port."""


def plan_topology(
    config: ServeConfig,
    redis_url: str,
    cpus: Iterable[int],
    ports: Iterable[int],
    run_id: str,
    core_board: Path | None = None,
) -> Topology:
    """Command lines for `config`.

    `cpus` are those this process may use; `ports` free ones, as many as there are workers, and routers if the port
    is 0. `run_id` makes worker ids of this run unlike those of earlier ones that share a Redis. `core_board` is the
    file on which workers lend each other cores, with a place for each of them.
    """
    free_ports = iter(ports)
    prefill_only: dict[str, Any] = read_pool_options("--prefill-options", config.prefill_options)
    decode_only: dict[str, Any] = read_pool_options("--decode-options", config.decode_options)
    prefill_config, decode_config = replace(config, **prefill_only), replace(config, **decode_only)
    kinds = ["prefill"] * config.num_prefill + ["decode"] * config.num_decode + ["mixed"] * config.num_mixed
    shares = split_cpus(sorted(cpus), config.num_prefill, config.num_decode + config.num_mixed)
    workers: list[ProcessSpec] = []
    addresses: dict[str, list[str]] = {"prefill": [], "decode": [], "mixed": []}
    for kind, share in zip(kinds, shares, strict=True):
        name = f"{kind}-{len(addresses[kind])}"
        port = next(free_ports)
        addresses[kind].append(format_address(LOOPBACK, port))
        pool_config = prefill_config if kind == "prefill" else decode_config
        spec = _worker(pool_config, kind, f"{name}-{run_id}", name, port, redis_url, share)
        if config.device is not None:
            device = _device_of(config.device, len(workers) * (config.tensor_parallel_size or 1))
            spec = replace(spec, argv=(*spec.argv, f"--device={device}"))
        if core_board is not None and all(shares):
            words = ",".join("+".join(map(str, sorted(each))) for each in shares)
            lending = (f"--core-board={core_board}", f"--core-shares={words}", f"--core-slot={len(workers)}")
            spec = replace(spec, argv=(*spec.argv, *lending))
        workers.append(spec)
    shared_cpus = frozenset(cpu for spec in workers if spec.name.startswith("prefill") for cpu in spec.cpus)
    routers: list[ProcessSpec] = []
    public: list[str] = []
    for index in range(config.num_routers):
        port = config.port + index if config.port else next(free_ports)
        public.append(format_address(config.host, port))
        argv = [
            *_python("router"),
            f"--host={config.host}",
            f"--port={port}",
            f"--model={config.model}",
            *_flags(config, ROUTER_OPTIONS),
            f"--redis-url={redis_url}",
            *_flags(config, SHARED_OPTIONS),
            f"--router-id=router-{index}-{run_id}",
            f"--prefill-workers={','.join(addresses['prefill'])}",
            f"--decode-workers={','.join(addresses['decode'] + addresses['mixed'])}",
            f"--drain-timeout-s={config.drain_timeout_s}",
            *([f"--page-port={config.page_port + index}"] if config.page_port is not None else []),
        ]
        routers.append(ProcessSpec(f"router-{index}", tuple(argv), gates_readiness=True, cpus=shared_cpus))
    processes = (*routers, *workers)
    if config.metrics_port is not None:
        processes = tuple(
            replace(spec, argv=(*spec.argv, f"--metrics-port={config.metrics_port + index}"))
            for index, spec in enumerate(processes)
        )
    return Topology(processes=processes, addresses=tuple(public))


def split_cpus(cpus: list[int], num_prefill: int, num_decode: int) -> list[frozenset[int]]:
    """The CPUs of each prefill worker, then of each decode worker; empty sets where pinning would not help.

    The pools get half each, prefill the odd one; within a pool the workers share evenly, or all use all of it where
    there are more workers than CPUs.
    """
    if len(cpus) < 2:
        return [frozenset()] * (num_prefill + num_decode)
    middle = 0 if num_prefill == 0 else len(cpus) if num_decode == 0 else (len(cpus) + 1) // 2
    return [*_shares(cpus[:middle], num_prefill), *_shares(cpus[middle:], num_decode)]


def choose_ports(count: int) -> list[int]:
    """Different ports that are free on loopback now. Unavailable when there are not enough."""
    found: list[int] = []
    for port in random.SystemRandom().sample(PORT_RANGE, len(PORT_RANGE)):
        if len(found) == count:
            return found
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
        found.append(port)
    raise Unavailable(f"only {len(found)} of {count} ports are free between {PORT_RANGE.start} and {PORT_RANGE.stop}")


def _shares(cpus: list[int], num_workers: int) -> list[frozenset[int]]:
    if num_workers > len(cpus):
        return [frozenset(cpus)] * num_workers
    bounds = [len(cpus) * index // num_workers for index in range(num_workers + 1)] if num_workers else [0]
    return [frozenset(cpus[start:end]) for start, end in itertools.pairwise(bounds)]


def _worker(
    config: ServeConfig, kind: str, worker_id: str, name: str, port: int, redis_url: str, cpus: frozenset[int]
) -> ProcessSpec:
    argv = [
        *_python("prefill_svc" if kind == "prefill" else "decode_svc"),
        f"--model={config.model}",
        *(["--role=mixed"] if kind == "mixed" else []),
        f"--host={LOOPBACK}",
        f"--port={port}",
        f"--worker-id={worker_id}",
        f"--redis-url={redis_url}",
        *_flags(config, SHARED_OPTIONS),
        *([f"--cpus={','.join(map(str, sorted(cpus)))}"] if cpus else []),
        f"--drain-timeout-s={config.drain_timeout_s}",
        *_flags(config, WORKER_OPTIONS),
        f"--kv-cache-gpu-mem-utilization={_memory_share(config)}",
    ]
    return ProcessSpec(
        name, tuple(argv), cpus=cpus, environment=(huge_pages.MALLOC_SETTING, OPENMP_SETTING), stop_rank=1
    )


def _device_of(device: str, number: int) -> str:
    """The device of that number; workers, and their ranks, are counted over all pools."""
    return f"{device}:{number}" if device in devices.KINDS else device


def _memory_share(config: ServeConfig) -> float:
    """Of one worker: they all take from the same memory, unless each has a device of its own."""
    if config.device in devices.KINDS:
        return config.kv_cache_gpu_mem_utilization
    num_workers = config.num_prefill + config.num_decode + config.num_mixed
    return max(0.001, config.kv_cache_gpu_mem_utilization / num_workers)


def _python(module: str) -> list[str]:
    """-P: a file of that name in the user's folder must not be taken for ours."""
    return [sys.executable, "-P", "-m", module]


def _flags(config: ServeConfig, names: Iterable[str]) -> list[str]:
    """Flags of the options that were given."""
    flags = []
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool):
            if value != ServeConfig.__dataclass_fields__[name].default:
                flags.append(f"--{'' if value else 'no-'}{name.replace('_', '-')}")
        elif value is not None:
            flags.append(f"--{name.replace('_', '-')}={','.join(value) if isinstance(value, tuple) else value}")
    return flags
