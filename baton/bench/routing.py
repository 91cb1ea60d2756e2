"""The router's own cost: CPU time for each token, on one router and on two, and the time that it adds to a token.

All over the tracer, a model that costs little itself. Steps take as long as on a device, so that tokens come at a rate
and nobody waits for a CPU; but for one phase, in which the worker is as fast as it can be and the router always has
something to do. See `baton.bench.beside` for what the time is compared with.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from baton.bench.beside import Steps, later_by_s, steps_of
from baton.bench.load import Outcome
from baton.bench.options import Sizes, known
from baton.bench.rows import Figure, Row, spread
from baton.bench.scenario import Phase, Run, Scenario
from protos import inference_pb2
from runtime.doors import Pass

STREAMS_PER_WORKER = 32
"""Where several workers decode: with 256 streams there are 8."""
STEP_S = 0.05
"""With 256 streams, 5,120 tokens a second."""
PACED = {"decode_options": (f"min-step-ms={1000 * STEP_S:g}",)}
BESIDE_TOKENS = 30_000
"""Of the attempts beside the router: more than any phase has steps."""


async def _router(run: Run) -> list[Row]:
    """What a token costs the router, with many streams; what it costs two, and one that has too much to do; and what a
    router adds to its time."""
    num_streams = known(run.sizes.max_concurrency)
    rows: list[Row] = []
    for name, num_routers, pace in (("router", 1, PACED), ("two-routers", 2, PACED), ("saturated", 1, {})):
        options = {"num_routers": num_routers, "max_num_seqs": num_streams, "max_num_tokens": max(512, num_streams)}
        async with run.service(name, **options, **pace) as service:
            asks = service.draw()
            async with service.phase(name) as phase:
                await phase.load.closed("all", asks, num_streams)
        rows.append(phase.row(name, figures=_costs(phase)))
    return [*rows, await _offered(run)]


async def _offered(run: Run) -> Row:
    """Streams of workers whose steps have a length, and an attempt beside the router at each of them."""
    num_streams = known(run.sizes.max_concurrency)
    num_workers = math.ceil(num_streams / STREAMS_PER_WORKER)
    with _secret() as (secret_file, shown):
        options = {
            "num_decode": num_workers,
            "max_num_seqs": STREAMS_PER_WORKER + 1,
            "cluster_secret_file": secret_file,
            **PACED,
        }
        async with run.service("offered", **options) as service, contextlib.AsyncExitStack() as stack:
            fingerprint = (await service.clients[0].get_model()).fingerprint
            steps = {
                worker.worker_id: await stack.enter_async_context(
                    steps_of(worker.address, fingerprint, shown, BESIDE_TOKENS)
                )
                for worker in await service.clients[0].workers()
                if worker.role == inference_pb2.WORKER_ROLE_DECODE
            }
            asks = service.draw()
            async with service.phase("offered") as phase:
                await phase.load.closed("all", asks, num_streams)
    return phase.row("offered", figures={**_added(phase.load.all_outcomes(), steps), **_costs(phase)})


@contextlib.contextmanager
def _secret() -> Iterator[tuple[Path, Pass]]:
    """By which the workers know their callers: in a file for the service, and as it is shown to them."""
    secret = secrets.token_urlsafe()
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        secret_file = Path(folder, "secret")
        secret_file.touch(0o600)
        secret_file.write_text(secret)
        yield secret_file, Pass(bearer=lambda: secret)


def _costs(phase: Phase) -> dict[str, Figure]:
    cpu_s, num_tokens = phase.router_cpu_s, phase.num_tokens
    num_messages = sum(len(outcome.message_tokens) for outcome in phase.load.all_outcomes())
    return {
        "router_cpu_us_per_token": None if cpu_s is None or not num_tokens else 1e6 * cpu_s / num_tokens,
        "router_cpu_s": cpu_s,
        "tokens_per_message": num_tokens / num_messages if num_messages else None,
        "machine_busy": phase.machine_busy,
    }


def _added(outcomes: Sequence[Outcome], steps: Mapping[str, Steps]) -> dict[str, Figure]:
    """What the router adds to a token's time, and the rate at which workers have tokens while all streams run."""
    worker_ids = [outcome.finish.served_by.decode_worker_id for outcome in outcomes if outcome.finish is not None]
    offered = sum(
        min(num_streams, STREAMS_PER_WORKER) * steps[worker_id].per_s
        for worker_id, num_streams in Counter(worker_ids).items()
    )
    added_ms = [
        1000 * later_s
        for outcome in outcomes
        if outcome.finish is not None
        for later_s in later_by_s(outcome, steps[outcome.finish.served_by.decode_worker_id].times_s, STEP_S)
    ]
    return {"offered_tok_s": offered, "added_ms": spread(added_ms)}


ROUTING = (
    Scenario(
        "router",
        "what the router costs and adds",
        Sizes(num_requests=256, max_concurrency=256, dataset="random", prompt_tokens=64, output_tokens=512),
        _router,
        model="tracer",
        needs_own_service=True,
    ),
)
