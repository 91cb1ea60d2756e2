"""The target drafts for itself, with its weights rounded to 8 bits.

Reading weights is what a step of few rows takes, and half of their bytes take little more than half of the time, for
guesses that are nearly always right. There is no KV of its own: the copy reads what the target has computed, and writes
where the target writes over it in the same step. Embedding and head are the target's. Needs a model in 16 or 32 bits.
"""

from __future__ import annotations

from engine import drafters
from engine.batch import Runner
from engine.decoder_spec import DecoderSpec
from engine.drafting import DraftingRunner
from engine.model_runner import ModelRunner, load_model, model_spec
from engine.sequence import Sequence
from runtime.checkpoint import open_checkpoint
from runtime.errors import ConfigError


class Drafter(drafters.Drafter):
    """See the module."""

    has_passes = True

    def __init__(self, copy: ModelRunner) -> None:
        self._copy = copy

    @classmethod
    def open(cls, target: drafters.Target) -> Drafter:
        """See `engine.drafters.Drafter`."""
        config, runner = target.config, target.runner
        if not isinstance(runner, ModelRunner):
            size = config.tensor_parallel_size
            raise ConfigError(f"--speculation: self needs weights in one process; got {config.model} in {size}")
        if config.quantization != "none":
            raise ConfigError(f"--speculation: self drafts with 8 bits, as --quantization {config.quantization} does")
        target.check_budget(num_layer_bytes(runner.model.spec))
        checkpoint = open_checkpoint(config.model)
        spec = model_spec(checkpoint, config.dtype)
        copy = load_model(checkpoint, spec, runner.ops, quantization="int8", shared=runner.model)
        return cls(ModelRunner(copy, runner.ops, runner.cache))

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """See `engine.drafters.Drafter`."""
        return (drafters.UNKNOWN,) * most

    def forget(self, sequence: Sequence) -> None:
        """Nothing is kept."""

    def runner(self, runner: Runner) -> Runner:
        """See `engine.drafters.Drafter`."""
        return DraftingRunner(runner, self._copy, self._copy.cache.layout.block_size)


def num_layer_bytes(spec: DecoderSpec) -> int:
    """Of all layers' weights, a byte each."""
    num_query, num_kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = spec.hidden_size * (2 * num_query + 2 * num_kv)
    return spec.num_layers * (attention + 3 * spec.hidden_size * spec.intermediate_size)
