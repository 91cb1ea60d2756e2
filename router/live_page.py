"""The live page: what a router and its workers do at this moment, for a browser; read-only, one static file.

Owns the page's two documents: `/state.json`, made of what the router holds anyway whenever a browser asks for it, and
`/traces.json`, the last requests as waterfalls. Shows ids and numbers; no prompt, no answer, no session's name.
`live_page.html` draws them and brings everything that it needs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from router.admission import Admission
from router.fleet import Fleet
from router.ledger import Ended, Entry, Ledger
from router.links import Incarnation
from router.router_metrics import ROLES, STATES
from runtime.http_door import HttpDoor, Page

MAX_REQUESTS = 100
"""Running requests that are shown, the oldest first."""
Waterfall = dict[str, Any]


def live_page(router_id: str, ledger: Ledger, admission: Admission, fleet: Fleet) -> HttpDoor:
    """The door of a router's page."""
    html = files("router").joinpath("live_page.html").read_bytes()

    def state() -> dict[str, Any]:
        running = list(ledger.running)
        return {
            "now_s": time.monotonic(),
            "router_id": router_id,
            "model": ledger.model_name,
            "num_waiting": admission.num_waiting,
            "num_placed": admission.num_placed,
            "num_ended": ledger.outcomes.total(),
            "num_tokens": ledger.num_tokens,
            "workers": [_worker(each) for each in fleet.incarnations()],
            "num_requests": len(running),
            "requests": [_request(each) for each in running[:MAX_REQUESTS]],
        }

    return HttpDoor(
        {
            "/": lambda: Page("text/html; charset=utf-8", html),
            "/state.json": _json(state),
            "/traces.json": _json(lambda: recent_traces(ledger)),
        }
    )


def recent_traces(ledger: Ledger) -> list[Waterfall]:
    """The last requests that ended well, the latest first: an id, the whole time, and spans with their beginnings."""
    return [_waterfall(ended) for ended in reversed(ledger.recent)]


def _json(make: Callable[[], Any]) -> Callable[[], Page]:
    return lambda: Page("application/json", json.dumps(make()).encode())


def _worker(worker: Incarnation) -> dict[str, Any]:
    load, pool = worker.load, worker.load.pool
    return {
        "id": worker.worker_id,
        "role": ROLES[worker.role],
        "state": STATES.get(worker.state, "unknown"),
        "address": worker.address,
        "report_age_s": round(time.monotonic() - worker.reported_s, 2),
        "num_queued": load.num_queued,
        "num_queued_tokens": load.num_queued_tokens,
        "num_running": load.num_running,
        "num_seats": worker.description.num_seats,
        "num_leases": load.num_leases,
        "blocks": {"used": pool.used, "cached": pool.cached, "free": pool.free, "ceiling": pool.ceiling},
        "num_unaccounted": pool.used - pool.accounted,
    }


def _request(entry: Entry) -> dict[str, Any]:
    shown: dict[str, Any] = {"age_s": round(time.monotonic() - entry.arrived_s, 2), "phase": "validating"}
    answer = entry.answer
    if answer is not None:
        prefill, decode = answer.worker_ids
        shown |= {
            "id": answer.request.request_id,
            "phase": "decode" if answer.token_ids else "prefill" if decode else "waiting",
            "prefill": prefill,
            "decode": decode,
            "num_prompt_tokens": len(answer.request.prompt_token_ids),
            "num_tokens": len(answer.token_ids),
            "max_tokens": answer.request.sampling.max_tokens,
        }
    return shown


def _waterfall(ended: Ended) -> Waterfall:
    """From the durations in the last message; those of prefill and transfer, which are the last attempt's, are laid
    from the dispatch on. A transfer ends with the prompt's last blocks."""
    timing, by = ended.finish.timing, ended.finish.served_by
    first_ms, queue_ms = timing.time_to_first_token_ms, timing.router_queue_ms
    computed_ms = queue_ms + timing.prefill_queue_ms + timing.prefill_ms
    spans = [
        ("router queue", 0.0, queue_ms, ""),
        ("prefill queue", queue_ms, timing.prefill_queue_ms, by.prefill_worker_id),
        ("prefill", computed_ms - timing.prefill_ms, timing.prefill_ms, by.prefill_worker_id),
        ("transfer", max(queue_ms, computed_ms - timing.transfer_ms), timing.transfer_ms, by.transport),
        ("decode", first_ms, timing.total_ms - first_ms, by.decode_worker_id),
    ]
    return {
        "request_id": ended.request_id,
        "trace_id": ended.trace_id,
        "total_ms": round(timing.total_ms, 2),
        "num_attempts": by.num_attempts,
        "spans": [
            {"name": name, "start_ms": round(start_ms, 2), "duration_ms": round(duration_ms, 2), "where": where}
            for name, start_ms, duration_ms, where in spans
            if duration_ms > 0
        ],
    }
