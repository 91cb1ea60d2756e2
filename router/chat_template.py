"""Lays a conversation out as the text the model was trained on, by the chat template that comes with the model.

Owns finding the template and running it in jinja2's sandbox with the names that Hugging Face gives to templates. A
template is part of a model and trusted no further than that: it reaches no attributes of Python, changes nothing, and
loops, repetition and output are bounded. What it cannot lay out is the caller's error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from jinja2.exceptions import SecurityError

from router.tokenizer import special_token_texts
from runtime.checkpoint import Checkpoint, read_json_object
from runtime.errors import CheckpointError, InvalidArgument

MAX_RANGE_TOTAL = 1_000_000
"""Steps that all `range` loops of one rendering may take together."""
MAX_REPEATED_LENGTH = 1_000_000
"""Length that `*` may give a string or list."""
MAX_RENDERED_CHARS = 64 << 20
"""Length of a rendered conversation."""
STAND_IN = "baton-stands-in-for-what-was-said"
"""Text of an earlier question and of its answer, where only what follows them is laid out."""


class ChatTemplate:
    """A compiled chat template. Immutable."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str) -> None:
        """`special_tokens` are variables of the template: {"bos_token": "<s>"}. Raises CheckpointError naming `origin`
        when `source` is not a template."""
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise CheckpointError(f"{origin}: the chat template cannot be compiled: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of `messages`, each with "role" and "content"; with `add_generation_prompt` it ends where the
        assistant's answer begins. Raises InvalidArgument when the template refuses them."""
        variables: dict[str, Any] = {
            **self._special_tokens,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
            "range": _RangeBudget().range,
        }
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > MAX_RENDERED_CHARS:
                    raise jinja2.TemplateRuntimeError(f"the text is longer than {MAX_RENDERED_CHARS} characters")
            text = "".join(pieces)
            text.encode()  # An escape in a template can write half a surrogate pair.
        except Exception as error:  # A template may raise whatever an expression can: TypeError, KeyError, ...
            reason = str(error) or type(error).__name__
            raise InvalidArgument("messages", f"the model's chat template refuses them: {reason}") from error
        return text

    def render_after_answer(self, messages: Sequence[Mapping[str, str]]) -> str:
        """What follows the text of an answer when the conversation goes on with `messages`: the end of the answer, then
        as `render`. Raises InvalidArgument when the template refuses them, or does not repeat answers as they were."""
        earlier = [{"role": "user", "content": STAND_IN}, {"role": "assistant", "content": STAND_IN}]
        parts = self.render([*earlier, *messages]).split(STAND_IN, 2)
        if len(parts) != 3:
            raise InvalidArgument(
                "append",
                "the model's chat template does not go on from an answer as it was; send the whole conversation",
            )
        return parts[2]


def load_chat_template(checkpoint: Checkpoint) -> ChatTemplate | None:
    """The model's chat template; None where it has none. Raises CheckpointError naming the file.

    In a folder chat_template.jinja goes before tokenizer_config.json, and that before chat_template.json.
    """
    if checkpoint.gguf is not None:
        return _from_gguf(checkpoint, checkpoint.gguf.metadata)
    folder = checkpoint.path
    settings_path = folder / "tokenizer_config.json"
    settings = read_json_object(settings_path) if settings_path.exists() else {}
    map_path = folder / "special_tokens_map.json"
    texts = special_token_texts(read_json_object(map_path)) if map_path.exists() else {}
    texts.update(special_token_texts(settings))
    template_path = folder / "chat_template.jinja"
    if template_path.exists():
        try:
            return ChatTemplate(template_path.read_text(encoding="utf-8"), texts, str(template_path))
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{template_path}: cannot be read: {error}") from error
    older_path = folder / "chat_template.json"
    source = settings.get("chat_template")
    if source is None and older_path.exists():
        settings_path, source = older_path, read_json_object(older_path).get("chat_template")
    source = _default_of_several(source)
    if source is None:
        return None
    if not isinstance(source, str):
        raise CheckpointError(f"{settings_path}: chat_template must be text, got {type(source).__name__}")
    return ChatTemplate(source, texts, str(settings_path))


def _from_gguf(checkpoint: Checkpoint, metadata: Mapping[str, Any]) -> ChatTemplate | None:
    source = metadata.get("tokenizer.chat_template")
    if source is None:
        return None
    if not isinstance(source, str):
        raise CheckpointError(f'{checkpoint.path}: metadata key "tokenizer.chat_template" must be a string')
    tokens = metadata.get("tokenizer.ggml.tokens")
    texts = {}
    for key, name in (("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token"), ("padding", "pad_token")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(tokens, list) and isinstance(token_id, int) and 0 <= token_id < len(tokens):
            texts[name] = str(tokens[token_id])
    return ChatTemplate(source, texts, str(checkpoint.path))


def _default_of_several(source: Any) -> Any:
    """Some models give named templates: [{"name": "default", "template": ...}, ...]."""
    if not isinstance(source, list):
        return source
    named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
    return named.get("default")


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with repetition and powers bounded as well."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("powers are not available")
        for sequence, factor in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple) and isinstance(factor, int):
                length = len(sequence) * factor
                if length > MAX_REPEATED_LENGTH:
                    raise SecurityError(f"a repetition of {length} is over {MAX_REPEATED_LENGTH}")
        return super().call_binop(context, operator, left, right)


class _GenerationBlock(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's words for training; here its content counts."""

    tags = {"generation"}  # noqa: RUF012  (the name and kind that jinja2 wants)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _RangeBudget:
    """`range` for one rendering, in which nested loops share one bound."""

    def __init__(self) -> None:
        self._left = MAX_RANGE_TOTAL

    def range(self, *bounds: int) -> range:
        steps = range(*bounds)
        # len() itself fails on ranges past the machine's word size; then OverflowError says so.
        self._left -= len(steps)
        if self._left < 0:
            raise SecurityError(f"loops take more than {MAX_RANGE_TOTAL} steps")
        return steps


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes for HTML, which models have not seen in training."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateRuntimeError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
