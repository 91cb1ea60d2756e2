"""An Inference service that answers from a script, on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from protos import inference_pb2, inference_pb2_grpc
from runtime import rpc
from runtime.errors import BatonError, NotFound, SessionLost


class FakeRouter(inference_pb2_grpc.InferenceServicer):
    """Says the words of the prompt one by one; raises `error` after `fail_after` words where there is one, but spares
    the first `num_spared` requests. While it `loses_sessions` nothing can be appended."""

    def __init__(self) -> None:
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.error: BatonError | None = None
        self.loses_sessions = False
        self.fail_after = 0
        self.num_spared = 0
        self.hang = False
        self.cleaned = asyncio.Event()
        self.ended_sessions: list[str] = []
        self.traces: list[inference_pb2.Trace] = []

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        if request.append and self.loses_sessions:
            raise SessionLost(request.session_id, "nothing is known of it")
        try:
            text = request.prompt or " ".join(message.content for message in request.messages)
            words = text.split() or [str(token_id) for token_id in request.prompt_token_ids]
            error = self.error if len(self.requests) > self.num_spared else None
            for index, word in enumerate(words):
                if error is not None and index == self.fail_after:
                    raise error
                token = inference_pb2.GeneratedToken(token_id=100 + index, index=index)
                if request.sampling.logprobs:
                    token.logprob = -0.5
                    token.top_logprobs.add(token_id=7, logprob=-0.5)
                yield inference_pb2.GenerateResponse(request_id="r1", text=word + " ", tokens=[token])
            if self.hang:
                await asyncio.Event().wait()
            yield self._last(len(words), request.sampling.seed)
        finally:
            self.cleaned.set()

    def _last(self, num_words: int, seed: int) -> inference_pb2.GenerateResponse:
        finish = inference_pb2.Finish(
            reason=inference_pb2.FINISH_REASON_STOP,
            matched_stop="END",
            usage=inference_pb2.Usage(prompt_tokens=3, completion_tokens=num_words, cached_tokens=1),
            timing=inference_pb2.Timing(time_to_first_token_ms=1.5, inter_token_latency_ms=0.5, total_ms=4),
            served_by=inference_pb2.ServedBy(
                prefill_worker_id="p0", decode_worker_id="d0", transport="shm", kv_bytes=4096, num_attempts=1
            ),
            seed=seed,
        )
        return inference_pb2.GenerateResponse(request_id="r1", finish=finish)

    async def GetModel(self, request: Any, context: Any) -> Any:
        if request.model not in ("", "fake"):
            raise NotFound("model", request.model, f"model {request.model!r} is not served")
        return inference_pb2.GetModelResponse(model="fake", vocab_size=300, has_chat_template=True)

    async def ListWorkers(self, request: Any, context: Any) -> Any:
        pool = inference_pb2.PoolStatus(total=10, free=7, used=2, cached=1)
        status = inference_pb2.WorkerStatus(
            worker_id="p0",
            address="127.0.0.1:9",
            role=inference_pb2.WORKER_ROLE_PREFILL,
            state=inference_pb2.WORKER_STATE_SERVING,
            load=inference_pb2.WorkerLoad(num_queued=4, num_running=5, pool=pool),
        )
        return inference_pb2.ListWorkersResponse(workers=[status])

    async def ListTraces(self, request: Any, context: Any) -> Any:
        traces = [trace for trace in self.traces if request.request_id in ("", trace.request_id)]
        return inference_pb2.ListTracesResponse(traces=traces[-request.limit :])

    async def EndSession(self, request: Any, context: Any) -> Any:
        self.ended_sessions.append(request.session_id)
        return inference_pb2.EndSessionResponse(existed=request.session_id == "known")


@contextlib.asynccontextmanager
async def serving(router: FakeRouter) -> AsyncIterator[str]:
    """Serves on a free port for the length of the block; yields the address."""
    server = rpc.Server()
    server.add(inference_pb2_grpc.add_InferenceServicer_to_server, router, "baton.v1.Inference")
    port = await server.start("127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
