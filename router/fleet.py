"""The workers as this router sees them: found by static lists and by the metadata store, kept by their own reports.

A record in the store only says where to look; a worker is taken from the view when its reports stop, never because a
record is gone. A worker gets requests once a probe has crossed it: a tiny request, prefilled by one worker, handed to
another and finished there. Owns links and probes; how workers are chosen is the policy's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from kvstore.metadata.base import MetadataStore, StoreUnavailable
from protos import inference_pb2, worker_pb2
from router.admission import Capacity
from router.links import Incarnation, WorkerLink
from runtime.doors import NO_PASS, Pass
from runtime.errors import BatonError

LOG = logging.getLogger(__name__)
DISCOVERY_INTERVAL_S = 1.0
FIRST_DISCOVERY_INTERVAL_S = 0.1
"""While nothing can be served."""
FORGET_S = 30.0
SEATS_PER_AHEAD = 8
"""For so many seats of a worker one request waits there already, so that a seat is never empty for a round trip."""
PREFILL_GRACE_S = 10.0
PROBE_TIMEOUT_S = 30.0
_Pair = tuple[Incarnation, Incarnation | None]
Probe = Callable[[Incarnation, Incarnation | None], Awaitable[None]]


class Fleet:
    """All links of a router."""

    def __init__(
        self,
        router_id: str,
        fingerprint: str,
        static_addresses: Sequence[str],
        store: MetadataStore | None,
        silence_s: float,
        probe: Probe,
        on_change: Callable[[], None],
        shown: Pass = NO_PASS,
    ) -> None:
        """`fingerprint` is the checkpoint's; workers of another are refused. `probe` runs a tiny request over a decode
        and a prefill worker (None: decode prefills) and raises BatonError if it fails. `shown` is what workers
        ask of callers."""
        self._router_id = router_id
        self._fingerprint = fingerprint
        self._static = frozenset(static_addresses)
        self._store = store
        self._silence_s = silence_s
        self._probe = probe
        self._on_change = on_change
        self._shown = shown
        self._links: dict[str, tuple[WorkerLink, asyncio.Task[None]]] = {}
        self._forgotten_totals: Counter[tuple[inference_pb2.WorkerRole, str]] = Counter()
        self._refused: set[str] = set()
        self._tried_s: dict[_Pair, float] = {}
        self._changed = asyncio.Event()
        self._started_s = time.monotonic()
        self._first_decode_s: float | None = None

    async def run(self) -> None:
        """Keeps links to all known addresses and proves new workers, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._discover())
                group.create_task(self._prove_new())
        finally:
            tasks = [task for _, task in self._links.values()]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    def incarnations(self) -> list[Incarnation]:
        """Every worker that was heard and is not forgotten, by role and id."""
        return sorted(self._known(), key=lambda worker: (worker.role, worker.worker_id))

    def _known(self) -> list[Incarnation]:
        return [link.current for link, _ in self._links.values() if link.current is not None]

    def totals(self) -> Counter[tuple[inference_pb2.WorkerRole, str]]:
        """See `WorkerLink.totals`, over all workers that there ever were."""
        return sum((link.totals for link, _ in self._links.values()), self._forgotten_totals)

    def usable(self, decodes: bool) -> list[Incarnation]:
        """Proved, serving workers that decode, or that prefill, in no order."""
        return [w for w in self._known() if w.is_proved and w.is_serving and w.decodes == decodes]

    @property
    def is_ready(self) -> bool:
        """Whether requests can be served."""
        return bool(self.usable(decodes=True))

    def capacity(self) -> Capacity:
        """Places for requests, over all decode workers."""
        decodes = self.usable(decodes=True)
        return Capacity(
            num_free=sum(worker.num_free for worker in decodes),
            num_assigned=sum(worker.num_assigned for worker in self._known()),
            num_ahead=sum(max(1, worker.description.num_seats // SEATS_PER_AHEAD) for worker in decodes),
        )

    @property
    def change(self) -> asyncio.Event:
        """Set when a worker comes, goes or reports after now."""
        return self._changed

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_change()

    async def _discover(self) -> None:
        while True:
            wanted = set(self._static)
            if self._store is not None:
                try:
                    wanted |= {record.address for record in await self._store.list_workers()}
                except StoreUnavailable:
                    # Nobody else can say where a worker that is silent now will be heard again.
                    wanted |= self._links.keys()
            for address in sorted(wanted - self._links.keys()):
                link = WorkerLink(
                    address, self._router_id, self._silence_s, self._accepts, self._note_change, self._shown
                )
                self._links[address] = (link, asyncio.create_task(link.run()))
            for address in self._links.keys() - wanted:
                await self._forget_if_silent(address)
            await asyncio.sleep(DISCOVERY_INTERVAL_S if self.is_ready else FIRST_DISCOVERY_INTERVAL_S)

    async def _forget_if_silent(self, address: str) -> None:
        link, task = self._links[address]
        last_s = self._started_s if link.current is None else link.current.reported_s
        if (link.current is None or link.current.lost.is_set()) and time.monotonic() - last_s > FORGET_S:
            task.cancel()
            await asyncio.wait([task])
            self._forgotten_totals += link.totals
            del self._links[address]
            self._note_change()

    def _accepts(self, description: worker_pb2.DescribeResponse) -> bool:
        accepted = description.model.fingerprint.split("-")[0] == self._fingerprint
        if not accepted and description.worker_id not in self._refused:
            self._refused.add(description.worker_id)
            LOG.error(
                "worker %s serves another model (%s, fingerprint %s; this router's is %s): not used",
                description.worker_id,
                description.model.model,
                description.model.fingerprint,
                self._fingerprint,
            )
        return accepted

    # Proving

    async def _prove_new(self) -> None:
        """Probes one pair after another; after a failure other pairs have their turn first."""
        while True:
            changed = self._changed
            pair = self._unproved_pair()
            if pair is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(DISCOVERY_INTERVAL_S):
                        await changed.wait()
                continue
            decode, prefill = pair
            self._tried_s[pair] = time.monotonic()
            try:
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    await self._probe(decode, prefill)
            except (BatonError, TimeoutError) as error:
                text = str(error) or f"no answer in {PROBE_TIMEOUT_S:g} s"
                LOG.warning("probe of %s failed: %s", _pair_name(decode, prefill), text)
                await asyncio.sleep(DISCOVERY_INTERVAL_S)
                continue
            LOG.info("probe crossed %s", _pair_name(decode, prefill))
            decode.is_proved = True
            if prefill is not None:
                prefill.is_proved = True
            self._note_change()

    def _unproved_pair(self) -> _Pair | None:
        """The pair to probe next: the one that was tried longest ago, so that a sick worker holds up no other."""
        serving = [worker for worker in self.incarnations() if worker.is_serving]
        prefills = [worker for worker in serving if not worker.decodes]
        decodes = [worker for worker in serving if worker.role == inference_pb2.WORKER_ROLE_DECODE]
        if decodes and self._first_decode_s is None:
            self._first_decode_s = time.monotonic()
        # A decode worker can serve alone, but at a start its prefill workers get the time to appear; counted from here,
        # because they load no faster than it did.
        first_s = self._first_decode_s
        is_late = first_s is not None and time.monotonic() - first_s >= PREFILL_GRACE_S
        pairs: list[_Pair] = []
        for worker in serving:
            if worker.is_proved:
                continue
            if not worker.decodes:
                pairs += [(decode, worker) for decode in decodes if decode.fits(worker)]
            elif worker.role == inference_pb2.WORKER_ROLE_DECODE:
                pairs += [(worker, prefill) for prefill in prefills if prefill.fits(worker)]
            if worker.decodes and (is_late or worker.role == inference_pb2.WORKER_ROLE_MIXED):
                pairs.append((worker, None))
        self._tried_s = {pair: self._tried_s[pair] for pair in pairs if pair in self._tried_s}
        return min(pairs, key=lambda pair: self._tried_s.get(pair, 0.0), default=None)


def _pair_name(decode: Incarnation, prefill: Incarnation | None) -> str:
    return decode.worker_id if prefill is None else f"{prefill.worker_id} -> {decode.worker_id}"
