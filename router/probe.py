"""The probe that proves a pair of workers: a tiny request, prefilled, handed over and finished like any other."""

from __future__ import annotations

import time

from protos import inference_pb2
from router.answer import Answer
from router.attempts import Attempt
from router.links import Incarnation
from router.tokenizer import Tokenizer
from router.validation import PreparedRequest
from runtime.errors import Unavailable

TENANT = "baton.probe"
NUM_TOKENS = 2


class Prober:
    """Makes and runs probes for one router."""

    def __init__(self, router_id: str, tokenizer: Tokenizer) -> None:
        self._router_id = router_id
        self._tokenizer = tokenizer

    async def __call__(self, decode: Incarnation, prefill: Incarnation | None) -> None:
        """Raises BatonError unless a probe block crosses. Its prompt is one whole block and one token more."""
        num_prompt = min(decode.description.block_size + 1, decode.description.model.max_model_len - NUM_TOKENS)
        sampling = inference_pb2.SamplingParams(
            temperature=0, top_p=1, repetition_penalty=1, max_tokens=NUM_TOKENS, ignore_eos=True
        )
        request = PreparedRequest(
            request_id=f"probe-{self._router_id}",
            prompt_token_ids=(0,) * max(1, num_prompt),
            sampling=sampling,
            stops=(),
            include_stop=False,
            priority=inference_pb2.PRIORITY_HIGH,
            session_id="",
            seed=0,
            tenant=TENANT,
        )
        answer = Answer(request, self._tokenizer, time.monotonic())
        attempt = Attempt(answer, decode, prefill, 0, router_id=self._router_id)
        served = await attempt.run()
        if len(answer.token_ids) != NUM_TOKENS or (prefill is not None and served.record.kv_bytes == 0):
            raise Unavailable(f"a probe gave {len(answer.token_ids)} tokens and moved {served.record.kv_bytes} bytes")
