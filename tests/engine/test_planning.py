"""Plans and packed batches against a naive packing, and what a sample is keyed by."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from pools import EOS, make_sequence

from engine.batch import Batch
from engine.planning import Plan, build_batch, fill, fill_shared
from engine.ranking import RankedQueue
from engine.request import Priority
from engine.sequence import DECODE_MOVES, Sequence
from engine.step_time import StepLoad, StepTimes


def computed(prompt, num_computed, table, **request) -> Sequence:
    sequence = make_sequence(prompt, DECODE_MOVES, **request)
    sequence.num_computed, sequence.block_table = num_computed, table
    return sequence


@st.composite
def planned(draw):
    block_size = draw(st.integers(1, 5))
    plan, next_block = Plan(), 0
    for _ in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(st.integers(0, 50), min_size=1, max_size=20))
        num_computed = draw(st.integers(0, len(prompt) - 1))
        num_blocks = -(-len(prompt) // block_size) + draw(st.integers(0, 2))
        table = draw(st.permutations(range(next_block, next_block + num_blocks)))
        next_block += num_blocks
        sequence = computed(prompt, num_computed, list(table))
        plan.add(sequence, draw(st.integers(1, len(prompt) - num_computed)))
    return block_size, plan


@given(planned())
def test_batch_is_what_packing_one_by_one_gives(case):
    block_size, plan = case
    batch = build_batch(plan, block_size, (EOS,))
    expected = Batch()
    for part in plan.slices:
        s = part.sequence
        for position in range(s.num_computed, s.num_computed + part.num_tokens):
            expected.token_ids.append(s.token_ids[position])
            expected.positions.append(position)
            block, offset = divmod(position, block_size)
            expected.slots.append(s.block_table[block] * block_size + offset)
        expected.query_starts.append(len(expected.token_ids))
        end = s.num_computed + part.num_tokens
        expected.context_lens.append(end)
        expected.block_tables.append([s.block_table[i] for i in range(len(s.block_table)) if i * block_size < end])
    for name in ("token_ids", "positions", "slots", "query_starts", "context_lens", "block_tables"):
        assert getattr(batch, name) == getattr(expected, name), name
    assert batch.num_tokens == plan.num_tokens and batch.num_sequences == len(plan.slices)
    last = [i for i, part in enumerate(plan.slices) if part.num_tokens == part.sequence.num_pending]
    assert [row.row for row in batch.sample_rows] == [batch.query_starts[i + 1] - 1 for i in last]
    assert [row.position for row in batch.sample_rows] == [plan.slices[i].sequence.num_tokens for i in last]


@given(st.lists(st.integers(1, 20), max_size=6), st.integers(1, 10), st.integers(1, 30), st.integers(0, 30))
def test_fill_gives_in_order_up_to_chunk_and_budget(lengths, chunk_size, budget, taken):
    plan = Plan()
    plan.num_tokens = taken
    sequences = [computed(range(length), 0, []) for length in lengths]
    fill(plan, sequences, chunk_size, budget)
    left, expected = budget - taken, []
    for length in lengths:
        part = min(length, chunk_size, left)
        if part <= 0:
            break
        expected.append(part)
        left -= part
    assert [part.num_tokens for part in plan.slices] == expected
    assert plan.num_tokens == taken + sum(expected)
    assert [s.num_pins for s in sequences] == [1] * len(expected) + [0] * (len(lengths) - len(expected))


@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.integers(0, 9), st.booleans(), st.sampled_from(list(Priority))),
        min_size=1,
        max_size=7,
    ),
    st.integers(1, 16),
    st.integers(1, 40),
    st.integers(0, 9),
)
def test_halves_go_to_the_first_and_to_those_that_have_waited_too_long(prompts, chunk_size, budget, overdue_since_s):
    sequences = []
    for length, arrived_s, has_begun, priority in prompts:
        sequence = make_sequence(range(length + has_begun), DECODE_MOVES, float(arrived_s), priority=priority)
        sequence.num_computed = int(has_begun)
        sequences.append(sequence)
    sequences.sort(key=RankedQueue().rank)
    plan = Plan()
    fill_shared(plan, sequences, chunk_size, budget, float(overdue_since_s))
    took = {part.sequence: part.num_tokens for part in plan.slices}
    wanted = {each: min(each.num_pending, chunk_size) for each in sequences}
    assert plan.num_tokens == min(budget, sum(wanted.values())), "a part of the step is idle"
    first = sequences[0]
    # What it has computed itself others may have as well, were it the whole step.
    num_open = max(budget // 2, min(budget, first.num_computed))
    assert took.get(first, 0) >= min(wanted[first], budget - num_open)
    shorter = [
        each
        for each in sequences[1:]
        if each.num_pending < first.num_pending and each.request.priority >= first.request.priority
    ]
    for priority in Priority:
        equals = [each for each in shorter if each.request.priority == priority]
        got = sum(took.get(each, 0) for each in equals)
        if equals and equals[0].since_s <= overdue_since_s:
            assert took.get(equals[0], 0) >= min(wanted[equals[0]], got - got // 2)
        below = [each for each in shorter if each.request.priority < priority]
        assert got == sum(wanted[each] for each in equals) or not any(each in took for each in below)


def learned_times() -> StepTimes:
    """Of steps that take 20 ms and 1 for each token of a prompt, whatever else."""
    times = StepTimes()
    for num_tokens in [2, 100, 7, 40, 13, 60] * 10:
        times.observe(StepLoad().with_chunk(num_tokens, 0), 20.0 + num_tokens)
    return times


@given(
    st.lists(st.tuples(st.integers(2, 60), st.sampled_from(list(Priority))), min_size=1, max_size=7),
    st.integers(2, 40),
    st.integers(2, 80),
)
def test_a_step_with_a_higher_class_is_made_longer_by_a_quarter_at_most(prompts, chunk_size, budget):
    sequences = [
        make_sequence(range(length), DECODE_MOVES, float(index), priority=priority)
        for index, (length, priority) in enumerate(prompts)
    ]
    sequences.sort(key=lambda each: -each.request.priority)  # none has waited as long as classes are apart
    plan, plain = Plan(), Plan()
    fill_shared(plan, sequences, chunk_size, budget, step_times=learned_times())
    fill_shared(plain, sequences, chunk_size, budget)
    highest = sequences[0].request.priority
    took, without_times = (
        {part.sequence: part.num_tokens for part in each.slices if part.sequence.request.priority == highest}
        for each in (plan, plain)
    )
    assert took == without_times, "a lower class takes nothing from the highest"
    step_ms, lower_ms = 20 + sum(took.values()), plan.num_tokens - sum(took.values())
    assert lower_ms <= 0.26 * step_ms
    # And no less, while there are tokens and a place for them: two, since one that is left alone is a row.
    assert lower_ms >= 0.24 * step_ms - 2 or plan.num_tokens == plain.num_tokens


def test_lower_classes_fill_the_step_where_that_is_for_nothing_and_where_times_are_not_known():
    free = StepTimes()
    for num_tokens in [2, 100, 7, 40, 13, 60] * 10:
        free.observe(StepLoad().with_chunk(num_tokens, 0), 20.0)
    for times in (free, StepTimes(), None):
        plan = Plan()
        high = make_sequence(range(8), DECODE_MOVES, 1.0, priority=Priority.HIGH)
        lows = [make_sequence(range(30), DECODE_MOVES, 0.0, priority=Priority.LOW) for _ in range(3)]
        fill_shared(plan, [high, *lows], 64, 64, step_times=times)
        assert [part.num_tokens for part in plan.slices] == [8, 30, 26]


def test_a_lower_class_that_goes_first_by_its_age_is_not_held_back():
    old, high = (
        make_sequence(range(20), DECODE_MOVES, since_s, priority=priority)
        for since_s, priority in ((0.0, Priority.LOW), (60.0, Priority.HIGH))
    )
    plan = Plan()
    fill_shared(plan, [old, high], 64, 64, step_times=learned_times())
    assert {part.sequence: part.num_tokens for part in plan.slices} == {old: 20, high: 20}


def test_a_batch_does_not_follow_what_happens_to_its_sequences():
    sequence = computed([1, 2, 3], 0, [0, 1], repetition_penalty=2.0)
    plan = Plan()
    plan.add(sequence, 3)
    batch = build_batch(plan, 2, ())
    sequence.token_ids.append(9)
    sequence.block_table.append(5)
    assert batch.token_ids == [1, 2, 3] and batch.block_tables == [[0, 1]]
    assert batch.sample_rows[0].output_token_ids == ()


def row_of(**request):
    sequence = computed([1, 2, 3], 2, [0], **request)
    plan = Plan()
    plan.add(sequence, sequence.num_pending)
    return build_batch(plan, 8, (EOS,)).sample_rows[0]


def test_a_draw_is_keyed_by_seed_and_position_and_not_by_how_the_sequence_came_there():
    whole = row_of(outputs=(4, 5), seed=7)
    assert (whole.position, whole.sampling.seed) == (5, 7)
    sequence = computed([1, 2, 3], 0, [0], outputs=(4,), seed=7)
    sequence.token_ids.append(5)
    sequence.num_computed = 4
    plan = Plan()
    plan.add(sequence, 1)
    resumed = build_batch(plan, 8, (EOS,)).sample_rows[0]
    assert (resumed.position, resumed.sampling.seed) == (whole.position, whole.sampling.seed)


def test_history_is_copied_only_where_a_penalty_needs_it():
    assert (row_of(outputs=(4,)).prompt_token_ids, row_of(outputs=(4,)).output_token_ids) == ((), ())
    for penalty in ("presence_penalty", "frequency_penalty"):
        row = row_of(outputs=(4,), **{penalty: 0.5})
        assert (row.prompt_token_ids, row.output_token_ids) == ((), (4,))
    row = row_of(outputs=(4,), repetition_penalty=1.1)
    assert (row.prompt_token_ids, row.output_token_ids) == ((1, 2, 3), (4,))


def test_ending_ids_are_suppressed_below_min_tokens():
    assert row_of(outputs=(4,), min_tokens=2, stop_token_ids=(6,)).suppressed_token_ids == (EOS, 6)
    assert row_of(outputs=(4, 5), min_tokens=2, stop_token_ids=(6,)).suppressed_token_ids == ()
    assert row_of(min_tokens=1, stop_token_ids=(6,), ignore_eos=True).suppressed_token_ids == (6,)
    assert row_of(min_tokens=0).suppressed_token_ids == ()
