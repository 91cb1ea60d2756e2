"""The traces of a router: which requests have one, which of these are recorded, and where they go.

A request's trace is written once, after its end, from what was noted meanwhile; workers are asked for their part by the
`traceparent` of their calls. Recorded are those that the sample ratio, or a caller's decision, chooses, and every one
that failed on the server's side, lost a worker or was slow. Prompts and answers stay out unless they are asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterable, Iterator

import grpc

from protos import inference_pb2
from router.config import RouterConfig
from router.model import TextModel
from router.request_trace import RequestTrace
from router.trace_spans import Attributes, build
from router.validation import MAX_ID_BYTES
from runtime.errors import Aborted, BatonError, SessionBusy
from runtime.rich_status import code_of
from runtime.trace_export import open_exporter
from runtime.traces import Trace, TraceContext, TraceRing, extract, is_in_ratio, new_span_id, new_trace_id

NUM_RECENT = 256
"""Notable traces that are kept, and others."""
FAILURES = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""Codes that tell of a failure of the service; the others are the caller's doing, or a limit at work."""
MAX_INTEGER = 2**63 - 1
"""What an attribute can hold."""
MAX_TEXT = 8192
"""Characters of a prompt or an answer, where they are asked for."""


class Tracer:
    """Writes and keeps the traces of one router."""

    def __init__(self, config: RouterConfig, router_id: str, model: TextModel) -> None:
        """ConfigError where the exporter is not installed."""
        self._config = config
        self._router_id = router_id
        self._model = model
        self._exporter = open_exporter(config.trace_exporter, config.otlp_endpoint, router_id)
        self._ring = TraceRing(NUM_RECENT)
        self.is_on = config.trace or self._exporter is not None
        """Whether requests have traces at all."""
        self.keeps_recent = config.trace
        """Whether they stay here for a while; else they are only sent away."""

    @contextlib.contextmanager
    def tracing(
        self,
        request: inference_pb2.GenerateRequest,
        tenant: str,
        arrived_s: float,
        metadata: Iterable[tuple[str, str | bytes]] | None,
    ) -> Iterator[RequestTrace]:
        """Around a request; what happens to it is to be noted in what this yields."""
        trace = RequestTrace(arrived_s, request=request, tenant=tenant)
        if self.is_on:
            self._begin(trace, extract(metadata))
        try:
            yield trace
        except BaseException as error:
            trace.error = error
            raise
        finally:
            trace.ended_s = time.monotonic()
            if self.is_on:
                # After the client was told: it does not wait for this, and an error here is not one of its request.
                asyncio.get_running_loop().call_soon(self._write, trace)

    def recent_traces(self, request_id: str = "") -> list[Trace]:
        """What is kept, or what of it belongs to a request; the one that began last is the last."""
        return self._ring.recent(request_id)

    def shut_down(self) -> None:
        """Sends what is left; blocks for as long as the collector takes."""
        if self._exporter is not None:
            self._exporter.shut_down()

    def _begin(self, trace: RequestTrace, parent: TraceContext | None) -> None:
        trace.began_unix_s = time.time() - (time.monotonic() - trace.arrived_s)
        if parent is not None:
            trace.context, trace.parent_id = parent.child(), parent.span_id
            return
        trace_id = new_trace_id()
        trace.context = TraceContext(trace_id, new_span_id(), is_in_ratio(trace_id, self._config.trace_sample_ratio))

    def _write(self, request: RequestTrace) -> None:
        assert request.context is not None
        code = _code(request)
        is_failure = code in FAILURES or (isinstance(request.error, Aborted) and type(request.error) is not SessionBusy)
        is_notable = is_failure or request.is_recovered or self._is_slow(request)
        if not (is_notable or request.context.is_sampled):
            return
        error = _text(request.error, code) if is_failure else ""
        trace = build(request, self._router_id, self._attributes(request, code), error, is_notable)
        if self.keeps_recent:
            self._ring.add(trace)
        if self._exporter is not None:
            self._exporter.send(trace)

    def _is_slow(self, request: RequestTrace) -> bool:
        first_token_s = request.first_token_s or request.ended_s
        return (
            1000 * (first_token_s - request.arrived_s) > self._config.trace_slow_first_token_ms
            or 1000 * (request.ended_s - request.arrived_s) > self._config.trace_slow_total_ms
        )

    def _attributes(self, request: RequestTrace, code: str) -> Attributes:
        """Of the whole request, by the conventions for generative models and for gRPC."""
        asked, prepared, answer, finish = request.request, request.prepared, request.answer, request.finish
        found: Attributes = {
            "rpc.system.name": "grpc",
            "rpc.method": "baton.v1.Inference/Generate",
            "rpc.status_code": code,
            "gen_ai.operation.name": "chat" if asked.messages else "text_completion",
            "gen_ai.provider.name": "baton",
            # Names that a client chose may have any length where it was refused.
            "gen_ai.request.model": asked.model[:MAX_ID_BYTES] or self._model.name,
            "gen_ai.response.model": self._model.name,
            "gen_ai.request.stream": True,
            "baton.tenant": request.tenant,
            "baton.num_attempts": len(request.attempts),
        }
        if request.error is not None:
            found["error.type"] = type(request.error).__name__
        if asked.session_id:
            found["gen_ai.conversation.id"] = asked.session_id[:MAX_ID_BYTES]
        if prepared is not None:
            found |= _sampling(prepared.sampling)
            found["gen_ai.response.id"] = found["baton.request_id"] = prepared.request_id
            found["gen_ai.usage.input_tokens"] = len(prepared.prompt_token_ids)
            found["baton.priority"] = inference_pb2.Priority.Name(prepared.priority).removeprefix("PRIORITY_").lower()
        if answer is not None:
            found["gen_ai.usage.output_tokens"] = len(answer.token_ids)
            if answer.first_token_s is not None:
                found["gen_ai.response.time_to_first_chunk"] = round(answer.first_token_s - request.arrived_s, 6)
        if finish is not None:
            reason = inference_pb2.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()
            found["gen_ai.response.finish_reasons"] = (reason,)
            found["gen_ai.usage.cache_read.input_tokens"] = finish.usage.cached_tokens
        if self._config.trace_text and prepared is not None:
            found |= self._texts(request)
        return found

    def _texts(self, request: RequestTrace) -> Attributes:
        """What was said, in the conventions' form."""
        asked, answer, tokenizer = request.request, request.answer, self._model.tokenizer
        said = [(message.role, message.content) for message in asked.messages]
        said += [("user", asked.prompt)] if asked.HasField("prompt") else []
        found: Attributes = {"gen_ai.input.messages": _messages(said)} if said else {}
        if asked.sampling.stop:
            found["gen_ai.request.stop_sequences"] = tuple(asked.sampling.stop)
        if answer is not None:
            shown = (token_id for token_id in answer.token_ids if not tokenizer.is_special(token_id))
            text = b"".join(map(tokenizer.token_bytes, shown)).decode("utf-8", "replace")
            found["gen_ai.output.messages"] = _messages([("assistant", text)])
        return found


