"""The tracer: a model without mathematics, for exact tests of everything around models. No torch.

The KV of a token *is* the token and its position, written into the pool's bytes in every plane. The next token is a
hash of all that the block table reads, so a block that was swapped, reused, lost, only half moved or written too late
changes the answer, bit for bit, over real sockets and real transports. Ids 0 to 255 are bytes, 256 ends a sequence;
what it says are printable ASCII characters.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np

from engine.batch import Answer, Batch, SampleRow
from engine.request import Sample
from kvstore.layout import KVLayout
from kvstore.memory import PoolMemory

EOS_TOKEN_ID = 256
VOCAB_SIZE = 257
MAX_MODEL_LEN = 32768
_NUM_LAYERS = 2
_RECORD_BYTES = 8  # token and position, 4 bytes each
_FIRST_PRINTABLE, _NUM_PRINTABLE = 32, 95
_EOS_ODDS = 512  # one in so many tokens ends the sequence
_MASK = 2**64 - 1


def layout(block_size: int) -> KVLayout:
    """The KV layout of the tracer."""
    return KVLayout(_NUM_LAYERS, block_size, 1, _RECORD_BYTES, "uint8")


def next_token(context: bytes, row: SampleRow) -> Sample:
    """The token that follows `context`: the KV bytes of all positions, plane by plane."""
    seed = row.sampling.seed if row.sampling.temperature > 0 else 0
    key = (seed & _MASK).to_bytes(8, "little") + row.position.to_bytes(8, "little")
    number = int.from_bytes(hashlib.blake2b(context, digest_size=8, key=key).digest(), "little")
    token_id = EOS_TOKEN_ID if number % _EOS_ODDS == 0 else _FIRST_PRINTABLE + number % _NUM_PRINTABLE
    if token_id in row.suppressed_token_ids:
        allowed = range(_FIRST_PRINTABLE, _FIRST_PRINTABLE + _NUM_PRINTABLE)
        token_id = next(i for i in (*allowed, EOS_TOKEN_ID) if i not in row.suppressed_token_ids)
    logprob = -float(number % 1000) / 1000 if row.sampling.logprobs else None
    top = tuple((int(token_id), float(logprob or 0)) for _ in range(min(1, row.sampling.top_logprobs)))
    return Sample(token_id, logprob, top)


def records(token_ids: Sequence[int], first_position: int, num_planes: int) -> np.ndarray:
    """KV bytes of consecutive tokens: [num_planes, num_tokens, 8] uint8. Planes differ: none can stand for another."""
    tokens = np.asarray(token_ids, dtype="<u4")
    positions = np.arange(first_position, first_position + len(token_ids), dtype="<u4")
    planes = np.arange(num_planes, dtype="<u4")[:, None] * np.uint32(0x9E3779B1)  # [num_planes, 1]
    pairs = np.stack([tokens ^ planes, np.broadcast_to(positions, (num_planes, len(token_ids)))], axis=-1)
    return np.ascontiguousarray(pairs.astype("<u4")).view(np.uint8)


def expected_tokens(prompt: Sequence[int], num_tokens: int, row_of: SampleRow) -> list[int]:
    """What a request must answer, computed without any pool: the oracle of tests. `row_of` carries its sampling;
    end-of-sequence stops it unless ignored."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        ignores = row_of.sampling.ignore_eos
        row = SampleRow(0, len(token_ids), row_of.sampling, row_of.suppressed_token_ids)
        context = records(token_ids, 0, 2 * _NUM_LAYERS).tobytes()
        token_ids.append(next_token(context, row).token_id)
        if token_ids[-1] == EOS_TOKEN_ID and not ignores:
            break
    return token_ids[len(prompt) :]


class TracerRunner:
    """Runs batches over a pool's bytes."""

    def __init__(self, memory: PoolMemory, kv_layout: KVLayout) -> None:
        block_size, num_planes = kv_layout.block_size, kv_layout.num_planes
        self._num_planes, self._block_size = num_planes, block_size
        ceiling = memory.planes.shape[1]
        self._slots = memory.planes.reshape(num_planes, ceiling * block_size, _RECORD_BYTES)
        self._blocks = memory.planes

    def run(self, batch: Batch) -> list[Sample]:
        """See `engine.batch.Runner`."""
        for begin, end in zip(batch.query_starts, batch.query_starts[1:], strict=False):
            slots = np.asarray(batch.slots[begin:end])
            self._slots[:, slots] = records(batch.token_ids[begin:end], batch.positions[begin], self._num_planes)
        return [self._sample(batch, row) for row in batch.sample_rows]

    def call_between_layers(self, call: Callable[[], None]) -> None:
        """It has no layers."""

    def call_aside(self, call: Callable[[], Answer]) -> Answer:
        """See `engine.batch.Runner`."""
        return call()

    def _sample(self, batch: Batch, row: SampleRow) -> Sample:
        index = bisect_right(batch.query_starts, row.row) - 1
        read = self._blocks[:, batch.block_tables[index]]  # [num_planes, blocks, block_size * 8]
        num_seen = batch.positions[row.row] + 1
        context = read.reshape(self._num_planes, -1)[:, : num_seen * _RECORD_BYTES]
        return next_token(context.tobytes(), row)
