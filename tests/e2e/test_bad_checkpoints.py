"""`baton serve` with a broken checkpoint: one clear line naming file and tensor, soon, and nothing left running.

The checkpoint is a whole one (which is served, by the first test) with one thing changed. What else may be wrong is
tried without a service, in tests/model/test_weights.py and test_models.py: all of it comes out the same way.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from served import BATON, Served
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from baton import Client
from runtime.checkpoint import open_checkpoint

# Heads as the packaged model has them: for others, kernels would be compiled first.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 192,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 0,
}
LAYER = "model.layers.0"
SHAPES = {
    "model.embed_tokens.weight": (256, 192),
    f"{LAYER}.input_layernorm.weight": (192,),
    f"{LAYER}.self_attn.q_proj.weight": (192, 192),
    f"{LAYER}.self_attn.k_proj.weight": (64, 192),
    f"{LAYER}.self_attn.v_proj.weight": (64, 192),
    f"{LAYER}.self_attn.o_proj.weight": (192, 192),
    f"{LAYER}.post_attention_layernorm.weight": (192,),
    f"{LAYER}.mlp.gate_proj.weight": (48, 192),
    f"{LAYER}.mlp.up_proj.weight": (48, 192),
    f"{LAYER}.mlp.down_proj.weight": (192, 48),
    "model.norm.weight": (192,),
}
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
EXIT_LIMIT_S = 60.0
ONE_WORKER = ("--num-prefill=0", "--num-decode=0", "--num-mixed=1")
"""For what only a worker finds: a second one would find it as well."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A whole checkpoint in two shards, its vocabulary the 256 bytes."""
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    write_shards(folder, weights)
    return folder


def write_shards(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """The embedding in the first shard, the rest in the second, and the index."""
    shards = {name: FIRST if "embed" in name else SECOND for name in weights}
    for shard in (FIRST, SECOND):
        save_file({name: weights[name] for name in weights if shards[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def serve_fails(path: Path, *flags: str) -> str:
    """The last line on standard error of a `baton serve` that must fail."""
    argv = [BATON, "serve", str(path), "--port=0", *flags]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=EXIT_LIMIT_S, check=False)
    assert done.returncode == 1, done
    assert "Traceback" not in done.stderr and "ready:" not in done.stdout
    running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if is_readable(path)]
    assert not [line for line in running if f"--model={path}".encode() in line]
    return done.stderr.splitlines()[-1]


def is_readable(path: Path) -> bool:
    """Whether the process is still there."""
    try:
        path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return True


def test_whole_checkpoint_is_served(serve: Callable[..., Served], checkpoint: Path) -> None:
    with Client(serve(model=str(checkpoint)).address, timeout_s=60) as client:
        answer = client.complete("abc", max_tokens=8, ignore_eos=True)
    assert answer.usage.prompt_tokens == 3 and len(answer.token_ids) == 8


def test_truncated_safetensors(checkpoint: Path) -> None:
    shard = checkpoint / SECOND
    shard.write_bytes(shard.read_bytes()[:-100])
    line = serve_fails(checkpoint)
    assert str(shard) in line and "truncated" in line


def test_missing_shard(checkpoint: Path) -> None:
    (checkpoint / FIRST).unlink()
    line = serve_fails(checkpoint)
    assert FIRST in line and "model.embed_tokens.weight" in line


def test_wrong_shape(checkpoint: Path) -> None:
    weights = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    weights[f"{LAYER}.self_attn.k_proj.weight"] = torch.zeros(32, 192)
    write_shards(checkpoint, weights)
    line = serve_fails(checkpoint, *ONE_WORKER)
    assert SECOND in line and f"{LAYER}.self_attn.k_proj.weight has shape [32, 192]" in line and "[64, 192]" in line


def test_gguf_with_unknown_quantisation(tmp_path: Path) -> None:
    tensor = b"blk.3.ffn_up.weight"
    content = bytearray(open_checkpoint("smollm2").path.read_bytes())
    # After the name come the number of dimensions (4 bytes), the dimensions (8 each), the type (4).
    place = content.index(tensor) + len(tensor)
    num_dims = int.from_bytes(content[place : place + 4], "little")
    assert num_dims == 2
    content[place + 4 + 8 * num_dims] = 250
    file = tmp_path / "odd.gguf"
    file.write_bytes(content)
    line = serve_fails(file, *ONE_WORKER)
    assert str(file) in line and tensor.decode() in line and "250" in line
