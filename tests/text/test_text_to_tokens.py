"""Encoding against slow specifications, and the bytes of tokens against the library's own decoding."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_files import (
    BOOL,
    F32,
    I32,
    STRING,
    U32,
    byte_level_metadata,
    sentencepiece_metadata,
    sentencepiece_vocabulary,
    write_folder,
    write_gguf,
)
from slow_bpe import SlowSmolLM
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from router.tokenizer import byte_level_alphabet, load_tokenizer
from runtime.checkpoint import open_checkpoint
from runtime.errors import CheckpointError

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "I'm sure they've said it'll do; we'd not. IT'S",
    "def f(x):\n\treturn {k: v for k, v in x.items()}  # 12345 * 0x7f\n\n\n",
    "   leading, trailing   ",
    "a  b   c\t\td\r\n\r\n  e \n",
    "1234567890 3.14159 ١٢٣ ½ Ⅷ 2²",
    "日本語のテキストと漢字、かな交じり文。",
    "한국어 문장과 가각힣 조합형 각",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪 :-) ...!!!",
    "Ελληνικά кириллица עברית العربية हिन्दी ไทย",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|> <|im_start",
    "https://example.org/a?b=c&d=%20#e",
    "\u00a0\u2003\u3000 \u200b\ufeff",
    "",
    " ",
    "\n",
]


@pytest.fixture(scope="module")
def slow_smollm():
    return SlowSmolLM(open_checkpoint("smollm2").gguf.metadata)


@pytest.mark.parametrize("text", CORPUS)
def test_smollm2_encodes_as_defined(smollm2, slow_smollm, text):
    assert smollm2.encode(text, add_special_tokens=True) == slow_smollm.encode(text)


@given(
    text=st.one_of(
        st.text(st.characters(exclude_categories=["Cs", "Cn", "Co"]), max_size=30),
        st.text(alphabet="ab1 2\n\t'sét日가👍<|im_start>", max_size=30),
    )
)
def test_smollm2_encodes_any_text_as_defined(smollm2, slow_smollm, text):
    assert smollm2.encode(text, add_special_tokens=False) == slow_smollm.encode(text)


@given(text=st.text(alphabet="a= \n日👍", max_size=200))
def test_text_is_within_the_bound_of_its_tokens(smollm2, text):
    assert len(text.encode()) <= smollm2.max_text_bytes(len(smollm2.encode(text, add_special_tokens=False)))


def test_smollm2_known_ids(smollm2):
    # Digits stand alone; the names of control tokens are recognised.
    assert smollm2.encode("<|im_start|>user\nhi<|im_end|>", False) == [1, 4093, 198, 6004, 2]
    assert smollm2.encode("12345", False) == [33, 34, 35, 36, 37]
    assert smollm2.vocab_size == 49_152
    assert [i for i in range(smollm2.vocab_size) if smollm2.is_special(i)] == list(range(17))


@pytest.mark.parametrize("text", CORPUS)
def test_token_bytes_join_to_the_text(smollm2, text):
    token_ids = smollm2.encode(text, add_special_tokens=False)
    assert b"".join(map(smollm2.token_bytes, token_ids)) == text.encode()


def test_token_bytes_of_every_token_equal_the_librarys_decoding(smollm2):
    library = smollm2._library
    for token_id in range(0, smollm2.vocab_size, 7):
        expected = library.decode([token_id], skip_special_tokens=False)
        assert smollm2.token_bytes(token_id).decode(errors="replace") == expected


def test_ids_without_a_token(smollm2):
    assert smollm2.token_bytes(49_152) == smollm2.token_bytes(-1) == b""
    assert not smollm2.is_special(49_152)


def test_text_bound_is_the_longest_token(smollm2, byte_tokenizer):
    longest = max(len(smollm2.token_bytes(i)) for i in range(smollm2.vocab_size))
    assert smollm2.max_text_bytes(10) == 10 * longest
    assert byte_tokenizer.max_text_bytes(3) == 3 * len("<|end|>")


def gguf_tokenizer(tmp_path, metadata):
    return load_tokenizer(open_checkpoint(str(write_gguf(tmp_path / "t.gguf", metadata))))


def pieces(tokenizer, text):
    """What the tokenizer's vocabulary of single bytes is applied to, piece by piece."""
    return [text[start:end] for _, (start, end) in tokenizer._library.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-2", ["it", "'s", " 1234", "!!", " ", " x", "\n", "\n", "Y"]),
        ("smollm", ["it", "'s", " ", "1", "2", "3", "4", "!!", " ", " x", "\n", "\n", "Y"]),
        ("llama-bpe", ["it", "'s", " ", "123", "4", "!!", " ", " x", "\n\n", "Y"]),
        ("qwen2", ["it", "'s", " ", "1", "2", "3", "4", "!!", " ", " x", "\n\n", "Y"]),
        ("default", ["it", "'", "s", " ", "123", "4", "!!", " ", " x", "\n", "\n", "Y"]),
    ],
)
def test_ways_to_split_text(tmp_path, name, expected):
    tokenizer = gguf_tokenizer(tmp_path, {**byte_level_metadata(), "tokenizer.ggml.pre": (STRING, name)})
    text = "it's 1234!!  x\n\nY"
    assert pieces(tokenizer, text) == expected
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, False))) == text.encode()


