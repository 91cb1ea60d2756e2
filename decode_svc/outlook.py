"""What decode expects of its sequences: the blocks they will hold until they end, and what their steps take.

Admission that reserves each answer's whole length wastes what others give back before it is needed; admission that
looks at the present only has to evict later. The most that will be held lies at the end of some sequence, just before
it gives its blocks back: sorted by their ends, one pass finds it. This is the future-memory estimate of Gong et al.,
"Past-Future Scheduler for LLM Serving under SLA Guarantees" (ASPLOS 2025, arXiv 2507.10150), in whole blocks, as far
ahead as `engine.lengths` looks, and by quantiles instead of draws, so that a plan depends on what was seen alone.
Decides no order and holds no blocks. A forecast is made for one plan; what it says wrongly, growth and eviction mend.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from engine.holdings import Holdings, Prospect
from engine.lengths import OutputLengths
from engine.planning import Plan
from engine.scheduling import Limits
from engine.sequence import Sequence
from engine.step_time import StepLoad, StepTimes


class Future(NamedTuple):  # not a dataclass: one is made for each that runs, at every plan that something waits for
    """What is expected of a sequence. Sorted, the one that ends last comes first."""

    negative_steps: int
    """Minus the tokens still to come, at least one: it ends after as many steps."""
    num_tokens: int
    """Prompt and output so far."""
    num_borrowed: int
    """Blocks of its table that stay when it ends, because it shares them."""
    num_own: int
    """Blocks of its table now that it gives back at its end."""


class Forecast:
    """A set of futures."""

    def __init__(self, block_size: int, futures: list[Future]) -> None:
        self._block_size = block_size
        self._futures = sorted(futures)
        columns = zip(*futures, strict=True) if futures else ((), (), (), ())
        negative_steps, num_tokens, num_borrowed, num_own = map(sum, columns)
        self.num_tokens = num_tokens
        """Tokens of all of them now: the context that a step reads."""
        self.num_own = num_own
        """Blocks that they hold and will give back."""
        self._num_at_ends = num_tokens - negative_steps  # tokens, each counted at its end
        self._num_borrowed = num_borrowed

    def __len__(self) -> int:
        return len(self._futures)

    def add(self, future: Future) -> None:
        """Takes one more in."""
        insort(self._futures, future)
        self.num_tokens += future.num_tokens
        self.num_own += future.num_own
        self._num_at_ends += future.num_tokens - future.negative_steps
        self._num_borrowed += future.num_borrowed

    def fits(self, newcomer: Future, num_blocks: int) -> bool:
        """Whether these and a newcomer never hold more than `num_blocks` blocks of their own at once."""
        num_at_ends = self._num_at_ends + newcomer.num_tokens - newcomer.negative_steps
        num_begun = len(self._futures) + 1 - self._num_borrowed - newcomer.num_borrowed
        if num_at_ends // self._block_size + num_begun <= num_blocks:
            return True  # not even if none gave anything back
        futures = self._futures.copy()
        insort(futures, newcomer)
        return self._peak(futures) <= num_blocks

    def _peak(self, futures: list[Future]) -> int:
        """After s steps those that have not ended hold ceil((n + s - 1) / b) blocks each: the last token is sampled and
        never computed. With a = n - 1 + b - 1 that is a // b + s // b, and one more where the remainders of a and s
        add up to b: counted by remainder, for all at once."""
        size = self._block_size
        by_remainder = [0] * size
        most = base = count = 0
        for negative_steps, ending in groupby(futures, itemgetter(0)):
            for _, num_tokens, num_borrowed, _ in ending:
                whole, remainder = divmod(num_tokens + size - 2, size)
                base += whole - num_borrowed
                by_remainder[remainder] += 1
                count += 1
            steps_whole, steps_remainder = divmod(-negative_steps, size)
            held = base + count * steps_whole + sum(by_remainder[size - steps_remainder :])
            most = max(most, held)
        return most


class Outlook:
    """Expectations by learned lengths and step times."""

    def __init__(
        self, holdings: Holdings, limits: Limits, lengths: OutputLengths, step_times: StepTimes | None
    ) -> None:
        self._holdings = holdings
        self._limits = limits
        self._lengths = lengths
        self._step_times = step_times

    def forecast(self, holders: Iterable[Sequence]) -> Forecast:
        """Of those that hold blocks."""
        return Forecast(self._holdings.block_size, [self.future(holder) for holder in holders])

    def future(self, sequence: Sequence, num_shared: int | None = None) -> Future:
        """Of one that holds blocks, or of one that waits and would share so many."""
        request, num_tokens = sequence.request, len(sequence.token_ids)
        num_outputs = num_tokens - len(request.prompt_token_ids)
        most = min(request.sampling.max_tokens - num_outputs, self._limits.max_model_len - num_tokens)
        steps = self._lengths.expected_more(num_outputs, most)
        num_borrowed = sequence.num_borrowed if num_shared is None else num_shared
        return Future(-steps, num_tokens, num_borrowed, max(0, len(sequence.block_table) - num_borrowed))

    def has_blocks_for(self, sequence: Sequence, prospect: Prospect, others: Forecast) -> bool:
        """Whether the pool can carry it to its expected end, beside others to theirs. Alone it may always try."""
        if not others:
            return True
        # What is held and given back by none of them at its end is shared: it is counted as kept.
        num_blocks = self._holdings.max_blocks - (prospect.num_held - others.num_own)
        return others.fits(self.future(sequence, prospect.num_shared), num_blocks)

    def is_step_within_target(self, sequence: Sequence, others: Forecast) -> bool:
        """Whether it may decode beside others; where the batch is full it takes a place of theirs. Alone it may."""
        target_ms, num_others = self._limits.target_step_ms, len(others)
        if target_ms is None or self._step_times is None or not 0 < num_others < self._limits.batch_size:
            return True
        load = StepLoad(num_others + 1, others.num_tokens + sequence.num_tokens)
        predicted_ms = self._step_times.predict_ms(load)
        return predicted_ms is None or predicted_ms <= target_ms

    def max_tokens(self, plan: Plan, first: Sequence) -> int:
        """Tokens that a step with these decode rows may hold together with chunks of prompts, the first of them."""
        most, target_ms = self._limits.max_num_tokens, self._limits.target_step_ms
        if target_ms is None or self._step_times is None:
            return most
        rows = StepLoad(len(plan.slices), sum(part.sequence.num_tokens for part in plan.slices))
        left = most - plan.num_tokens
        within = self._step_times.num_prompt_tokens_within(target_ms, rows, first.num_computed, left)
        return plan.num_tokens + min(left, max(within, self._holdings.block_size))
