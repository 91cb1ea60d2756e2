"""The public service: `baton.v1.Inference`.

1. Generate takes a ticket or refuses, waits for its turn in its session, validates, and starts the dispatcher, which
   begins when the ticket has its place, beside the stream that goes to the client.
2. What has come since the last message goes out in the next one; a slow client gets fewer, larger messages.
3. The last message carries `finish`. If the client goes, the dispatcher is cancelled and everything is freed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

import grpc.aio

from protos import inference_pb2, inference_pb2_grpc
from router.admission import Admission, Ticket
from router.answer import Answer
from router.dispatch import Dispatcher
from router.fleet import Fleet
from router.ledger import Entry, Ledger
from router.links import Incarnation
from router.model import TextModel
from router.request_trace import RequestTrace
from router.sessions import Sessions, Turn
from router.stalls import stall_limit
from router.tenants import Tenant, Tenants
from router.trace_wire import trace_to_proto
from router.tracing import Tracer
from router.turns import Turns
from router.validation import ModelFacts, PreparedRequest, validate
from runtime.errors import AlreadyExists, InvalidArgument, NotFound, Unavailable
from runtime.rpc import time_remaining_s

Context = grpc.aio.ServicerContext
SHORT_BYTES = 1024
"""Requests of this size are validated in less time than the way to a thread and back takes."""
RETRY_S = 1.0
"""When to come again where nothing is known of when it will be better."""


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Inference over a dispatcher."""

    def __init__(
        self,
        model: TextModel,
        fleet: Fleet,
        dispatcher: Dispatcher,
        sessions: Sessions,
        tracer: Tracer,
        admission: Admission,
        client_stall_s: float,
        worker_wait_s: float,
        tenants: Tenants,
        ledger: Ledger,
    ) -> None:
        """Requests that wait are refused once no worker was there for `worker_wait_s`."""
        self._model = model
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._sessions = sessions
        self._tracer = tracer
        self._admission = admission
        self._client_stall_s = client_stall_s
        self._worker_wait_s = worker_wait_s
        self._tenants = tenants
        self._ledger = ledger
        self._turns = Turns()
        self._giving_up: asyncio.TimerHandle | None = None
        self._request_ids: set[tuple[str, str]] = set()
        self.is_draining = False
        """Whether new requests are refused."""
        self.idle = asyncio.Event()
        """Set while no request is in flight."""
        self.idle.set()

    @property
    def num_requests(self) -> int:
        """Requests in flight, waiting ones included."""
        return self._admission.num_present

    def note_change(self) -> None:
        """Workers came, went or reported: there may be places, or none for too long."""
        self._admission.place_first()
        if self._fleet.is_ready and self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
        elif not self._fleet.is_ready and self._giving_up is None:
            self._giving_up = asyncio.get_running_loop().call_later(self._worker_wait_s, self.refuse_waiting)

    def refuse_waiting(self) -> None:
        """Tells those that wait that they will not be served."""
        self._admission.refuse_waiting(self._unavailable())

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context[object, object]) -> None:
        """One request."""
        with self._ledger.entry(request) as entry:
            tenant = self._tenants.of(context)
            num_tokens = request.session_tokens if request.HasField("session_tokens") else None
            with (
                self._tracer.tracing(request, tenant.name, entry.arrived_s, context.invocation_metadata()) as trace,
                self._admitted(request, tenant, context) as ticket,
            ):
                async with self._sessions.turn(tenant.name, request.session_id, request.append, num_tokens) as turn:
                    await self._answer(trace, tenant, context, ticket, turn, entry)

    async def _answer(
        self,
        trace: RequestTrace,
        tenant: Tenant,
        context: Context[object, object],
        ticket: Ticket,
        turn: Turn | None,
        entry: Entry,
    ) -> None:
        trace.prepared = prepared = await self._validated(trace.request, tenant, turn)
        trace.validated_s = time.monotonic()
        with self._named(prepared):
            answer = Answer(prepared, self._model.tokenizer, trace.arrived_s, time_remaining_s(context), self._turns)
            trace.answer = entry.answer = answer
            entry.trace_id = "" if trace.context is None else f"{trace.context.trace_id:032x}"
            serving = asyncio.create_task(self._serve(answer, prepared, ticket, turn, trace))
            try:
                entry.finish = await self._stream(answer, serving, ticket, context)
            finally:
                if not serving.done():
                    serving.cancel()
                    await asyncio.wait([serving])

    async def _stream(
        self,
        answer: Answer,
        serving: asyncio.Task[inference_pb2.Finish],
        ticket: Ticket,
        context: Context[object, object],
    ) -> inference_pb2.Finish:
        """Writes messages as they can be sent; the last one has `finish`. Raises what the dispatcher raised.

        A write returns when the connection has room for more: what a slow client has not read is bounded by its window.
        """
        serving.add_done_callback(lambda _: answer.changed.set())
        async with stall_limit(self._client_stall_s) as clock:
            while not serving.done():
                await answer.changed.wait()
                if not ticket.is_started and answer.token_ids:
                    self._admission.note_started(ticket)
                if answer.can_take and not serving.done():
                    clock.start()
                    await context.write(answer.take())
                    clock.stop()
            finish = serving.result()
            last = answer.take()
            last.finish.CopyFrom(finish)
            clock.start()
            await context.write(last)
        return finish

    async def _serve(
        self, answer: Answer, prepared: PreparedRequest, ticket: Ticket, turn: Turn | None, trace: RequestTrace
    ) -> inference_pb2.Finish:
        await ticket.placed
        trace.placed_s = time.monotonic()
        finish, holder = await self._dispatcher.serve(answer, turn, trace)
        trace.finish = finish
        # However long the client takes to read the end.
        self._admission.give_back(ticket)
        if turn is not None:
            await self._sessions.finish(turn, [*prepared.prompt_token_ids, *answer.token_ids], holder)
        return finish

    def _unavailable(self) -> Unavailable:
        text = "this router is draining" if self.is_draining else "no decode worker is ready"
        return Unavailable(text, retry_after_s=RETRY_S)

    @contextlib.contextmanager
    def _admitted(
        self, request: inference_pb2.GenerateRequest, tenant: Tenant, context: Context[object, object]
    ) -> Iterator[Ticket]:
        """Counts and ranks a request from its arrival: its validation takes time and memory too, and who is refused
        should not wait for it."""
        if self.is_draining or not self._fleet.is_ready:
            raise self._unavailable()
        ticket = self._admission.enter(request.priority, time_remaining_s(context), tenant)
        self.idle.clear()
        try:
            yield ticket
        finally:
            self._admission.leave(ticket)
            if not self.num_requests:
                self.idle.set()

    @contextlib.contextmanager
    def _named(self, prepared: PreparedRequest) -> Iterator[None]:
        """Ids are a tenant's own: another's request of the same id is neither in its way nor seen by it."""
        name = prepared.tenant, prepared.request_id
        if name in self._request_ids:
            raise AlreadyExists(f"request_id: {name[1]!r} is in flight already", request_id=name[1])
        self._request_ids.add(name)
        try:
            yield
        finally:
            self._request_ids.discard(name)

    async def _validated(
        self, request: inference_pb2.GenerateRequest, tenant: Tenant, turn: Turn | None
    ) -> PreparedRequest:
        before = turn.previous_token_ids() if turn is not None and turn.is_append else ()
        arguments = request, self._facts(), self._model.tokenizer, self._model.chat_template, before, tenant.name
        if request.ByteSize() <= SHORT_BYTES:
            return validate(*arguments)
        # Long prompts take long to tokenise: not in the event loop. The tokenizer releases the interpreter's lock.
        return await asyncio.to_thread(validate, *arguments)

    def _facts(self) -> ModelFacts:
        decodes = self._fleet.usable(decodes=True)
        if not decodes:
            raise self._unavailable()
        described = [worker.description.model for worker in decodes + self._fleet.usable(decodes=False)]
        return ModelFacts(
            name=self._model.name,
            max_model_len=min(model.max_model_len for model in described),
            vocab_size=described[0].vocab_size,
            eos_token_ids=tuple(described[0].eos_token_ids),
            has_chat_template=self._model.chat_template is not None,
        )

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: Context[object, object]
    ) -> inference_pb2.GetModelResponse:
        """The served model, as its workers describe it."""
        self._tenants.of(context)
        facts = self._facts()
        if request.model and request.model != facts.name:
            raise NotFound("model", request.model, f"model: {request.model!r} is not served; {facts.name!r} is")
        response = inference_pb2.GetModelResponse()
        response.CopyFrom(self._fleet.usable(decodes=True)[0].description.model)
        response.model, response.max_model_len = facts.name, facts.max_model_len
        response.has_chat_template = facts.has_chat_template
        return response

    async def ListWorkers(
        self, request: inference_pb2.ListWorkersRequest, context: Context[object, object]
    ) -> inference_pb2.ListWorkersResponse:
        """The workers this router knows; for operators, because their load is everybody's."""
        self._tenants.operator(context)
        return inference_pb2.ListWorkersResponse(workers=[_status(w) for w in self._fleet.incarnations()])

    async def ListTraces(
        self, request: inference_pb2.ListTracesRequest, context: Context[object, object]
    ) -> inference_pb2.ListTracesResponse:
        """The traces of recent requests; for operators, because they are everybody's."""
        self._tenants.operator(context)
        traces = self._tracer.recent_traces(request.request_id)
        return inference_pb2.ListTracesResponse(traces=map(trace_to_proto, traces[-request.limit :]))

    async def EndSession(
        self, request: inference_pb2.EndSessionRequest, context: Context[object, object]
    ) -> inference_pb2.EndSessionResponse:
        """Forgets a session and frees its KV."""
        tenant = self._tenants.of(context)
        if not request.session_id:
            raise InvalidArgument("session_id", "must not be empty")
        return inference_pb2.EndSessionResponse(existed=await self._sessions.end(tenant.name, request.session_id))


def _status(worker: Incarnation) -> inference_pb2.WorkerStatus:
    return inference_pb2.WorkerStatus(
        worker_id=worker.worker_id,
        address=worker.address,
        role=worker.role,
        state=worker.state,
        epoch=worker.description.epoch,
        load=worker.load,
        report_age_ms=round(1000 * (time.monotonic() - worker.reported_s)),
    )
