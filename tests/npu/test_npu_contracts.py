"""Each rule of the operators, by a call that breaks it and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from contracts import ContractViolation
from simulated_host import Npu

BLOCK_SIZE, HEAD_DIM, HEADS, KV_HEADS, NUM_BLOCKS = 128, 64, 4, 2, 6
Arguments = dict[str, Any]
Change = Callable[[Arguments], Any]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def fused() -> Arguments:
    """Three sequences: a decode row, a chunk, a chunk with a past in two blocks."""
    cache = random(NUM_BLOCKS, BLOCK_SIZE, KV_HEADS * HEAD_DIM)
    return {
        "query": random(8, HEADS, HEAD_DIM),
        "key": cache,
        "value": cache.clone(),
        "atten_mask": torch.ones(2048, 2048, dtype=torch.int8).triu(1),
        "actual_seq_lengths": [1, 4, 8],
        "actual_seq_lengths_kv": [9, 3, 130],
        "block_table": torch.tensor([[5, 0], [2, 0], [0, 1]], dtype=torch.int32),
        "num_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "scale": HEAD_DIM**-0.5,
        "input_layout": "TND",
        "sparse_mode": 3,
        "block_size": BLOCK_SIZE,
    }


def scatter() -> Arguments:
    cache = random(NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    return {
        "key": random(3, KV_HEADS, HEAD_DIM),
        "value": random(3, KV_HEADS, HEAD_DIM),
        "key_cache": cache,
        "value_cache": cache.clone(),
        "slot_mapping": torch.tensor([7, 0, 600]),
        "cache_mode": "Norm",
    }


def paged() -> Arguments:
    cache = random(NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    return {
        "query": random(2, HEADS, HEAD_DIM),
        "key_cache": cache,
        "value_cache": cache.clone(),
        "num_kv_heads": KV_HEADS,
        "num_heads": HEADS,
        "scale_value": HEAD_DIM**-0.5,
        "block_table": torch.tensor([[5, 0], [0, 1]], dtype=torch.int32),
        "context_lens": torch.tensor([9, 130], dtype=torch.int32),
        "out": torch.empty(2, HEADS, HEAD_DIM, dtype=torch.bfloat16),
    }


def splitfuse() -> Arguments:
    arguments = paged()
    hidden = torch.arange(130) > torch.tensor([7, 8, 129])[:, None]  # two rows of 9 positions, one of 130
    arguments["mask"] = torch.zeros(3, 130).masked_fill(hidden, -10000).bfloat16()
    arguments["seq_len"] = torch.tensor([2, 1], dtype=torch.int32)
    arguments |= {"query": random(3, HEADS, HEAD_DIM), "out": random(3, HEADS, HEAD_DIM)}
    return arguments


def quantised() -> Arguments:
    return {
        "x1": torch.ones(3, 16, dtype=torch.int8),
        "x2": torch.ones(16, 8, dtype=torch.int8),
        "scale": torch.ones(8),
        "pertoken_scale": torch.ones(3),
        "output_dtype": torch.bfloat16,
    }


VALID: dict[str, tuple[str, Callable[[], Arguments]]] = {
    "npu_fused_infer_attention_score": ("npu", fused),
    "npu_scatter_pa_kv_cache": ("npu", scatter),
    "_npu_paged_attention": ("atb", paged),
    "_npu_paged_attention_splitfuse": ("atb", splitfuse),
    "npu_rms_norm": ("npu", lambda: {"input": random(3, 16), "gamma": random(16), "epsilon": 1e-5}),
    "npu_add_rms_norm": ("npu", lambda: {"x1": random(3, 16), "x2": random(3, 16), "gamma": random(16)}),
    "npu_swiglu": ("npu", lambda: {"input": random(3, 16)}),
    "npu_rotary_mul": (
        "npu",
        lambda: {"input": random(1, 3, 2, 64), "r1": random(1, 3, 1, 64), "r2": random(1, 3, 1, 64)},
    ),
    "npu_format_cast": ("npu", lambda: {"input": random(8, 16), "acl_format": 29}),
    "npu_dynamic_quant": ("npu", lambda: {"input": random(3, 16)}),
    "npu_quant_matmul": ("npu", quantised),
    "npu_top_k_top_p": (
        "npu",
        lambda: {"logits": torch.randn(2, 2000), "p": torch.ones(2), "k": torch.tensor([5, 1], dtype=torch.int32)},
    ),
}
"""Operator: its namespace, and arguments that are right."""


def call(name: str, arguments: Arguments) -> Any:
    return getattr(getattr(torch.ops, VALID[name][0]), name)(**arguments)


@pytest.mark.parametrize("name", VALID)
def test_right_calls_are_taken(npu: Npu, name: str) -> None:
    call(name, VALID[name][1]())
    assert npu.operators.num_calls[name] == 1


def change(**changes: Any) -> Change:
    return lambda arguments: arguments.update(changes)


def turned(*names: str) -> Change:
    """These tensors keep their shapes and lose their order in memory."""
    return lambda a: a.update({name: a[name].transpose(0, -1).contiguous().transpose(0, -1) for name in names})


def to(dtype: torch.dtype, *names: str) -> Change:
    return lambda a: a.update({name: a[name].to(dtype) for name in names})


def item(name: str, index: Any, value: float) -> Change:
    return lambda a: a[name].__setitem__(index, value)


def with_heads(head_dim: int) -> Change:
    """A query and caches of another head size, consistent in themselves."""
    shape = (NUM_BLOCKS, BLOCK_SIZE, KV_HEADS * head_dim)
    return change(query=random(8, HEADS, head_dim), key=random(*shape), value=random(*shape), scale=head_dim**-0.5)


def with_blocks(size: int) -> Change:
    shape = (NUM_BLOCKS, size, KV_HEADS * HEAD_DIM)
    table = torch.zeros(3, 2048 // size, dtype=torch.int32)
    return change(key=random(*shape), value=random(*shape), block_size=size, block_table=table)


def table(*rows: list[int], dtype: torch.dtype = torch.int32) -> Change:
    return change(block_table=torch.tensor(rows, dtype=dtype))


FUSED, SCATTER = "npu_fused_infer_attention_score", "npu_scatter_pa_kv_cache"
PAGED, SPLITFUSE = "_npu_paged_attention", "_npu_paged_attention_splitfuse"
LOWER = torch.ones(2048, 2048, dtype=torch.int8).tril()

WRONG: list[tuple[str, str, Change]] = [
    (FUSED, "atten_mask: dtype", to(torch.bfloat16, "atten_mask")),
    (FUSED, "atten_mask: shape", change(atten_mask=torch.ones(8, 8, dtype=torch.int8).triu(1))),
    (FUSED, "must be 1 above the diagonal", change(atten_mask=LOWER)),
    (FUSED, "must be 1 above the diagonal", change(atten_mask=1 - LOWER.triu())),
    (FUSED, "must be 1 above the diagonal", change(atten_mask=torch.ones(2048, 2048, dtype=torch.int8).triu(0))),
    (FUSED, "atten_mask is needed", change(atten_mask=None)),
    (FUSED, "sparse_mode must be 3", change(sparse_mode=2)),
    (FUSED, "sparse_mode must be 3", lambda a: a.pop("sparse_mode")),
    (FUSED, "not simulated: layout", change(input_layout="BSH")),
    (FUSED, "the last must be T", change(actual_seq_lengths=[1, 3, 4])),
    (FUSED, "must be cumulative", change(actual_seq_lengths=[1, 1, 8])),
    (FUSED, "must be cumulative", change(actual_seq_lengths=[4, 3, 8])),
    (FUSED, "the last must be T", change(actual_seq_lengths=[1, 4, 7])),
    (FUSED, "actual_seq_lengths is needed", change(actual_seq_lengths=None)),
    (FUSED, "actual_seq_lengths_kv is needed", change(actual_seq_lengths_kv=None)),
    (FUSED, "3 sequences, got 2 lengths", change(actual_seq_lengths_kv=[9, 3])),
    (FUSED, "a context of 2 for 3 new tokens", change(actual_seq_lengths_kv=[9, 2, 130])),
    (FUSED, "2 blocks for 300 positions", change(actual_seq_lengths_kv=[9, 3, 300])),
    (FUSED, "block_table is needed", change(block_table=None)),
    (FUSED, "block_table: dtype", to(torch.int64, "block_table")),
    (FUSED, "block_table: shape", table([5, 0], [2, 0])),
    (FUSED, "ids must be from 0 to 5", table([5, 0], [6, 0], [0, 1])),
    (FUSED, "ids must be from 0 to 5", table([5, 0], [-1, 0], [0, 1])),
    (FUSED, "block_table must be contiguous", turned("block_table")),
    (FUSED, "block_size: 128", with_blocks(64)),
    (FUSED, "block_size: 128", with_blocks(1024)),
    (FUSED, "key: shape", change(block_size=256)),
    (FUSED, "head_dim must be one of", with_heads(32)),
    (FUSED, "head_dim must be one of", with_heads(256)),
    (FUSED, "query: dtype", to(torch.float32, "query", "key", "value")),
    (FUSED, "must have one dtype", to(torch.float16, "value")),
    (FUSED, "query must be contiguous", turned("query")),
    (FUSED, "key must be contiguous", turned("key")),
    (FUSED, "query: shape", change(num_heads=2)),
    (FUSED, "0 KV heads for 4", lambda a: a.pop("num_key_value_heads")),
    (FUSED, "3 KV heads for 4", change(num_key_value_heads=3)),
    (FUSED, "scale must be 0.125, is 1.0", lambda a: a.pop("scale")),
    (FUSED, "not simulated: .*pre_tokens", change(pre_tokens=5)),
    (SCATTER, "cache_mode must be 'Norm'", lambda a: a.pop("cache_mode")),
    (SCATTER, "two rows have one slot", item("slot_mapping", 1, 7)),
    (SCATTER, "slot_mapping: 0 to 767", item("slot_mapping", 1, 768)),
    (SCATTER, "slot_mapping: 0 to 767", item("slot_mapping", 1, -1)),
    (SCATTER, "slot_mapping: dtype", to(torch.float32, "slot_mapping")),
    (SCATTER, "slot_mapping: shape", change(slot_mapping=torch.tensor([7, 0]))),
    (SCATTER, "value must be contiguous", turned("value")),
    (SCATTER, "must have one dtype", to(torch.float16, "key")),
    (SCATTER, "key: shape", change(key=random(3, 1, HEAD_DIM))),
    (PAGED, "context_lens: dtype", to(torch.int64, "context_lens")),
    (PAGED, "2 sequences, got 1", change(context_lens=torch.tensor([9], dtype=torch.int32))),
    (PAGED, "block_table: dtype", to(torch.int64, "block_table")),
    (PAGED, "ids must be from 0 to 5", table([5, 0], [0, 9])),
    (PAGED, "head_dim: at most 256", change(scale_value=0.1, **{
        "query": random(2, HEADS, 24),
        "out": random(2, HEADS, 24),
        "key_cache": random(NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, 24),
        "value_cache": random(NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, 24),
    })),
    (PAGED, "block_size: at most 128", change(
        key_cache=random(NUM_BLOCKS, 256, KV_HEADS, HEAD_DIM), value_cache=random(NUM_BLOCKS, 256, KV_HEADS, HEAD_DIM)
    )),
    (PAGED, "out: shape", change(out=torch.empty(2, HEADS, 32, dtype=torch.bfloat16))),
    (PAGED, "scale must be", change(scale_value=1.0)),
    (PAGED, "key_cache: shape", change(num_kv_heads=1)),
    (SPLITFUSE, "mask: dtype", to(torch.float32, "mask")),
    (SPLITFUSE, "mask: shape", lambda a: a.update(mask=a["mask"][:, :100])),
    (SPLITFUSE, "mask must be 0 where", lambda a: a.update(mask=-10000 - a["mask"])),
    (SPLITFUSE, "mask must be 0 where", item("mask", (0, 8), 0)),
    (SPLITFUSE, "mask must be 0 where", item("mask", (2, 129), -10000)),
    (SPLITFUSE, "the sum must be 3", change(seq_len=torch.tensor([2, 2], dtype=torch.int32))),
    (SPLITFUSE, "seq_len: dtype", to(torch.int64, "seq_len")),
    ("npu_rms_norm", "input must be contiguous", turned("input")),
    ("npu_rms_norm", "gamma: shape", change(gamma=random(8))),
    ("npu_rms_norm", "gamma: dtype", to(torch.float16, "gamma")),
    ("npu_add_rms_norm", "must have one dtype", to(torch.float32, "gamma")),
    ("npu_add_rms_norm", "x2: shape", change(x2=random(1, 16))),
    ("npu_swiglu", "input must be contiguous", turned("input")),
    ("npu_swiglu", "must be even", change(input=random(3, 15))),
    ("npu_rotary_mul", "r1: dtype", to(torch.float32, "r1")),
    ("npu_rotary_mul", "r2: shape", change(r2=random(1, 3, 1, 32))),
    ("npu_rotary_mul", "input: shape", change(input=random(3, 2, 64))),
    ("npu_rotary_mul", "head_dim must be even and below 896", change(
        input=random(1, 3, 2, 896), r1=random(1, 3, 1, 896), r2=random(1, 3, 1, 896)
    )),
    ("npu_format_cast", "no fractal format", to(torch.float32, "input")),
    ("npu_format_cast", "input must be contiguous", turned("input")),
    ("npu_dynamic_quant", "input: dtype", to(torch.float32, "input")),
    ("npu_quant_matmul", "output_dtype must be given", lambda a: a.pop("output_dtype")),
    ("npu_quant_matmul", "x2 must be contiguous", turned("x2")),
    ("npu_quant_matmul", "the last sizes may be 65535", change(
        x2=torch.ones(16, 65536, dtype=torch.int8), scale=torch.ones(65536)
    )),
    ("npu_quant_matmul", "scale: shape", change(scale=torch.ones(3))),
    ("npu_quant_matmul", "pertoken_scale: shape", change(pertoken_scale=torch.ones(8))),
    ("npu_quant_matmul", "x1: dtype", to(torch.int32, "x1")),
    ("npu_top_k_top_p", "k must be from 1 to 1024", item("k", 0, 1025)),
    ("npu_top_k_top_p", "k must be from 1 to 1024", item("k", 0, 0)),
    ("npu_top_k_top_p", "k: dtype", to(torch.int64, "k")),
    ("npu_top_k_top_p", "p: dtype", to(torch.float16, "p")),
    ("npu_top_k_top_p", "p must be from 0 to 1", item("p", 1, 1.5)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "message", "wrong"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_wrong_calls_are_caught(npu: Npu, name: str, message: str, wrong: Change) -> None:
    arguments = VALID[name][1]()
    wrong(arguments)
    with pytest.raises(ContractViolation, match=message):
        call(name, arguments)


@pytest.mark.parametrize(
    ("name", "argument"), [(PAGED, "context_lens"), (SPLITFUSE, "context_lens"), (SPLITFUSE, "seq_len")]
)
def test_lengths_on_the_device_are_caught(npu: Npu, name: str, argument: str) -> None:
    arguments = VALID[name][1]()
    npu.operators.placement.put_on_device(arguments["block_table"])
    call(name, arguments)
    npu.operators.placement.put_on_device(arguments[argument])
    with pytest.raises(ContractViolation, match=f"{argument} must lie in host memory"):
        call(name, arguments)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("npu_rms_norm", {"eps": 1e-5}, "eps"),
        ("npu_top_k_top_p", {"k": 5}, "Tensor"),
        (FUSED, {"num_heads": 4.5}, "num_heads"),
        (PAGED, {"scale": 1.0}, "scale"),
    ],
)
def test_names_and_types_are_the_dispatchers_work(npu: Npu, name: str, arguments: Arguments, message: str) -> None:
    with pytest.raises((RuntimeError, TypeError), match=message):
        call(name, VALID[name][1]() | arguments)


def test_empty_tensors_are_caught(npu: Npu) -> None:
    with pytest.raises(ContractViolation, match="npu_swiglu: an empty tensor"):
        call("npu_swiglu", {"input": random(0, 16)})


def test_a_refused_operator_fails_as_a_device_does(npu: Npu) -> None:
    npu.operators.refused["npu_swiglu"] = lambda x: x.shape[-1] == 16
    with pytest.raises(RuntimeError, match="npu_swiglu: not supported"):
        call("npu_swiglu", {"input": random(3, 16)})
    call("npu_swiglu", {"input": random(3, 18)})
