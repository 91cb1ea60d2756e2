"""Schedulers over simulated time: steps of set lengths, requests that come at set times, no real clock.

What decode evicts comes again at once, as a router sends it: the outputs it has, the time since it was asked for, one
eviction more. Readers of the prefill pool take what is ready within the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pools import EOS, make_holdings, make_limits, make_request

from decode_svc.scheduler import DecodeScheduler
from engine.lengths import OutputLengths
from engine.planning import Plan
from engine.request import Priority, Sample
from engine.sequence import DECODE_MOVES, PREFILL_MOVES, Sequence, State
from prefill_svc.scheduler import PrefillScheduler

STEP_S = 0.125
MAX_STEPS = 5000


@dataclass(slots=True, eq=False)
class Client:
    """A request, and what became of it."""

    asked_s: float
    """When it comes."""
    length: int
    """Prompt tokens."""
    priority: Priority = Priority.NORMAL
    """Class."""
    max_tokens: int = 8
    """Output tokens that it asks for at most; decode only."""
    ends_after: int = 0
    """Output tokens after which the model ends by itself; 0: never."""
    source: str | None = None
    """Whose KV decode fetches; None: decode prefills."""
    first_token_s: float = 0.0
    """When its first token was there."""
    done_s: float = 0.0
    """When it was complete; 0 before."""
    num_preemptions: int = 0
    """Evictions so that a higher class gets in."""
    num_evictions: int = 0
    """All evictions."""
    outputs: list[int] = field(default_factory=list)
    """Tokens so far."""


class Simulation:
    """A clock, and the requests that are still to come."""

    moves = PREFILL_MOVES

    def __init__(self, clients: list[Client]) -> None:
        self.now_s = 0.0
        self._coming = sorted(clients, key=lambda client: client.asked_s)
        self._client_of: dict[Sequence, Client] = {}
        self._num_clients = 0

    def run(self) -> None:
        """Until all requests are complete."""
        for _ in range(MAX_STEPS):
            while self._coming and self._coming[0].asked_s <= self.now_s:
                self.send(self._coming.pop(0))
            if not self._coming and not self._client_of:
                return
            self.now_s += self.step()
        raise AssertionError(f"{len(self._client_of)} requests are not complete after {MAX_STEPS} steps")

    def make_sequence(self, client: Client) -> Sequence:
        """The next attempt of a request; no two requests share a prefix."""
        self._num_clients += 1
        request = make_request(
            [self._num_clients] * client.length,
            client.outputs,
            client.priority,
            waited_ms=round(1000 * (self.now_s - client.asked_s)),
            num_evictions=client.num_evictions,
            max_tokens=client.max_tokens,
        )
        sequence = Sequence(request, self.moves, self.now_s)
        self._client_of[sequence] = client
        return sequence

    def send(self, client: Client) -> None:
        """Gives a request to the scheduler."""
        raise NotImplementedError

    def step(self) -> float:
        """One step of the pool; answers how long it took."""
        raise NotImplementedError


class PrefillSimulation(Simulation):
    """A prefill pool whose readers are always ready."""

    def __init__(self, clients: list[Client], num_blocks: int = 4000, **limits: Any) -> None:
        super().__init__(clients)
        merged = {"max_model_len": 4 * num_blocks, "max_num_seqs": 64, **limits}
        self.scheduler = PrefillScheduler(make_holdings(num_blocks), make_limits(**merged))

    def send(self, client: Client) -> None:
        sequence = self.make_sequence(client)
        self.scheduler.add(sequence)
        self.scheduler.credit(sequence)

    def step(self) -> float:
        plan = self.scheduler.plan(self.now_s)
        samples = [Sample(1) for part in plan.slices if part.samples]
        for token in self.scheduler.commit(plan, samples, self.now_s):
            client = self._client_of.pop(token.sequence)
            client.first_token_s = client.done_s = self.now_s + STEP_S
            self.scheduler.end(token.sequence, State.FINISHED)
        return STEP_S


class DecodeSimulation(Simulation):
    """A decode pool; a transfer takes `fetch_steps` steps, also to stop."""

    moves = DECODE_MOVES

    def __init__(
        self,
        clients: list[Client],
        num_blocks: int,
        fetch_steps: int = 3,
        lengths: OutputLengths | None = None,
        **limits: Any,
    ) -> None:
        super().__init__(clients)
        merged = {"max_model_len": 4 * num_blocks, "max_num_tokens": 64, "chunk_size": 64, **limits}
        self.scheduler = DecodeScheduler(make_holdings(num_blocks), make_limits(**merged), 128, lengths)
        self._fetch_steps = fetch_steps
        self._fetches: dict[Sequence, int] = {}  # steps left

    def send(self, client: Client) -> None:
        self.scheduler.add(self.make_sequence(client), client.source)

    def step(self) -> float:
        plan = self.scheduler.plan(self.now_s)
        step_s = self.duration_s(plan)
        for sequence in self.scheduler.take_fetches():
            sequence.num_pins += 1
            self._fetches[sequence] = self._fetch_steps
        samples = [self._next(part.sequence) for part in plan.slices if part.samples]
        tokens = self.scheduler.commit(plan, samples, self.now_s)
        for sequence in list(self._fetches):
            self._fetches[sequence] -= 1
            if self._fetches[sequence] == 0:
                del self._fetches[sequence]
                if not sequence.is_over:
                    tokens.append(self.scheduler.fetched(sequence, self._next(sequence), self.now_s))
                self.scheduler.holdings.unpin(sequence)
        for token in tokens:
            client = self._client_of[token.sequence]
            client.outputs.append(token.sample.token_id)
            client.first_token_s = client.first_token_s or self.now_s + step_s
        self._settle(step_s)
        return step_s

    def duration_s(self, plan: Plan) -> float:
        """What a step takes."""
        return STEP_S

    def _next(self, sequence: Sequence) -> Sample:
        is_last = sequence.num_outputs + 1 == self._client_of[sequence].ends_after
        return Sample(EOS if is_last else 1)

    def _settle(self, step_s: float) -> None:
        for sequence in [each for each in self._client_of if each.is_over]:
            client = self._client_of.pop(sequence)
            if sequence.state is State.FINISHED:
                client.done_s = self.now_s + step_s
                continue
            assert sequence.state is State.EVICTED, sequence.detail
            client.num_evictions += 1
            client.num_preemptions += "higher class" in sequence.detail
            self.send(client)
