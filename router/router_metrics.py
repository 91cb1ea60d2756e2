"""What a router shows at a scrape: its queue, its requests, attempts and recoveries, sessions, and the workers it sees.

Reads what the router holds anyway; owns nothing. Some totals are about others and kept here because they outlive them:
a worker that ends because its accounts are broken, or is killed, can be asked no more, and one that starts again counts
from zero. So `baton_workers_lost_total`, `baton_audit_failures_total`, `baton_recoveries_total` and all of requests go
on while workers come and go; after a router's own restart Prometheus goes on by itself (`rate`, `increase`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from kvstore.metadata.base import MetadataStore
from protos import inference_pb2
from router.admission import Admission
from router.dispatch import CAUSES, Dispatcher
from router.fleet import Fleet
from router.ledger import Ledger
from router.placement import Placement
from router.sessions import SETTLE_S, Sessions
from runtime.metrics import Family, Metrics, counter, gauge, load_families

ROLES = {
    inference_pb2.WORKER_ROLE_PREFILL: "prefill",
    inference_pb2.WORKER_ROLE_DECODE: "decode",
    inference_pb2.WORKER_ROLE_MIXED: "mixed",
}
STATES = {
    inference_pb2.WORKER_STATE_SERVING: "serving",
    inference_pb2.WORKER_STATE_DRAINING: "draining",
    inference_pb2.WORKER_STATE_LOST: "lost",
}


def router_metrics(
    ledger: Ledger,
    admission: Admission,
    dispatcher: Dispatcher,
    sessions: Sessions,
    fleet: Fleet,
    store: MetadataStore | None,
) -> Metrics:
    """All of a router."""

    def collect() -> Iterator[Family]:
        yield from load_families(admission.num_waiting, admission.num_placed, _kv_usage(fleet))
        yield from ledger.families()
        yield from _attempts(dispatcher)
        yield from _sessions(sessions, store)
        yield from _workers(fleet)

    return Metrics(collect, role="router", model_name=ledger.model_name)


def _kv_usage(fleet: Fleet) -> float:
    """Of the decode workers, on average: where a request needs its blocks for longest."""
    pools = [worker.load.pool for worker in fleet.usable(decodes=True)]
    return sum(pool.used / max(1, pool.ceiling) for pool in pools) / max(1, len(pools))


def _attempts(dispatcher: Dispatcher) -> Iterator[Family]:
    yield counter("baton_attempts_total", "Attempts to serve requests.").add(dispatcher.num_attempts)
    yield counter(
        "baton_recoveries_total", "Attempts that failed and were followed by another, by why they failed."
    ).add_each({cause: dispatcher.recoveries[cause] for cause in CAUSES}, "cause")
    yield counter("baton_placements_total", "Attempts by where what was new of the input was to be computed.").add_each(
        {placement.value: dispatcher.num_placed[placement] for placement in Placement}, "placement"
    )
    breakers = dispatcher.breakers
    yield gauge("baton_breakers_open", "Workers and pairs of workers that are left alone now.").add(breakers.num_open)
    yield counter("baton_breakers_opened_total", "Times that one of them was left alone.").add(breakers.num_opened)


def _sessions(sessions: Sessions, store: MetadataStore | None) -> Iterator[Family]:
    yield counter("baton_session_turns_total", "Turns of sessions that began.").add(sessions.num_turns)
    yield counter("baton_sessions_lost_total", "Turns that were refused because nobody knows their session.").add(
        sessions.num_lost
    )
    if store is not None:
        is_up = time.monotonic() - store.failed_s >= SETTLE_S
        yield gauge("baton_metadata_store_up", "1 while the store of sessions and workers answers.").add(is_up)


def _workers(fleet: Fleet) -> Iterator[Family]:
    seen = Counter((ROLES[worker.role], STATES.get(worker.state, "unknown")) for worker in fleet.incarnations())
    workers = gauge("baton_workers", "Workers that this router sees.")
    lost = counter("baton_workers_lost_total", "Lives of workers that ended, after a drain or by dying.")
    unbalanced = counter("baton_audit_failures_total", "Lives of workers whose KV accounts did not add up.")
    totals = fleet.totals()
    for role, name in ROLES.items():
        for state in STATES.values():
            workers.add(seen[name, state], worker_role=name, state=state)
        for how in ("drained", "died"):
            lost.add(totals[role, how], worker_role=name, how=how)
        unbalanced.add(totals[role, "unbalanced"], worker_role=name)
    yield from (workers, lost, unbalanced)
    yield gauge("baton_worker_unaccounted_blocks", "Held and unaccounted KV blocks by all workers' last reports.").add(
        sum(worker.load.pool.used - worker.load.pool.accounted for worker in fleet.incarnations())
    )
