"""The tracer itself: its oracle and its runner agree, and every byte that is wrong changes the answer."""

from __future__ import annotations

import numpy as np
import pytest

from engine import tracer
from engine.batch import Batch, SampleRow
from engine.request import SamplingParams
from kvstore.memory import PoolMemory

BLOCK_SIZE, NUM_BLOCKS = 4, 6
LAYOUT = tracer.layout(BLOCK_SIZE)
PROMPT = [10, 20, 30, 40, 50, 60]


def row(**sampling) -> SampleRow:
    return SampleRow(0, 0, SamplingParams(**sampling))


def batch_of(tokens, begin, table, sampling=None) -> Batch:
    batch = Batch()
    batch.token_ids = list(tokens[begin:])
    batch.positions = list(range(begin, len(tokens)))
    batch.slots = [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in batch.positions]
    batch.query_starts.append(len(batch.token_ids))
    batch.context_lens.append(len(tokens))
    batch.block_tables.append(table[: -(-len(tokens) // BLOCK_SIZE)])
    batch.sample_rows.append(SampleRow(len(batch.token_ids) - 1, len(tokens), sampling or SamplingParams()))
    return batch


@pytest.fixture
def memory():
    memory = PoolMemory(LAYOUT, NUM_BLOCKS)
    memory.commit(NUM_BLOCKS)
    yield memory
    memory.close()


def test_runner_and_oracle_agree_in_one_step_and_in_many(memory):
    runner = tracer.TracerRunner(memory, LAYOUT)
    expected = tracer.expected_tokens(PROMPT, 1, row())[0]
    assert runner.run(batch_of(PROMPT, 0, [3, 1]))[0].token_id == expected
    for length in range(1, len(PROMPT) + 1):
        last = runner.run(batch_of(PROMPT[:length], length - 1, [5, 0]))[0]
    assert last.token_id == expected


def test_records_are_token_and_position_and_differ_by_plane():
    planes = tracer.records([7, 8], 5, 4)
    assert planes.shape == (4, 2, 8) and planes.dtype == np.uint8
    words = planes.view("<u4")  # [planes, tokens, 2]
    assert words[0].tolist() == [[7, 5], [8, 6]]
    assert len({plane.tobytes() for plane in planes}) == 4
    assert np.array_equal(planes[:, 1:], tracer.records([8], 6, 4))


def test_every_byte_that_is_read_matters(memory):
    runner = tracer.TracerRunner(memory, LAYOUT)
    tokens = [*PROMPT, 70]
    runner.run(batch_of(PROMPT, 0, [2, 4]))
    good = runner.run(batch_of(tokens, 6, [2, 4], SamplingParams(logprobs=True)))[0]
    rng = np.random.default_rng(1)
    used = 6 * 8  # bytes in each plane that the step reads and does not write
    for _ in range(60):
        plane, byte = int(rng.integers(LAYOUT.num_planes)), int(rng.integers(used))
        block, offset = [2, 4][byte // (BLOCK_SIZE * 8)], byte % (BLOCK_SIZE * 8)
        memory.planes[plane, block, offset] ^= 1
        assert runner.run(batch_of(tokens, 6, [2, 4], SamplingParams(logprobs=True)))[0] != good
        memory.planes[plane, block, offset] ^= 1
    memory.planes[:, [0, 1, 3, 5]] = 99
    assert runner.run(batch_of(tokens, 6, [2, 4], SamplingParams(logprobs=True)))[0] == good, "other blocks do not"


def test_seed_counts_only_above_temperature_0():
    def say(**sampling):
        return tracer.expected_tokens(PROMPT, 8, row(ignore_eos=True, **sampling))

    assert say(seed=1) == say(seed=2)
    assert say(seed=1, temperature=1.0) != say(seed=2, temperature=1.0)
    assert say(seed=1, temperature=1.0) == say(seed=1, temperature=0.5)


def test_end_of_sequence_stops_the_oracle_unless_ignored():
    long = tracer.expected_tokens(PROMPT, 3000, row())
    assert long[-1] == tracer.EOS_TOKEN_ID and tracer.EOS_TOKEN_ID not in long[:-1]
    assert len(tracer.expected_tokens(PROMPT, len(long) + 1, row(ignore_eos=True))) == len(long) + 1


def test_suppressed_ids_are_not_said():
    first = tracer.expected_tokens(PROMPT, 1, row())[0]
    context = tracer.records(PROMPT, 0, LAYOUT.num_planes).tobytes()
    other = tracer.next_token(context, SampleRow(0, len(PROMPT), SamplingParams(), (first,)))
    assert other.token_id != first
