"""What rounding costs in accuracy: `python tests/perf/quantisation_accuracy.py [MODEL [NUM_CONVERSATIONS]]`.

Perplexity of a model over ShareGPT replies, given their questions, in each dtype, with weights and KV rounded
to 8 bits and not; and at how many of the same positions its likeliest token is that of float32, with nothing rounded.
Not a test: it takes minutes.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import torch

from baton.bench.asks import read_conversations
from engine.batch import Batch, SampleRow
from engine.model_runner import ModelRunner, load_model, model_spec
from engine.request import SamplingParams
from kernels import KVDtype, Quantization, load_ops
from kvstore.cache import KVCache
from kvstore.memory import PoolMemory
from router.model import open_text_model
from runtime.checkpoint import open_checkpoint

BLOCK_SIZE = 16
MAX_TOKENS = 512
"""Of a conversation's question and reply together; the rest of a longer reply is not counted."""
MAX_QUESTION_TOKENS = 256
"""Conversations with a longer question are left out."""


def conversations(model: str, count: int) -> Iterator[tuple[list[int], int]]:
    """Token ids of question and reply, and how many of them are the question's."""
    text = open_text_model(model, None)
    num_found = 0
    for question, answer in read_conversations(None, 20 * count):
        prompt = text.tokenizer.encode(question, add_special_tokens=True)
        if text.chat_template is not None:
            framed = text.chat_template.render([{"role": "user", "content": question}])
            prompt = text.tokenizer.encode(framed, add_special_tokens=False)
        if len(prompt) <= MAX_QUESTION_TOKENS:
            reply = text.tokenizer.encode(answer, add_special_tokens=False)
            yield (prompt + reply)[:MAX_TOKENS], len(prompt)
            num_found += 1
        if num_found == count:
            return


def load(model: str, dtype: str, quantization: Quantization, kv_dtype: KVDtype) -> ModelRunner:
    """A runner with room for one conversation."""
    checkpoint = open_checkpoint(model)
    spec, ops = model_spec(checkpoint, dtype), load_ops("cpu")
    num_blocks = -(-MAX_TOKENS // BLOCK_SIZE)
    memory = PoolMemory(spec.kv_layout(BLOCK_SIZE, kv_dtype), num_blocks)
    memory.commit(num_blocks)
    return ModelRunner(load_model(checkpoint, spec, ops, None, quantization), ops, KVCache(memory))


def reply_logits(runner: ModelRunner, tokens: list[int], num_prompt: int) -> torch.Tensor:
    """Logits [R, V] at the places that the reply's R tokens come after."""
    num_blocks = -(-len(tokens) // BLOCK_SIZE)
    batch = Batch(
        token_ids=list(tokens),
        positions=list(range(len(tokens))),
        slots=list(range(len(tokens))),
        query_starts=[0, len(tokens)],
        context_lens=[len(tokens)],
        block_tables=[list(range(num_blocks))],
        sample_rows=[SampleRow(row, row + 1, SamplingParams()) for row in range(num_prompt - 1, len(tokens) - 1)],
    )
    with torch.inference_mode():
        return runner.logits(batch)


def main(model: str = "smollm2", num_conversations: str = "40") -> None:
    """Prints a line for each dtype and rounding."""
    texts = list(conversations(model, int(num_conversations)))
    print(f"{Path(model).name}: {len(texts)} replies, {sum(len(t) - n for t, n in texts)} tokens")
    print(f"{'dtype':<10}{'weights':<9}{'KV':<6}{'perplexity':>12}{'to float32':>12}{'same token':>12}")
    exact: list[torch.Tensor] = []
    exact_perplexity = math.nan
    for dtype in ("float32", "bfloat16"):
        for quantization, kv_dtype in itertools.product(get_args(Quantization), get_args(KVDtype)):
            runner = load(model, dtype, quantization, kv_dtype)
            total_loss, num_tokens, num_same, likeliest = 0.0, 0, 0, []
            for index, (tokens, num_prompt) in enumerate(texts):
                logits = reply_logits(runner, tokens, num_prompt)
                reply = torch.tensor(tokens[num_prompt:])
                total_loss += float(torch.nn.functional.cross_entropy(logits, reply, reduction="sum"))
                likeliest.append(logits.argmax(dim=1))
                num_tokens += len(reply)
                num_same += int((likeliest[-1] == (exact[index] if exact else likeliest[-1])).sum())
            exact = exact or likeliest
            perplexity = math.exp(total_loss / num_tokens)
            exact_perplexity = perplexity if math.isnan(exact_perplexity) else exact_perplexity
            print(
                f"{dtype:<10}{quantization:<9}{kv_dtype:<6}{perplexity:>12.4f}{perplexity / exact_perplexity:>12.4f}"
                f"{num_same / num_tokens:>12.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