def test_qwen_composes_characters_first(tmp_path):
    tokenizer = gguf_tokenizer(tmp_path, {**byte_level_metadata(), "tokenizer.ggml.pre": (STRING, "qwen2")})
    assert tokenizer.encode("e\u0301", False) == list("é".encode())
    assert tokenizer.max_text_bytes(1) == 4 * len("<|end|>")


@pytest.mark.parametrize(
    ("metadata", "text_ids"),
    [
        ({}, [97]),
        ({"tokenizer.ggml.add_bos_token": (BOOL, True)}, [257, 97]),
        ({"tokenizer.ggml.pre": (STRING, "llama-bpe")}, [257, 97]),
        ({"tokenizer.ggml.pre": (STRING, "llama-bpe"), "tokenizer.ggml.add_bos_token": (BOOL, False)}, [97]),
        ({"tokenizer.ggml.add_eos_token": (BOOL, True)}, [97, 257]),
    ],
)
def test_frame_of_plain_text_from_gguf(tmp_path, metadata, text_ids):
    tokenizer = gguf_tokenizer(tmp_path, {**byte_level_metadata(), **metadata})
    assert tokenizer.encode("a", add_special_tokens=True) == text_ids
    assert tokenizer.encode("a", add_special_tokens=False) == [97]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model", (STRING, "wordpiece"), 'tokenizer "wordpiece" is not known; known are: gpt2, llama'),
        ("pre", (STRING, "klingon"), '"klingon" is not known; known are: default, .*qwen2, smollm'),
        ("model", (U32, 1), "must be of type str"),
        ("tokens", ([I32], [1, 2]), "must be a list of strings"),
        ("token_type", ([I32], [1]), "must be 259 integers"),
        ("merges", ([STRING], ["ab"]), "'ab' is not two tokens"),
        ("merges", ([STRING], ["q xyz"]), "cannot be built"),
        ("add_bos_token", (U32, 1), "must be of type bool"),
    ],
)
def test_gguf_tokenizer_that_cannot_be(tmp_path, key, value, words):
    metadata = {**byte_level_metadata(), f"tokenizer.ggml.{key}": value}
    with pytest.raises(CheckpointError, match=rf"t\.gguf.*{words}"):
        gguf_tokenizer(tmp_path, metadata)


@pytest.mark.parametrize("key", ["model", "tokens", "merges"])
def test_gguf_without_a_tokenizer(tmp_path, key):
    metadata = {**byte_level_metadata(), "llama.vocab_size": (U32, 259)}
    del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(CheckpointError, match=rf'"tokenizer\.ggml\.{key}": is missing'):
        gguf_tokenizer(tmp_path, metadata)


