"""What a worker shows at a scrape, whatever its role: its queue, steps, pool, reuse, leases and endings.

Reads what the worker holds anyway; owns nothing. The names that begin with `vllm:` are those that dashboards and the
Gateway API Inference Extension read; each of them is given by one kind of process, so that sums count nothing twice,
but for running, waiting and KV usage, which every process has of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.holdings import Holdings
from engine.scheduling import Scheduler
from engine.sequence import TERMINAL
from engine.step_loop import StepLoop
from engine.totals import Totals
from engine.worker_service import Role, WorkerService
from kvstore.layout import KVLayout
from kvstore.leases import LeaseState
from runtime.metrics import ENGINE, Family, Metrics, counter, gauge, load_families


def worker_metrics(
    role_name: str, scheduler: Scheduler, role: Role, step_loop: StepLoop, service: WorkerService
) -> Metrics:
    """Everything that both pools have, and what the role adds."""
    return Metrics(
        lambda: (*_families(scheduler, step_loop, service), *role.families()),
        role=role_name,
        model_name=service.identity.model.model,
    )


def _families(scheduler: Scheduler, step_loop: StepLoop, service: WorkerService) -> Iterator[Family]:
    yield from _load(scheduler, service)
    yield from _pool(scheduler.holdings, service.identity.layout)
    yield from _reuse(scheduler.holdings)
    yield from step_loop.families()
    yield from _leases(service)
    yield from _totals(scheduler.totals)


def _load(scheduler: Scheduler, service: WorkerService) -> Iterator[Family]:
    pool = scheduler.holdings.pool
    yield from load_families(scheduler.num_queued, scheduler.num_running, pool.num_used / max(1, pool.ceiling))
    yield gauge("baton_queued_tokens", "Tokens of inputs that are still to be computed or fetched.").add(
        scheduler.num_queued_tokens
    )
    yield gauge("baton_seats", "Sequences that may hold KV blocks at once.").add(scheduler.limits.max_num_seqs)
    yield gauge("baton_draining", "1 while new requests are refused.").add(service.is_draining)
    yield gauge("baton_step_stalled", "1 while a step stands still.").add(service.is_stalled)


def _pool(holdings: Holdings, layout: KVLayout) -> Iterator[Family]:
    counts = holdings.pool.status()
    by_state = {"free": counts.free, "used": counts.used, "cached": counts.cached}
    yield gauge("baton_kv_blocks", "KV blocks that exist, by what they hold.").add_each(by_state, "state")
    yield gauge("baton_kv_ceiling_blocks", "KV blocks that the pool may grow to.").add(counts.ceiling)
    yield gauge("baton_kv_block_bytes", "Bytes of a KV block, all layers.").add(layout.block_bytes)
    yield gauge(
        "baton_kv_unaccounted_blocks", "KV blocks that are held and that no sequence accounts for; not 0: a leak."
    ).add(counts.used - holdings.num_accounted)
    yield gauge("vllm:cache_config_info", "Always 1; the labels say how KV is kept.").add(
        1, block_size=str(layout.block_size), num_gpu_blocks=str(counts.ceiling), **ENGINE
    )


def _reuse(holdings: Holdings) -> Iterator[Family]:
    wanted, reused = holdings.num_wanted_tokens, holdings.num_reused_tokens
    yield counter("vllm:prefix_cache_queries_total", "Tokens of admitted inputs.").add(wanted, **ENGINE)
    yield counter("vllm:prefix_cache_hits_total", "Of these, those whose KV was there.").add(reused, **ENGINE)
    yield counter("baton_session_wanted_tokens_total", "Tokens of admitted turns of sessions.").add(
        holdings.num_wanted_session_tokens
    )
    yield counter("baton_session_reused_tokens_total", "Of these, those whose KV was there.").add(
        holdings.num_reused_session_tokens
    )
    yield gauge("baton_sessions_kept", "Sessions whose tokens are remembered here.").add(len(holdings.sessions))


def _leases(service: WorkerService) -> Iterator[Family]:
    leases = service.leases
    endings = {
        "released": leases.endings[LeaseState.RELEASED],
        "expired": leases.num_expired,
        "broken": leases.endings[LeaseState.BROKEN] - leases.num_expired,
    }
    yield gauge("baton_leases", "Promises to readers that stand.").add(len(leases))
    yield counter("baton_leases_opened_total", "Promises made to readers.").add(leases.num_opened)
    yield counter(
        "baton_leases_ended_total",
        "Promises that ended: attested (released), their reader was silent (expired), or given up (broken).",
    ).add_each(endings, "how")


def _totals(totals: Totals) -> Iterator[Family]:
    endings = {state.value: totals.endings[state] for state in sorted(TERMINAL, key=lambda state: state.value)}
    evictions = {cause: totals.evictions[cause] for cause in ("blocks", "class", "drain")}
    yield counter("baton_sequences_ended_total", "Attempts that ended here, by how.").add_each(endings, "state")
    yield counter(
        "baton_evictions_total", "Attempts given back, for want of blocks, for a higher class, or to drain."
    ).add_each(evictions, "cause")
    yield counter(
        "baton_swaps_total", "Sequences whose KV went to host memory in place of an eviction, by why."
    ).add_each({cause: totals.swaps[cause] for cause in ("blocks", "class")}, "cause")
    yield counter("vllm:num_preemptions_total", "Attempts given back.").add(sum(evictions.values()), **ENGINE)
    yield counter("baton_pauses_total", "Times that a sequence left the batch for others and kept its KV.").add(
        totals.num_pauses
    )
    yield counter("vllm:prompt_tokens_total", "Tokens of inputs whose KV was completed by computing here.").add(
        totals.num_prompt_tokens, **ENGINE
    )
    yield counter("vllm:generation_tokens_total", "Tokens generated by sequences that decode here.").add(
        totals.num_generated_tokens, **ENGINE
    )
