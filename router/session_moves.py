"""The sessions of a worker that drains go to other workers that generate, so that their next turns find their KV there.

1. A worker reports that it drains. It is asked for its sessions, the last used first; each it names is leased there.
2. The policy picks who keeps it, as it would for the next turn; that worker fetches and keeps it like any KV.
3. What comes to nothing is given up. So is all the rest when the drained worker ends.

Routers share the work, since a worker names each session once. Owns no records: who looks for a session whose holder
does not serve asks the workers.
"""

from __future__ import annotations

import asyncio
import logging

from protos import inference_pb2, worker_pb2
from router.attempts import calling
from router.fleet import Fleet
from router.links import Incarnation
from router.policies.base import Policy, Wanted
from runtime.errors import BatonError

LOG = logging.getLogger(__name__)
ASK_TIMEOUT_S = 2.0
MOVE_TIMEOUT_S = 5.0
"""How long one session may take; a worker that is too busy to take it costs its reuse."""


class SessionMoves:
    """What one router does for workers that drain."""

    def __init__(self, fleet: Fleet, policy: Policy, router_id: str) -> None:
        """`router_id` names the token stream that workers have from this router."""
        self._fleet = fleet
        self._policy = policy
        self._router_id = router_id
        self.num_moved = 0
        """Sessions that another worker keeps now."""

    async def run(self) -> None:
        """Looks for workers that drain, until cancelled."""
        emptied: set[Incarnation] = set()
        async with asyncio.TaskGroup() as group:
            while True:
                changed, workers = self._fleet.change, self._fleet.incarnations()
                emptied.intersection_update(workers)
                for worker in workers:
                    if worker.decodes and _drains(worker) and worker not in emptied:
                        emptied.add(worker)
                        group.create_task(self._empty(worker))
                await changed.wait()

    async def _empty(self, worker: Incarnation) -> None:
        """Until the worker has ended: turns that still run there leave sessions behind, too."""
        given_up, num_before, asked_at_s = b"", self.num_moved, 0.0
        while _drains(worker):
            changed = self._fleet.change
            receivers = [each for each in self._fleet.usable(decodes=True) if each.fits(worker)]
            if receivers and worker.reported_s != asked_at_s:
                # One that has nothing now may have something by its next report.
                asked_at_s = worker.reported_s
                request = worker_pb2.HandOffSessionRequest(given_up_attempt_id=given_up)
                try:
                    with calling(worker):
                        session = await worker.worker.HandOffSession(request, timeout=ASK_TIMEOUT_S)
                except BatonError as error:
                    LOG.info("sessions of %s stay there: %s", worker.worker_id, error.message)
                    break
                if session.HasField("attempt"):
                    is_moved = await self._move(session, worker, receivers)
                    given_up, asked_at_s = b"" if is_moved else session.attempt.attempt_id, 0.0
                    continue
                given_up = b""
            await changed.wait()
        LOG.info("%d sessions of %s were moved", self.num_moved - num_before, worker.worker_id)

    async def _move(
        self, session: worker_pb2.HandOffSessionResponse, worker: Incarnation, receivers: list[Incarnation]
    ) -> bool:
        """Has one of the receivers keep a session; answers whether it does."""
        attempt = session.attempt
        wanted = Wanted(attempt.prompt_token_ids, attempt.session.session_key)
        receiver = self._policy.pick_decode(receivers, wanted)
        request = worker_pb2.DecodeRunRequest(
            attempt=attempt, router_id=self._router_id, source=worker.kv_source(), keep_tokens=session.keep_tokens
        )
        try:
            with calling(receiver):
                record = await receiver.decode.Run(request, timeout=MOVE_TIMEOUT_S)
        except BatonError as error:
            LOG.info("a session was not moved: %s", error.message)
            return False
        if record.outcome != worker_pb2.OUTCOME_FINISHED:
            LOG.info("a session was not moved to %s: %s", receiver.worker_id, record.detail)
            return False
        self.num_moved += 1
        return True


def _drains(worker: Incarnation) -> bool:
    return worker.state == inference_pb2.WORKER_STATE_DRAINING and not worker.lost.is_set()
