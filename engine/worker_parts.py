"""What a worker and its role give each other: parts to build a service from, and what the role has to offer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from engine.config import WorkerConfig
from engine.drafters import Drafter
from engine.holdings import Holdings
from engine.scheduling import Limits, Scheduler
from engine.step_loop import StepLoop, StepObserver
from engine.worker_service import Identity, Role, WorkerService
from kvstore.leases import LeaseTable
from kvstore.memory import BlockMemory
from kvstore.transport.base import Transport
from runtime.doors import Cluster
from runtime.rpc import Server


class RoleService(Role, StepObserver, Protocol):
    """What a pool adds to a worker: its scheduler and its gRPC service."""

    @property
    def scheduler(self) -> Scheduler:
        """Decides the steps."""
        ...

    def start(self, server: Server, step_loop: StepLoop, worker: WorkerService) -> str:
        """Adds the service and answers its full name. Calls may come from now on."""
        ...

    def end_streams(self) -> None:
        """Ends the calls that last as long as the worker, in good order."""
        ...

    async def close(self) -> None:
        """Ends what runs beside the calls."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What a role builds its service from."""

    config: WorkerConfig
    """As given."""
    identity: Identity
    """Who this worker is."""
    holdings: Holdings
    """The blocks."""
    limits: Limits
    """Bounds of steps and sequences."""
    leases: LeaseTable
    """Promises to readers."""
    memory: BlockMemory
    """The pool's bytes."""
    transports: Mapping[str, Transport]
    """How blocks come and go, by name."""
    drafter: Drafter | None
    """Guesses tokens, for steps that decode; None: nobody does."""
    cluster: Cluster
    """What this worker asks of callers, and shows where it calls."""
