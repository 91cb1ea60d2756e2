"""A worker process, whatever its role: from configuration to a clean end.

1. Open the model; take the KV pool's memory; load the weights in a thread, reporting progress.
2. Listen; register; run the step loop and the lease clock.
3. On SIGTERM, which is also how the end of the supervisor shows: drain, give back what is left, unregister, stop. If
   the pool's accounts are broken, or a step never ends: say so and exit non-zero. After a Drain that names another
   role the process starts again in that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from engine.batch import Runner
from engine.config import WorkerConfig
from engine.cores import CoreBoard, LendingRunner, running_on
from engine.drafters import Drafter, Target, open_drafter
from engine.holdings import Holdings
from engine.loading import ModelParts, open_model
from engine.pacing import PacedRunner
from engine.pool_sizing import open_memory, open_swap_space
from engine.profiling import Measures, Profiler
from engine.ranks import Ranks, open_ranks
from engine.role_change import command_line
from engine.scheduling import Limits
from engine.session_handoff import SessionHandoff
from engine.step_loop import StepLoop
from engine.worker_metrics import worker_metrics
from engine.worker_parts import RoleService, WorkerParts
from engine.worker_service import Identity, WorkerService
from kvstore.blocks import BlockPool
from kvstore.hashing import PrefixHasher
from kvstore.layout import KVLayout
from kvstore.leases import LeaseTable
from kvstore.memory import BlockMemory
from kvstore.metadata import open_store
from kvstore.metadata.base import MetadataStore, StoreUnavailable, WorkerRecord
from kvstore.transport import close_all, open_all
from kvstore.transport.base import Network, Transport
from protos import inference_pb2, worker_pb2_grpc
from runtime import logs
from runtime.doors import open_cluster
from runtime.errors import BatonError, ConfigError
from runtime.http_door import metrics_door, showing
from runtime.rpc import Server, format_address, wait_for_shutdown_signal
from runtime.status import END_GRACE_S, StatusReporter, end_by_force

LOG = logging.getLogger(__name__)
REGISTRATION_TTL_S = 10.0
STOP_GRACE_S = 1.0
FAILED_EXIT_CODE = 70
ROLE_NAMES = {
    "prefill": inference_pb2.WORKER_ROLE_PREFILL,
    "decode": inference_pb2.WORKER_ROLE_DECODE,
    "mixed": inference_pb2.WORKER_ROLE_MIXED,
}
ROLES_BY_NUMBER = {number: name for name, number in ROLE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class RunningWorker:
    """A worker that serves, as whoever started it sees it."""

    address: str
    """host:port where it is reached."""
    parts: WorkerParts
    """What it is made of."""
    role: RoleService
    """Its scheduler and service."""
    service: WorkerService
    """Its leases and its drain."""
    step_loop: StepLoop
    """What drives it."""
    server: Server
    """Its sockets."""
    service_names: tuple[str, ...]
    """What its health service reports."""
    stepping: asyncio.Task[None]
    """The step loop; when it ends by itself the worker has failed."""


def run_worker(config: WorkerConfig, role: str, make_role: Callable[[WorkerParts], RoleService]) -> int:
    """Runs a worker until it is told to stop; answers the process's exit code."""
    worker_id = config.worker_id or f"{role}-{secrets.token_hex(4)}"
    logs.configure(config.log_level, worker_id)
    status = StatusReporter(config.status_fd)
    try:
        cpus = config.cpu_set()
        if cpus is not None:
            _pin(cpus)
        worker = Worker(config, role, worker_id, status, make_role, end_by_force)
        code = asyncio.run(worker.run())
    except BatonError as error:
        status.failed(error.message)
        if not status.enabled:
            # A supervisor shows what it is told; nobody should read it twice.
            LOG.error("%s", error.message)
        return 1
    if worker.next_command_line is not None:
        if config.status_fd is not None:
            os.set_inheritable(config.status_fd, True)
        os.execv(sys.executable, worker.next_command_line)
    return code


