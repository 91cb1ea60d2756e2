"""What a process still holds or does for requests, in words; nothing when all is over."""

from __future__ import annotations

from collections.abc import Iterator

from decode_svc.service import DecodeService
from engine.worker import RunningWorker
from prefill_svc.service import PrefillService
from router.process import RunningRouter


def worker_holds(worker: RunningWorker) -> Iterator[str]:
    """What a worker still holds."""
    load, role = worker.role.load(), worker.role
    counts = {
        "blocks used": load.pool.used,
        "blocks accounted": load.pool.accounted,
        "leases": load.num_leases,
        "queued": load.num_queued,
        "running": load.num_running,
        "attempts": role.live_attempts(),
        "sequences": len(role.scheduler.live()),  # type: ignore[attr-defined]
        "blocks departing": worker.parts.holdings.num_departing_blocks,
        "blocks in host memory": worker.parts.holdings.host_pool.num_used,
    }
    if isinstance(role, DecodeService | PrefillService):
        counts["fetches"] = len(role._fetches)
        counts["farewells"] = len(role._reader._farewells)
        counts["users of peers"] = sum(
            task.result().num_users for task in role._reader._peers.values() if task.done() and not task.exception()
        )
    if isinstance(role, DecodeService):
        counts["attempts by id"] = len(role._by_attempt)
        counts["tokens unsent"] = sum(len(outbox.pending) for outbox in role._streams._outboxes.values())
        counts["tokens reserved"] = sum(role.scheduler._reserved_tokens.values())
    return (f"{count} {name}" for name, count in counts.items() if count)


def router_holds(router: RunningRouter) -> Iterator[str]:
    """What a router still holds."""
    if router.service.num_requests:
        yield f"{router.service.num_requests} requests"
    sessions = router.service._sessions
    if sessions._running or sessions._awaited or sessions._ended:
        yield f"turns of sessions: {sessions._running}, {sessions._awaited}, {sessions._ended}"
    for worker in router.fleet.incarnations():
        counts = (worker.num_assigned, worker.num_assigned_tokens, len(worker._sinks))
        if any(counts):
            yield f"(attempts, tokens, sinks) assigned to {worker.worker_id}: {counts}"