def test_bos_id_outside_the_vocabulary(tmp_path):
    metadata = {**byte_level_metadata(), "tokenizer.ggml.bos_token_id": (U32, 259)}
    with pytest.raises(CheckpointError, match=r"bos_token_id.*below the 259 tokens, got 259"):
        gguf_tokenizer(tmp_path, {**metadata, "tokenizer.ggml.add_bos_token": (BOOL, True)})


def slow_sentencepiece(text: str) -> list[int]:
    """SentencePiece BPE as it is defined: join the neighbours whose token scores best, leftmost first."""
    tokens, types, scores = sentencepiece_vocabulary()
    ids = {token: i for i, token in enumerate(tokens) if types[i] == 1}
    parts = list(("▁" + text.replace(" ", "▁")) if text else "")
    while True:
        joined = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids]
        if not joined:
            break
        _, at = min(joined)
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    return [i for part in parts for i in ([ids[part]] if part in ids else [3 + byte for byte in part.encode()])]


@given(text=st.text(alphabet="thein anbg日本é한👍", max_size=30))
def test_sentencepiece_encodes_as_defined(sentencepiece, text):
    assert sentencepiece.encode(text, add_special_tokens=False) == slow_sentencepiece(text)
    assert sentencepiece.encode(text, add_special_tokens=True) == [1, *slow_sentencepiece(text)]


def test_sentencepiece_bytes_of_tokens(sentencepiece):
    ids = sentencepiece.encode("the 한\n", add_special_tokens=True)
    assert [sentencepiece.token_bytes(i) for i in ids[:2]] == [b"<s>", b" the"]
    assert b"".join(map(sentencepiece.token_bytes, ids[1:])) == " the 한\n".encode()
    assert sentencepiece._library.decode(ids, skip_special_tokens=True) == "the 한\n"
    assert sentencepiece.is_special(0) and sentencepiece.is_special(2) and not sentencepiece.is_special(3)


def test_sentencepiece_without_the_first_space(tmp_path):
    metadata = {**sentencepiece_metadata(), "tokenizer.ggml.add_space_prefix": (BOOL, False)}
    tokenizer = gguf_tokenizer(tmp_path, metadata)
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode("the an", False))) == b"the an"


def test_sentencepiece_scores_must_fit(tmp_path):
    with pytest.raises(CheckpointError, match=r'"tokenizer\.ggml\.scores": must be \d+ floats'):
        gguf_tokenizer(tmp_path, {**sentencepiece_metadata(), "tokenizer.ggml.scores": ([F32], [0.0])})


def folder_with(tmp_path, library, **files):
    folder = write_folder(tmp_path / "m", None, **files)
    library.save(str(folder / "tokenizer.json"))
    return load_tokenizer(open_checkpoint(str(folder)))