class Worker:
    """One worker, from configuration to the end of its calls; needs a running event loop and no process of its own."""

    def __init__(
        self,
        config: WorkerConfig,
        role: str,
        worker_id: str,
        status: StatusReporter,
        make_role: Callable[[WorkerParts], RoleService],
        on_told: Callable[[float], None] = lambda limit_s: None,
    ) -> None:
        """`on_told` is called when it has been told to end, with the seconds that this may take; again when it has
        drained."""
        self._config = config
        self._on_told = on_told
        self._role_name = role
        self._worker_id = worker_id
        self._status = status
        self._make_role = make_role
        self._port = 0
        self.next_command_line: list[str] | None = None
        """How this process goes on in another role, once `run` has returned; None: it does not."""

    async def run(self) -> int:
        """Serves until told to stop; answers the process's exit code."""
        async with self.serving() as running:
            self._status.ready()
            LOG.info("serving as %s at %s", self._role_name, running.address)
            return await self._until_told(running)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[RunningWorker]:
        """A worker that takes calls inside the block and is gone after it: running calls get a moment, then end."""
        config = self._config
        async with contextlib.AsyncExitStack() as stack:
            ranks = open_ranks(config, self._role_name, self._worker_id, self._end_at_once)
            if ranks is not None:
                stack.callback(ranks.close)
            with running_on(frozenset().union(*config.cpu_shares())):
                model = self._open_model(ranks)
            layout = model.layout(config.block_size)
            epoch = secrets.randbits(63)
            memory = open_memory(config, model, layout, epoch)
            stack.callback(memory.close)
            swap_space = None if self._role_name == "prefill" else open_swap_space(config, model, memory)
            network = Network(config.reached_host, config.trusted_transfer_network)
            transports = open_all(config.usable_transports, memory, network)
            stack.callback(close_all, transports)
            self._status.loading(0.0, "weights")
            # In a thread that ends: what it has computed with counts as busy while it lives, and OpenMP's threads wait
            # for each other by sleeping, not spinning, as soon as it counts more than there are CPUs.
            with ThreadPoolExecutor(1, "load") as loader:
                loading = asyncio.get_running_loop().run_in_executor(loader, self._load, model, memory, layout)
                runner, drafter, measures = await loading
            if config.core_board is not None:
                board = CoreBoard(config.core_board, config.core_slot, config.cpu_shares())
                stack.callback(board.close)
                runner = LendingRunner(runner, board, model.set_num_threads)
            if config.min_step_ms:
                runner = PacedRunner(runner, config.min_step_ms / 1000)
            num_host_blocks = 0 if swap_space is None else swap_space.num_blocks
            parts = self._build_parts(model, layout, epoch, memory, num_host_blocks, transports, drafter)
            role = self._make_role(parts)
            stack.push_async_callback(role.close)
            step_loop = StepLoop(
                role.scheduler, runner, memory, role, stall_limit_s=config.step_stall_s, swap_space=swap_space
            )
            profiler = Profiler(step_loop, parts.holdings.pool, layout, measures)
            hands_off = parts.identity.role != inference_pb2.WORKER_ROLE_PREFILL
            service = WorkerService(
                parts.identity,
                memory,
                transports,
                parts.leases,
                parts.holdings.sessions,
                SessionHandoff(
                    parts.holdings, parts.leases, parts.identity.model.fingerprint, hands_off, step_loop.wake
                ),
                role,
                step_loop.wake,
                step_loop.step_clock,
                lambda next_role: command_line(sys.orig_argv, next_role, self._port),
                profiler,
            )
            yield await self._listen(stack, parts, role, step_loop, service)

    def _load(
        self, model: ModelParts, memory: BlockMemory, layout: KVLayout
    ) -> tuple[Runner, Drafter | None, Measures | None]:
        """Reads the weights; where the worker decodes, makes what drafts for them."""
        runner = model.load(memory, layout, lambda done: self._status.loading(done, "weights"))
        drafter = None
        if self._role_name != "prefill":
            drafter = open_drafter(Target(self._config, layout, runner))
        return (runner if drafter is None else drafter.runner(runner)), drafter, model.measures(runner)

    async def _listen(
        self,
        stack: contextlib.AsyncExitStack,
        parts: WorkerParts,
        role: RoleService,
        step_loop: StepLoop,
        service: WorkerService,
    ) -> RunningWorker:
        config, cluster = self._config, parts.cluster
        server = Server(door=cluster.door, files=cluster.tls)
        server.add(worker_pb2_grpc.add_WorkerServicer_to_server, service, "baton.v1.Worker")
        server.add(worker_pb2_grpc.add_KVTransferServicer_to_server, service, "baton.v1.KVTransfer")
        names = ("baton.v1.Worker", "baton.v1.KVTransfer", role.start(server, step_loop, service))
        port = self._port = await server.start(config.host, config.port, config.health_port)
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        stack.callback(role.end_streams)
        stack.callback(service.end_streams)
        address = config.advertise_address or format_address(config.host, port)
        self._status.listening(address)
        metrics = worker_metrics(self._role_name, role.scheduler, role, step_loop, service)
        await stack.enter_async_context(showing(metrics_door(metrics), config.metrics_host, config.metrics_port))
        stepping = asyncio.create_task(step_loop.run())
        stack.push_async_callback(_cancel, stepping)
        stack.push_async_callback(_cancel, asyncio.create_task(service.expire_leases()))
        if config.redis_url is not None:
            store = open_store(config.redis_url, password_file=config.redis_password_file)
            record = WorkerRecord(self._worker_id, self._role_name, address, parts.identity.epoch)
            registering = asyncio.create_task(_keep_registered(store, record))
            stack.push_async_callback(_unregister, store, record, registering)
        for name in names:
            server.set_serving(name, True)
        return RunningWorker(address, parts, role, service, step_loop, server, names, stepping)

    async def _until_told(self, running: RunningWorker) -> int:
        stepping, next_role = running.stepping, running.service.next_role
        told = asyncio.create_task(wait_for_shutdown_signal())
        hopeless = asyncio.create_task(running.step_loop.step_clock.hopeless.wait())
        try:
            ends: list[asyncio.Future[Any]] = [told, stepping, hopeless, next_role]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if hopeless.done():
                self._end_at_once("a step stands still and does not end")
            if stepping.done():
                error = stepping.exception()
                text = error.message if isinstance(error, BatonError) else repr(error)
                LOG.critical("the step loop ended: %s", text)
                self._status.failed(text)
                return FAILED_EXIT_CODE
            self._on_told(self._config.drain_timeout_s + END_GRACE_S)  # an end in another role as well
            self._status.draining()
            for name in running.service_names:
                running.server.set_serving(name, False)
            if next_role.done():
                self.next_command_line = command_line(sys.orig_argv, next_role.result(), self._port)
                self._status.goes_on_as(self.next_command_line)
                LOG.info("drained, going on as %s", ROLES_BY_NUMBER[next_role.result()])
                return 0
            num_evicted = await running.service.drain(self._config.drain_timeout_s)
            LOG.info("drained, %d attempts given back", num_evicted)
            self._on_told(END_GRACE_S)  # what a shorter drain has left of its time is not for the end
            return 0
        finally:
            await _cancel(told)
            await _cancel(hopeless)

    def _end_at_once(self, text: str) -> None:
        """Where a step's thread can be neither ended nor waited for."""
        LOG.critical("%s", text)
        self._status.failed(text)
        os._exit(FAILED_EXIT_CODE)

    def _open_model(self, ranks: Ranks | None) -> ModelParts:
        config = self._config
        rows = 0 if self._role_name == "prefill" or not config.decode_graphs else config.max_num_seqs
        return open_model(
            config.model,
            config.dtype,
            config.served_model_name,
            config.quantization,
            config.device,
            min(rows, config.max_batch_size or rows),
            config.kv_cache_dtype,
            ranks,
        )

    def _build_parts(
        self,
        model: ModelParts,
        layout: KVLayout,
        epoch: int,
        memory: BlockMemory,
        num_host_blocks: int,
        transports: Mapping[str, Transport],
        drafter: Drafter | None,
    ) -> WorkerParts:
        config, ceiling = self._config, memory.ceiling
        max_model_len = config.max_model_len or min(model.max_context, ceiling * layout.block_size)
        if max_model_len > model.max_context:
            raise ConfigError(f"--max-model-len: the model's context is {model.max_context}, got {max_model_len}")
        facts = inference_pb2.GetModelResponse(
            model=model.name,
            architecture=model.architecture,
            max_model_len=max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            dtype=model.dtype,
            fingerprint=model.fingerprint,
        )
        limits = Limits(
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_tokens=config.max_num_tokens,
            chunk_size=config.chunk_size,
            eos_token_ids=model.eos_token_ids,
            max_batch_size=config.max_batch_size,
            is_static=config.batch_schedule == "static",
            max_preemptions=config.max_preemptions,
            ageing_s=config.priority_ageing_s,
            max_queue_latency_ms=config.max_queue_latency_ms,
            output_length_quantile=config.output_length_quantile,
            target_step_ms=config.target_step_ms,
            expected_sequence_tokens=config.expected_sequence_tokens,
            draft_length=config.draft_length,
            acceptance_threshold=config.acceptance_threshold,
        )
        pool = BlockPool(memory.num_blocks, ceiling)
        hasher = PrefixHasher(model.fingerprint, layout.fingerprint, layout.block_size)
        return WorkerParts(
            config=config,
            identity=Identity(self._worker_id, epoch, ROLE_NAMES[self._role_name], facts, layout, config.max_num_seqs),
            holdings=Holdings(pool, hasher, layout.block_size, num_host_blocks),
            limits=limits,
            leases=LeaseTable(epoch, config.kv_lease_ttl_s),
            memory=memory,
            transports=transports,
            drafter=drafter,
            cluster=open_cluster(config),
        )


def _pin(cpus: set[int]) -> None:
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        raise ConfigError(f"--cpus: this process may not run on {sorted(cpus)}: {error.strerror}") from None


async def _keep_registered(store: MetadataStore, record: WorkerRecord) -> None:
    """Renews the record, so that it disappears soon after this process does. A store that is away changes nothing:
    routers keep the workers they know."""
    while True:
        with contextlib.suppress(StoreUnavailable):
            await store.register_worker(record, REGISTRATION_TTL_S)
        await asyncio.sleep(REGISTRATION_TTL_S / 4)


async def _unregister(store: MetadataStore, record: WorkerRecord, registering: asyncio.Task[None]) -> None:
    await _cancel(registering)
    with contextlib.suppress(StoreUnavailable):
        await store.unregister_worker(record.worker_id, record.epoch)
    await store.close()


async def _cancel(task: asyncio.Task[object]) -> None:
    if not task.done():
        task.cancel()
    await asyncio.wait([task])
    if not task.cancelled() and task.exception() is not None:
        LOG.debug("a background task had ended with %r", task.exception())
