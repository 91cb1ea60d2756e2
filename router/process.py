"""A router process: from configuration to a clean end.

1. Read tokenizer and template; listen; look for workers. Health is NOT_SERVING until a pair of them is proved.
2. On SIGTERM: NOT_SERVING, refuse new requests, let those that run finish within the drain time, end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NoReturn

from kvstore.metadata import open_store
from protos import inference_pb2_grpc
from router.admission import Admission
from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.fleet import Fleet
from router.ledger import Ledger, request_log
from router.live_page import live_page
from router.model import TextModel, open_text_model
from router.probe import Prober
from router.router_metrics import router_metrics
from router.service import InferenceService
from router.session_holders import SessionHolders
from router.session_moves import SessionMoves
from router.sessions import Sessions
from router.tenants import Tenants
from router.tracing import Tracer
from runtime import logs, plugins
from runtime.doors import open_cluster
from runtime.errors import BatonError, ConfigError
from runtime.gen_ai import GenAi
from runtime.grpc_loop import GrpcLoop
from runtime.http_door import metrics_door, showing
from runtime.rpc import Server, end_process, format_address, wait_for_shutdown_signal
from runtime.status import END_GRACE_S, StatusReporter, end_by_force
from runtime.tls import TlsFiles

LOG = logging.getLogger(__name__)
SERVICE = "baton.v1.Inference"
STOP_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """A router that serves, as whoever started it sees it."""

    address: str
    """host:port where clients connect."""
    fleet: Fleet
    """The workers it sees."""
    service: InferenceService
    """The requests it serves."""
    tracer: Tracer
    """What became of them."""
    server: Server
    """Its sockets."""
    watching: asyncio.Task[None]
    """Keeps the fleet; when it ends by itself the router has failed."""


def run_router(config: RouterConfig) -> int:
    """Runs a router until it is told to stop, which ends the process; answers the exit code of one that failed."""
    router_id = config.router_id or f"router-{secrets.token_hex(4)}"
    logs.configure(config.log_level, router_id)
    status = StatusReporter(config.status_fd)
    try:
        if not (config.redis_url or config.decode_workers):
            raise ConfigError("--redis-url or --decode-workers: one of them is needed to find workers")
        status.loading(0.0, "tokenizer")
        model = open_text_model(config.model, config.served_model_name)
        status.loading(1.0, "tokenizer")
        with asyncio.Runner(loop_factory=GrpcLoop) as runner:
            runner.run(_run(config, router_id, model, status))
    except BatonError as error:
        status.failed(error.message)
        if not status.enabled:
            # A supervisor shows what it is told; nobody should read it twice.
            LOG.error("%s", error.message)
    return 1


async def _run(config: RouterConfig, router_id: str, model: TextModel, status: StatusReporter) -> NoReturn:
    async with serving(config, router_id, model, status) as running:
        service, watching = running.service, running.watching
        told = asyncio.create_task(wait_for_shutdown_signal())
        try:
            await asyncio.wait([told, watching], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(told)
        if watching.done():
            watching.result()
        end_by_force(config.drain_timeout_s + END_GRACE_S)
        status.draining()
        service.is_draining = True
        running.server.set_serving(SERVICE, False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(config.drain_timeout_s):
                await service.idle.wait()
        end_by_force(END_GRACE_S)  # what a shorter drain has left of its time is not for the end
        service.refuse_waiting()
        running.server.ends_with_process = True
    end_process(0)


@contextlib.asynccontextmanager
async def serving(
    config: RouterConfig, router_id: str, model: TextModel, status: StatusReporter
) -> AsyncIterator[RunningRouter]:
    """A router that takes calls inside the block and is gone after it: running calls get a moment, then end."""
    async with contextlib.AsyncExitStack() as stack:
        tracer = Tracer(config, router_id, model)
        stack.callback(tracer.shut_down)
        gen_ai = None
        if config.metrics_port is not None or config.metric_exporter != "none":
            gen_ai = GenAi(
                "baton-router",
                model.name,
                config.metric_exporter,
                endpoint=config.otlp_endpoint,
                instance_id=router_id,
            )
            stack.callback(gen_ai.shut_down)
        ledger = Ledger(model.name, gen_ai, stack.enter_context(request_log(config.request_log)))
        store = None
        if config.redis_url is not None:
            store = open_store(config.redis_url, password_file=config.redis_password_file)
            stack.push_async_callback(store.close)
        tenants = Tenants(config.tenants_file, config.tls_client_ca_file is not None)
        files = TlsFiles(config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file)
        server, was_ready = Server(door=tenants, files=files), False

        def note_change() -> None:
            nonlocal was_ready
            service.note_change()
            server.set_serving(SERVICE, fleet.is_ready and not service.is_draining)
            if fleet.is_ready and not was_ready:
                was_ready = True
                status.ready()

        # A worker keeps one stream an id: a router of the same name, or the last life of this one, would take it over.
        stream_id = f"{router_id}.{secrets.token_hex(8)}"
        addresses = (*config.prefill_workers, *config.decode_workers)
        prober = Prober(stream_id, model.tokenizer)
        fleet = Fleet(
            stream_id,
            model.fingerprint,
            addresses,
            store,
            config.worker_silence_s,
            prober,
            note_change,
            open_cluster(config).calling,
        )
        policy = plugins.load("router.policies", config.policy, "Policy")()
        dispatcher = Dispatcher(
            fleet,
            policy,
            stream_id,
            config.local_prefill_max_tokens,
            config.local_turn_max_tokens,
            config.worker_wait_s,
            config.turn_placement,
        )
        sessions = Sessions(store, SessionHolders(fleet), config.session_ttl_s)
        admission = Admission(fleet.capacity, config.max_num_queued, config.max_queue_wait_s, config.priority_ageing_s)
        service = InferenceService(
            model,
            fleet,
            dispatcher,
            sessions,
            tracer,
            admission,
            config.client_stall_s,
            config.worker_wait_s,
            tenants,
            ledger,
        )
        server.add(inference_pb2_grpc.add_InferenceServicer_to_server, service, SERVICE)
        metrics = router_metrics(ledger, admission, dispatcher, sessions, fleet, store)
        await stack.enter_async_context(showing(metrics_door(metrics), config.metrics_host, config.metrics_port))
        page = live_page(router_id, ledger, admission, fleet, tracer)
        await stack.enter_async_context(showing(page, config.page_host, config.page_port))
        port = await server.start(config.host, config.port, config.health_port)
        address = format_address(config.host, port)
        status.listening(address)
        LOG.info("listening at %s", address)
        watching = asyncio.create_task(fleet.run())
        stack.push_async_callback(_cancel, watching)
        stack.push_async_callback(_cancel, asyncio.create_task(sessions.run()))
        moves = SessionMoves(fleet, policy, stream_id)
        stack.push_async_callback(_cancel, asyncio.create_task(moves.run()))
        # Registered last, so it runs first: calls end while the workers' streams still stand.
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        yield RunningRouter(address, fleet, service, tracer, server, watching)


async def _cancel(task: asyncio.Task[object]) -> None:
    task.cancel()
    await asyncio.wait([task])
