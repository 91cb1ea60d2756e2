"""The live page: what a router and its workers do at this moment, for a browser; read-only, one static file.

Owns the page's two documents: `/state.json`, made of what the router holds anyway whenever a browser asks for it, and
`/traces.json`, the last requests as waterfalls (`router.waterfalls`). Shows ids, numbers and reasons; no prompt, no
answer, no session's name. `live_page.html` draws them and brings everything that it needs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from router.admission import Admission
from router.fleet import Fleet
from router.ledger import Entry, Ledger
from router.links import Incarnation
from router.router_metrics import ROLES, STATES
from router.tracing import Tracer
from router.waterfalls import recent_requests
from runtime.http_door import HttpDoor, Page

MAX_REQUESTS = 100
"""Running requests that are shown, the oldest first."""


def live_page(router_id: str, ledger: Ledger, admission: Admission, fleet: Fleet, tracer: Tracer) -> HttpDoor:
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
            "/traces.json": _json(lambda: recent_requests(tracer, ledger)),
        }
    )


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
