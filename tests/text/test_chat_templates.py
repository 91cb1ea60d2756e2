"""Conversations are laid out as the model's template says, within bounds."""

from __future__ import annotations

import json
from datetime import datetime

import pytest
from model_files import STRING, byte_level_metadata, write_folder, write_gguf

from router.chat_template import STAND_IN, ChatTemplate, load_chat_template
from runtime.checkpoint import open_checkpoint
from runtime.errors import CheckpointError, InvalidArgument

HELLO = [{"role": "user", "content": "Hello"}]


def render(source, messages=HELLO, **arguments):
    return ChatTemplate(source, {"bos_token": "<s>"}, "test").render(messages, **arguments)


def test_packaged_model():
    template = load_chat_template(open_checkpoint("smollm2"))
    expected = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n"
    )
    assert template.render(HELLO, add_generation_prompt=False) == expected
    assert template.render(HELLO) == expected + "<|im_start|>assistant\n"
    with_system = template.render([{"role": "system", "content": "Be brief."}, *HELLO])
    assert with_system.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0]['content'] }}", "<s>Hello"),
        ("{% for m in messages %}\n    {{ m.role }}\n{% endfor %}\nx", "    user\nx"),
        ("a\n    {% if true %}\nb\n    {% endif %}\nc", "a\nb\nc"),
        ("{{ {'a': '<é>', 'b': [1]} | tojson }}", '{"a": "<é>", "b": [1]}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "Hello!"),
        ("{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }}", "True True True"),
        ("{{ messages[0].content.strip().upper() }}", "HELLO"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{{ '-' * 3 }}", "---"),
        ("{{ nothing }}", ""),
    ],
)
def test_what_templates_use(source, expected):
    assert render(source) == expected


def test_date_of_today():
    before = datetime.now().strftime("%d %b %Y")
    assert render("{{ strftime_now('%d %b %Y') }}") in (before, datetime.now().strftime("%d %b %Y"))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for i in range(10**7) %}{% endfor %}", "powers"),
        ("{% for i in range(9999999) %}{% endfor %}", "loops take more than 1000000 steps"),
        ("{% for i in range(2000) %}{% for j in range(2000) %}{% endfor %}{% endfor %}", "loops take more than"),
        ("{% for i in range(99999999999999999999) %}{% endfor %}", "too large"),
        ("{{ 'x' * 99999999 }}", "repetition"),
        ("{{ 99999999 * [1] }}", "repetition"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% set s = 'x' * 1000000 %}{% for i in range(70) %}{{ s }}{% endfor %}", "longer than"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "not safe|unsafe"),
        ("{{ messages[0]['content'] + 1 }}", "concatenate"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages[5].content }}", "no element 5"),
        ("{{ '\\ud800' }}", "surrogates"),
    ],
)
def test_what_a_template_refuses_is_the_callers_error(source, words):
    with pytest.raises(InvalidArgument, match=rf"^messages: .*({words})") as caught:
        render(source)
    assert caught.value.field == "messages"


def test_template_that_is_none_names_its_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"m\.gguf: the chat template cannot be compiled"):
        load_chat_template(gguf_with(tmp_path, (STRING, "{% for %}")))


def gguf_with(tmp_path, value):
    metadata = byte_level_metadata()
    if value is not None:
        metadata["tokenizer.chat_template"] = value
    return open_checkpoint(str(write_gguf(tmp_path / "m.gguf", metadata)))


def test_gguf(tmp_path):
    template = load_chat_template(gguf_with(tmp_path, (STRING, "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}")))
    assert template.render(HELLO) == "<|end|>|<|end|>|"
    assert load_chat_template(gguf_with(tmp_path, None)) is None
    with pytest.raises(CheckpointError, match="must be a string"):
        load_chat_template(gguf_with(tmp_path, ([STRING], ["a"])))


def folder_with(tmp_path, jinja=None, **files):
    folder = write_folder(tmp_path / "m", None, **files)
    if jinja is not None:
        (folder / "chat_template.jinja").write_bytes(jinja)
    return open_checkpoint(str(folder))


@pytest.mark.parametrize(
    ("jinja", "files", "expected"),
    [
        (None, {"tokenizer_config": {"chat_template": "one {{ bos_token }}", "bos_token": "<b>"}}, "one <b>"),
        (b"two", {"tokenizer_config": {"chat_template": "one"}}, "two"),
        (None, {"chat_template": {"chat_template": "three"}}, "three"),
        (b"{{ eos_token }}", {"special_tokens_map": {"eos_token": {"content": "</s>"}}}, "</s>"),
        (
            None,
            {
                "tokenizer_config": {
                    "chat_template": [{"name": "x", "template": "a"}, {"name": "default", "template": "b"}]
                }
            },
            "b",
        ),
    ],
)
def test_places_in_a_folder(tmp_path, jinja, files, expected):
    assert load_chat_template(folder_with(tmp_path, jinja, **files)).render(HELLO) == expected


def test_folder_without_template(tmp_path):
    assert load_chat_template(folder_with(tmp_path)) is None
    assert load_chat_template(folder_with(tmp_path, tokenizer_config={"chat_template": []})) is None


def test_template_files_that_cannot_be_read(tmp_path):
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: cannot be read"):
        load_chat_template(folder_with(tmp_path / "a", b"\xff"))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template must be text, got int"):
        load_chat_template(folder_with(tmp_path / "b", tokenizer_config={"chat_template": 5}))
    checkpoint = folder_with(tmp_path / "c")
    (checkpoint.path / "tokenizer_config.json").write_text(json.dumps([1]))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: must hold a JSON object"):
        load_chat_template(checkpoint)


def test_what_follows_an_answer_in_the_packaged_model():
    """Laid out after an answer it is what the whole conversation has there."""
    template = load_chat_template(open_checkpoint("smollm2"))
    more = [{"role": "user", "content": "And {{ then }}?"}]
    whole = template.render([*HELLO, {"role": "assistant", "content": "Hi!"}, *more])
    assert template.render_after_answer(more) == whole.partition("Hi!")[2]
    assert template.render_after_answer(more).startswith("<|im_end|>\n<|im_start|>user\nAnd {{ then }}?")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[-1].content }}",
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
    ],
)
def test_a_template_that_changes_answers_cannot_go_on_from_them(source):
    with pytest.raises(InvalidArgument, match="send the whole conversation") as caught:
        ChatTemplate(source, {}, "test").render_after_answer(HELLO)
    assert caught.value.field == "append"


def test_the_stand_in_may_be_said():
    template = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}", {}, "test")
    assert template.render_after_answer([{"role": "user", "content": STAND_IN}]) == f"][{STAND_IN}]"
