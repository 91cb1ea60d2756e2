"""Another, smaller model of the same vocabulary drafts.

Its KV lies in a pool of its own at the same block ids as the target's, so a block table serves both and nothing is
allocated or rolled back twice; blocks whose ids are beyond what the budget affords are not drafted from. What it has
computed of a sequence is counted here. The rest, a whole input after a handoff, is computed in chunks beside steps, and
drafts begin when only the last tokens are missing. KV that is wrong here makes worse guesses, never other tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from engine import drafters
from engine.batch import Answer, Batch, Runner
from engine.decoder_spec import DecoderSpec
from engine.drafting import Backlog, DraftingRunner, add_tokens
from engine.model_runner import ModelRunner, load_model, model_spec
from engine.request import Sample
from engine.sequence import Sequence
from kvstore.cache import KVCache
from kvstore.layout import DTYPE_BYTES
from kvstore.memory import PoolMemory
from runtime.checkpoint import open_checkpoint
from runtime.errors import ConfigError
from runtime.vocabulary import differing_token

MIN_BLOCKS = 64
"""Blocks of KV without which drafting is not begun."""
CHUNK_TOKENS = 256
"""Most tokens of a sequence without drafts that a step computes beside its own."""
MAX_BEHIND = 8
"""Most tokens that are computed together with the first draft."""


class Drafter(drafters.Drafter):
    """See the module."""

    has_passes = True

    def __init__(self, model: ModelRunner, memory: PoolMemory) -> None:
        self._model = model
        self._memory = memory
        self._num_computed: dict[Sequence, int] = {}  # leading tokens whose KV is in the pool
        self._backlog = Backlog()

    @classmethod
    def open(cls, target: drafters.Target) -> Drafter:
        """See `engine.drafters.Drafter`."""
        config, runner = target.config, target.runner
        if config.draft_model_path is None:
            raise ConfigError("--draft-model-path: needed for --speculation draft_model, got none")
        if not isinstance(runner, ModelRunner):
            size = config.tensor_parallel_size
            raise ConfigError(f"--speculation: draft_model needs weights in one process; got {config.model} in {size}")
        checkpoint = open_checkpoint(config.draft_model_path)
        spec, vocab_size = model_spec(checkpoint, config.dtype), runner.model.spec.vocab_size
        if spec.vocab_size != vocab_size:
            raise ConfigError(
                f"--draft-model-path: a vocabulary of {vocab_size} tokens is needed, "
                f"as the model has; {config.draft_model_path} has {spec.vocab_size}"
            )
        differing = differing_token(open_checkpoint(config.model), checkpoint)
        if differing is not None:
            raise ConfigError(
                f"--draft-model-path: the model's vocabulary is needed, in which {differing[0]} is {differing[1]!r}; "
                f"in that of {config.draft_model_path} it is {differing[2]!r}"
            )
        layout = spec.kv_layout(target.layout.block_size)
        num_weight_bytes = num_weights(spec.decoder) * DTYPE_BYTES[spec.dtype]
        num_left = target.check_budget(num_weight_bytes + MIN_BLOCKS * layout.block_bytes)
        num_blocks = MIN_BLOCKS + num_left // layout.block_bytes
        memory = PoolMemory(layout, min(num_blocks, runner.cache.keys[0].shape[0]))
        model = load_model(checkpoint, spec, runner.ops)
        return cls(ModelRunner(model, runner.ops, KVCache(memory)), memory)

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """See `engine.drafters.Drafter`."""
        num_tokens, table = sequence.num_tokens, sequence.block_table
        most = min(most, self._model.model.spec.max_context_len - num_tokens)
        if most < 1 or max(table) >= self._memory.ceiling:
            return ()
        num_computed = self._num_computed.get(sequence, 0)
        behind = tuple(sequence.token_ids[num_computed : num_tokens - 1])
        if len(behind) > MAX_BEHIND:
            self._catch_up(sequence, behind, num_computed)
            return ()
        block_size, position = self._model.cache.layout.block_size, num_tokens - 1
        slot = table[position // block_size] * block_size + position % block_size
        self._backlog.behind[slot] = behind
        return (drafters.UNKNOWN,) * most

    def judge(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """See `engine.drafters.Drafter`. What was behind and the last token were computed, and drafts but for the last;
        nothing where there are none."""
        if num_drafts and not sequence.is_over:
            num_before = sequence.num_tokens - 1 - num_accepted
            self._num_computed[sequence] = num_before + min(num_accepted, num_drafts - 1)

    def _catch_up(self, sequence: Sequence, behind: tuple[int, ...], num_computed: int) -> None:
        """Has the next step compute some of what is missing, if others have left room for it."""
        chunks = self._backlog.chunks
        chunk = behind[: CHUNK_TOKENS - chunks.num_tokens]
        if chunk:
            add_tokens(chunks, chunk, num_computed, sequence.block_table, self._model.cache.layout.block_size)
        self._num_computed[sequence] = num_computed + len(chunk)

    def forget(self, sequence: Sequence) -> None:
        """See `engine.drafters.Drafter`."""
        self._num_computed.pop(sequence, None)

    def runner(self, runner: Runner) -> Runner:
        """See `engine.drafters.Drafter`."""
        drafting = _GrowingRunner(self._model, self._memory)
        return DraftingRunner(runner, drafting, self._model.cache.layout.block_size, self._backlog)


class _GrowingRunner(Runner):
    """Makes blocks usable before they are written."""

    def __init__(self, model: ModelRunner, memory: PoolMemory) -> None:
        self._model = model
        self._memory = memory

    def run(self, batch: Batch) -> list[Sample]:
        """As the model. Raises PoolMemoryFull."""
        num_blocks = max(map(max, batch.block_tables)) + 1
        if num_blocks > self._memory.num_blocks:
            self._memory.commit(min(self._memory.ceiling, num_blocks + num_blocks // 2))
        return self._model.run(batch)

    def call_between_layers(self, call: Callable[[], None]) -> None:
        """As the model."""
        self._model.call_between_layers(call)

    def call_aside(self, call: Callable[[], Answer]) -> Answer:
        """As the model."""
        return self._model.call_aside(call)


def num_weights(spec: DecoderSpec) -> int:
    """Numbers in all weight matrices, the embedding twice: as a table and, reordered, as a head."""
    num_query, num_kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    layer = spec.hidden_size * (2 * num_query + 2 * num_kv + 3 * spec.intermediate_size)
    return spec.num_layers * layer + 2 * spec.vocab_size * spec.hidden_size