def byte_level_library() -> Tokenizer:
    """The twin of `byte_level_metadata`, as a tokenizer.json has it."""
    alphabet = list(byte_level_alphabet().values())
    library = Tokenizer(models.BPE({token: i for i, token in enumerate([*alphabet, "ab"])}, [("a", "b")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    library.add_tokens([AddedToken("<think>", normalized=False)])
    return library


@given(text=st.lists(st.sampled_from([*"abc 1é日\n", "<|end|>", "<think>"]), max_size=20).map("".join))
def test_gguf_equals_its_tokenizer_json(byte_tokenizer, twin, text):
    assert byte_tokenizer.encode(text, True) == twin.encode(text, True)


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    return folder_with(tmp_path_factory.mktemp("twin"), byte_level_library())


def test_folder_knows_what_its_gguf_knows(byte_tokenizer, twin):
    assert twin.vocab_size == byte_tokenizer.vocab_size == 259
    for token_id in range(259):
        assert twin.token_bytes(token_id) == byte_tokenizer.token_bytes(token_id)
        assert twin.is_special(token_id) == byte_tokenizer.is_special(token_id) == (token_id == 257)


def test_sentencepiece_folder_with_metaspace(tmp_path):
    tokens = ["<unk>", "▁the", "▁", "t", "h", "e", "▁t", "he", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    library = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = folder_with(tmp_path, library)
    ids = tokenizer.encode("the é", False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == " the é".encode()


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path):
    library = byte_level_library()
    library.enable_truncation(2)
    library.enable_padding(length=50)
    assert folder_with(tmp_path, library).encode("xyz", True) == list(b"xyz")


@pytest.mark.parametrize(
    ("template", "settings", "expected"),
    [
        (None, {}, [97]),
        ("<|end|> $A", {}, [257, 97]),
        ("<|end|> $A <|end|>", {}, [257, 97, 257]),
        (None, {"add_bos_token": True, "bos_token": "<|end|>"}, [257, 97]),
        (None, {"add_bos_token": True, "bos_token": {"content": "<|end|>"}}, [257, 97]),
        ("<|end|> $A", {"add_bos_token": True, "bos_token": "<|end|>"}, [257, 97]),
        ("<|end|> $A", {"add_bos_token": False, "bos_token": "<|end|>"}, [97]),
        ("<|end|> $A", {"add_bos_token": None, "bos_token": "<|end|>"}, [257, 97]),
    ],
)
def test_frame_of_plain_text_from_a_folder(tmp_path, template, settings, expected):
    library = byte_level_library()
    if template:
        library.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<|end|>", 257)])
    tokenizer = folder_with(tmp_path, library, tokenizer_config=settings)
    assert tokenizer.encode("a", add_special_tokens=True) == expected
    assert tokenizer.encode("a", add_special_tokens=False) == [97]


def test_tokens_of_the_settings_are_added(tmp_path):
    entry = {"content": "<tool>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    settings = {"added_tokens_decoder": {"259": entry}, "eos_token": "<think>"}
    tokenizer = folder_with(tmp_path, byte_level_library(), tokenizer_config=settings)
    assert tokenizer.encode("<tool>", False) == [259]
    assert tokenizer.is_special(259)
    assert tokenizer.is_special(258), "the end-of-sequence token is special whatever tokenizer.json says"


def test_added_token_keeps_its_characters(tmp_path):
    # In a byte-level vocabulary "é" would stand for the byte 0xE9; as an added token it is the letter.
    library = byte_level_library()
    library.add_tokens([AddedToken("é", normalized=False), AddedToken("<｜x｜>", normalized=False)])
    tokenizer = folder_with(tmp_path, library)
    assert [tokenizer.token_bytes(i).decode() for i in tokenizer.encode("é<｜x｜>", False)] == ["é", "<｜x｜>"]


def test_folder_without_tokenizer(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: missing"):
        load_tokenizer(open_checkpoint(str(write_folder(tmp_path / "m"))))


@pytest.mark.parametrize("content", [{}, {"model": {"type": "Telepathy"}}, [1]])
def test_folder_with_a_broken_tokenizer(tmp_path, content):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: "):
        load_tokenizer(open_checkpoint(str(write_folder(tmp_path / "m", None, tokenizer=content))))


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece()])
def test_decoder_that_is_not_known(tmp_path, decoder):
    library = byte_level_library()
    description = json.loads(library.to_str())
    description["decoder"] = json.loads(decoder.__getstate__()) if decoder else None
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: decoder (null|WordPiece) is not known; known are"):
        folder_with(tmp_path, Tokenizer.from_str(json.dumps(description)))


def test_normaliser_loosens_the_text_bound(tmp_path):
    library = byte_level_library()
    library.normalizer = normalizers.NFKC()
    assert folder_with(tmp_path, library).max_text_bytes(1) == 4 * len("<|end|>")
