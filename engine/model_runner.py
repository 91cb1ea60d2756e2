"""From a checkpoint to a running model: what it needs, its weights, and one step of a batch.

Owns the order of loading (`model_spec` tells sizes before `load_model` reads weights) and the way from plain batches to
tensors and back to samples. Does not own KV memory, scheduling, threads or the choice of a device. Invariant: what a
step reads and writes is named by its batch alone; between steps a runner holds nothing but weights and caches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch

from engine import sampler
from engine.batch import Answer, Batch
from engine.decode_graphs import DecodeGraphs, record_steps
from engine.decoder import Decoder
from engine.decoder_spec import ConfigReader, DecoderSpec
from engine.models import load_model_class
from engine.request import Sample
from engine.tensor_parallel import Shard, ShardedWeights
from engine.weights import Progress, open_weights
from engine.weights.source import Weights
from kernels import AttentionMetadata, KVDtype, Ops, Quantization
from kvstore.cache import KVCache
from kvstore.layout import KVLayout
from runtime.checkpoint import Checkpoint
from runtime.errors import CheckpointError, ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What models compute in, by the names that configurations use."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What is known of a model before its weights are read."""

    architecture: str
    """`model_type`: the name of its file in engine.models."""
    dtype: str
    """What it computes in, a key of DTYPES."""
    decoder: DecoderSpec
    """Its shape."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.decoder.vocab_size

    @property
    def max_context_len(self) -> int:
        """Positions, prompt and output together, that the model was made for."""
        return self.decoder.max_context_len

    def kv_layout(self, block_size: int, kv_dtype: KVDtype = "auto", num_ranks: int = 1) -> KVLayout:
        """The shape of its KV in blocks of `block_size` positions, computed by so many ranks."""
        decoder, dtype = self.decoder, self.dtype if kv_dtype == "auto" else kv_dtype
        return KVLayout(decoder.num_layers, block_size, decoder.num_kv_heads, decoder.head_dim, dtype, num_ranks)


def model_spec(checkpoint: Checkpoint, dtype: str = "auto") -> ModelSpec:
    """Reads the configuration of `checkpoint`; fast.

    `dtype` is a key of DTYPES, or "auto": float32 for GGUF, otherwise what the weights were saved in. Raises
    CheckpointError for a model or setting that is not supported, ConfigError for a dtype that is not.
    """
    model_class = load_model_class(checkpoint.config.get("model_type"), checkpoint.path)
    decoder = model_class.read_spec(ConfigReader(checkpoint.config, config_path(checkpoint)))
    return ModelSpec(str(checkpoint.config["model_type"]), resolve_dtype(checkpoint, dtype), decoder)


def resolve_dtype(checkpoint: Checkpoint, dtype: str) -> str:
    """The name of the dtype to compute in; see `model_spec`."""
    if dtype == "auto":
        saved = "float32" if checkpoint.gguf is not None else checkpoint.config.get("dtype", "float32")
        if saved not in DTYPES:
            raise CheckpointError(
                f"{config_path(checkpoint)}: dtype {saved!r} cannot be computed in; choose one of {', '.join(DTYPES)}"
            )
        return str(saved)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be auto or one of {', '.join(DTYPES)}, got {dtype!r}")
    return dtype


def config_path(checkpoint: Checkpoint) -> Path:
    """The file that the configuration comes from, for messages."""
    return checkpoint.path if checkpoint.gguf is not None else checkpoint.path / "config.json"


def load_model(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    ops: Ops,
    progress: Progress | None = None,
    quantization: Quantization = "none",
    shared: Decoder | None = None,
    shard: Shard | None = None,
) -> Decoder:
    """Reads the weights of `checkpoint` onto the device of `ops`; those of linear layers are quantised as told. What is
    never quantised is that of `shared`, if the model is loaded already. With `shard` only that part of it is read.

    `progress` is called with the share done, from above 0 to exactly 1. Raises CheckpointError naming the file and the
    tensor that is missing, misshapen, truncated or of an unknown kind.
    """
    report = progress or (lambda share: None)
    weights: Weights = open_weights(checkpoint, DTYPES[spec.dtype], report)
    decoder_spec = spec.decoder
    if shard is not None:
        weights, decoder_spec = ShardedWeights(weights, shard, decoder_spec.tied_head), shard.narrowed(decoder_spec)
    with torch.inference_mode():
        model_class = load_model_class(spec.architecture, checkpoint.path)
        model = model_class(decoder_spec, ops, weights, quantization, shared)
    report(1.0)
    return model


class ModelRunner:
    """Runs batches on a model; implements `engine.batch.Runner`. Used by one thread at a time."""

    def __init__(self, model: Decoder, ops: Ops, cache: KVCache, max_graph_rows: int = 0) -> None:
        """Steps of up to `max_graph_rows` single rows are recorded now, where the device can."""
        decoder, layout = model.spec, cache.layout
        assert (layout.num_layers, layout.heads_per_plane, layout.head_dim) == (
            decoder.num_layers,
            decoder.num_kv_heads,
            decoder.head_dim,
        )
        self.model = model
        """The loaded model."""
        self.cache = cache
        """Where its KV is."""
        self.ops = ops
        """What it runs on."""
        kv_dtype: KVDtype = "int8" if layout.dtype == "int8" else "auto"
        ops.prepare(decoder.num_heads, decoder.num_kv_heads, decoder.head_dim, layout.block_size, model.dtype, kv_dtype)
        self._graphs: DecodeGraphs | None = record_steps(model, ops, cache, max_graph_rows)

    def run(self, batch: Batch) -> list[Sample]:
        """Writes the KV of every packed token to its slot and answers one sample for each of `batch.sample_rows`.

        Raises sampler.LogitsNotFinite if the model's output cannot be sampled from; KV is written nonetheless.
        """
        if not batch.num_tokens:
            return []
        self.ops.enter_thread()
        with torch.inference_mode():
            logits = self.logits(batch)
            return sampler.sample(logits, batch.sample_rows)

    def call_between_layers(self, call: Callable[[], None]) -> None:
        """See `engine.batch.Runner`."""
        self.ops.call_between_layers(call)

    def call_aside(self, call: Callable[[], Answer]) -> Answer:
        """See `engine.batch.Runner`."""
        self.ops.enter_thread()
        return call()

    def logits(self, batch: Batch) -> torch.Tensor:
        """The forward pass of `run`: logits [S, V] float32 of the rows that sample. Called in inference mode."""
        if self._graphs is not None and self._graphs.fits(batch):
            return self._graphs.logits(batch)
        device = self.ops.device
        token_ids = torch.tensor(batch.token_ids, dtype=torch.int64, device=device)  # [T]
        rows = torch.tensor([row.row for row in batch.sample_rows], dtype=torch.int64, device=device)  # [S]
        return self.model.forward(token_ids, self.metadata(batch), self.cache.keys, self.cache.values, rows)

    def metadata(self, batch: Batch) -> AttentionMetadata:
        """The batch's places as tensors, planned for this step."""
        device, int32, int64 = self.ops.device, torch.int32, torch.int64
        longest = max(len(table) for table in batch.block_tables)
        tables = [table + [0] * (longest - len(table)) for table in batch.block_tables]
        starts = batch.query_starts
        metadata = AttentionMetadata(
            query_starts=torch.tensor(starts, dtype=int32, device=device),  # [B + 1]
            context_lens=torch.tensor(batch.context_lens, dtype=int32, device=device),  # [B]
            block_tables=torch.tensor(tables, dtype=int32, device=device),  # [B, M]
            slots=torch.tensor(batch.slots, dtype=int64, device=device),  # [T]
            positions=torch.tensor(batch.positions, dtype=int64, device=device),  # [T]
            query_lens_list=tuple(end - start for start, end in pairwise(starts)),
            context_lens_list=tuple(batch.context_lens),
            block_size=self.cache.layout.block_size,
        )
        return replace(metadata, plan=self.ops.plan_attention(metadata))