def _sampling(sampling: inference_pb2.SamplingParams) -> Attributes:
    found: Attributes = {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": round(sampling.temperature, 6),
        "gen_ai.request.top_p": round(sampling.top_p, 6),
        "gen_ai.request.frequency_penalty": round(sampling.frequency_penalty, 6),
        "gen_ai.request.presence_penalty": round(sampling.presence_penalty, 6),
    }
    if sampling.top_k > 0:
        found["gen_ai.request.top_k"] = sampling.top_k
    if sampling.seed <= MAX_INTEGER:
        found["gen_ai.request.seed"] = sampling.seed
    return found


def _messages(said: Iterable[tuple[str, str]]) -> str:
    messages, num_left = [], MAX_TEXT
    for role, content in said:
        if num_left > 0:
            messages.append({"role": role[:MAX_ID_BYTES], "parts": [{"type": "text", "content": content[:num_left]}]})
            num_left -= len(content)
    return json.dumps(messages, ensure_ascii=False)


def _code(request: RequestTrace) -> str:
    """The status that the client got; of a client that is gone, what its library tells it."""
    error, answer = request.error, request.answer
    if error is None:
        return grpc.StatusCode.OK.name
    if isinstance(error, BatonError):
        return code_of(error).name
    if not isinstance(error, asyncio.CancelledError):
        return grpc.StatusCode.INTERNAL.name
    is_late = answer is not None and answer.deadline_s is not None and request.ended_s >= answer.deadline_s
    return (grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED).name


def _text(error: BaseException | None, code: str) -> str:
    return error.message[:MAX_TEXT] if isinstance(error, BatonError) else code
