"""Configuration of a process: one frozen dataclass, filled from defaults, a TOML file, the environment and flags.

Owns the only read of the environment and of configuration files. A field's type decides what is accepted, the
docstring line under it is its help text, and `field(metadata={...})` may add `flag` ("--name"), `group` (help
section), `choices`, `min`, `max`, `positional` (True: no flag), `hidden` (True: left out of --help), `aliases` (further
flags), `bare` (what the flag stands for when no value follows) and `url` (True: as a flag it may hold no password).
Later sources win: default < file (`--config FILE`) < environment (`BATON_<FIELD>`) < flag. Nothing is guessed: an
unknown key, an unknown flag or a value of the wrong shape is a ConfigError that names source, key, value and what is
accepted. Other BATON_ variables are left alone, because processes of different roles share one environment.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import importlib.metadata
import inspect
import math
import os
import sys
import textwrap
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from runtime.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")

ENVIRONMENT_PREFIX = "BATON_"
DISTRIBUTION = "baton-llm"
TRUE_WORDS = ("true", "1", "yes", "on")
FALSE_WORDS = ("false", "0", "no", "off")


@dataclass(frozen=True, slots=True)
class Option:
    """One field of a configuration class as the loader sees it."""

    name: str
    """The field's name; also its key in a file."""
    kind: type
    """str, int, float, bool, Path or tuple (of str)."""
    optional: bool
    """Whether None, written "none", is accepted."""
    choices: tuple[str, ...]
    """Accepted words; empty: any."""
    minimum: float | None
    """Smallest number accepted."""
    maximum: float | None
    """Largest number accepted."""
    default: Any
    """MISSING where a value must be given."""
    flag: str | None
    """None: given by position."""
    aliases: tuple[str, ...]
    """Other flags for the same."""
    bare: str | None
    """The value of the flag alone; None: it needs one."""
    group: str
    """Section of --help."""
    hidden: bool
    """Left out of --help."""
    is_url: bool
    """Whether a password could be in it, which may not stand on a command line."""
    help: str
    """The docstring line."""

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def accepted(self) -> str:
        """What a value may be, for error messages."""
        if self.choices:
            words = " or ".join(self.choices)
        elif self.kind is tuple:
            words = "words separated by commas"
        elif self.kind is bool:
            words = "true or false"
        else:
            words = {str: "text", int: "a whole number", float: "a number", Path: "a path"}[self.kind]
        bounds = [f"at least {self.minimum:g}"] if self.minimum is not None else []
        bounds += [f"at most {self.maximum:g}"] if self.maximum is not None else []
        words = ", ".join([words, " and ".join(bounds)]) if bounds else words
        return f"{words} (or none)" if self.optional else words


def load(
    cls: type[Config],
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    env: Mapping[str, str] | None = None,
) -> Config:
    """Builds `cls` from all sources; `argv` is without the program's name, `env` defaults to the process's.

    `--help` and `--version` print and raise SystemExit(0). Raises ConfigError for everything that cannot be used.
    """
    environment = os.environ if env is None else env
    options = options_of(cls)
    given = vars(_parser(options, prog, description).parse_args(list(argv)))
    values: dict[str, Any] = {}
    path = given.pop("config", None)
    if path is not None:
        values.update(_read_file(Path(path), options))
    for option in options:
        if option.variable in environment:
            values[option.name] = parse_text(option, environment[option.variable], f"environment {option.variable}")
        if option.name in given:
            if option.is_url:
                check_no_password(given[option.name], option.flag or option.name.upper())
            values[option.name] = parse_text(option, given[option.name], option.flag or option.name.upper())
    missing = [option for option in options if option.default is MISSING and option.name not in values]
    if missing:
        places = "; ".join(f"{o.flag or o.name.upper()} (or {o.variable}): {o.accepted}" for o in missing)
        raise ConfigError(f"a value is needed for {places}")
    return cls(**values)


def to_argv(config: DataclassInstance) -> list[str]:
    """The flags that make `load` build `config` again, whatever file or environment says; for child processes."""
    positional: list[str] = []
    flags: list[str] = []
    for option in options_of(type(config)):
        value = getattr(config, option.name)
        if option.kind is bool and value is not None and option.flag is not None:
            flags.append(option.flag if value else "--no-" + option.flag.removeprefix("--"))
            continue
        text = "none" if value is None else ",".join(value) if isinstance(value, tuple) else str(value)
        if option.flag is None:
            positional.append(text)
        else:
            flags.append(f"{option.flag}={text}")
    return flags + (["--", *positional] if positional else [])


def options_of(cls: type[DataclassInstance]) -> list[Option]:
    """The options of a configuration class, in order of its fields, those of base classes first."""
    hints = typing.get_type_hints(cls)
    help_lines = field_docstrings(cls)
    return [_option(field, hints[field.name], help_lines.get(field.name, "")) for field in dataclasses.fields(cls)]


def field_docstrings(cls: type) -> dict[str, str]:
    """The string under each annotated field of `cls` and its bases, by field name, joined to one line."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, body.body[1:], strict=False):
            if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
                continue
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                found[statement.target.id] = " ".join(str(following.value.value).split())
    return found


def parse_text(option: Option, text: str, source: str) -> Any:
    """The value that `text` from a flag or variable stands for; ConfigError names `source`."""
    if option.optional and text.lower() == "none":
        return None
    try:
        value = _READERS[option.kind](text)
    except ValueError:
        raise _refusal(option, text, source) from None
    return _checked(option, value, source)


def _read_bool(text: str) -> bool:
    if text.lower() in TRUE_WORDS:
        return True
    if text.lower() in FALSE_WORDS:
        return False
    raise ValueError(text)


def _read_words(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(",")) if text.strip() else ()
    if "" in words:
        raise ValueError(text)
    return words


_READERS: dict[type, Callable[[str], Any]] = {
    str: str,
    int: int,
    float: float,
    bool: _read_bool,
    Path: Path,
    tuple: _read_words,
}


def _checked(option: Option, value: Any, source: str) -> Any:
    words = value if isinstance(value, tuple) else (value,)
    if option.choices and any(word not in option.choices for word in words):
        raise _refusal(option, value, source)
    if option.kind in (int, float):
        too_small = option.minimum is not None and value < option.minimum
        too_large = option.maximum is not None and value > option.maximum
        if (isinstance(value, float) and not math.isfinite(value)) or too_small or too_large:
            raise _refusal(option, value, source)
    return value


def _refusal(option: Option, value: object, source: str) -> ConfigError:
    return ConfigError(f"{source}: {value!r} is not accepted; give {option.accepted}")


def _read_file(path: Path, options: list[Option]) -> dict[str, Any]:
    """Values from a TOML file of the fields' names; no other key, every value of its field's type."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot be read: {error}") from None
    by_name = {option.name: option for option in options}
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key not in by_name:
            raise ConfigError(f"{path}: unknown key {key!r}; {_nearest(key, by_name)}")
        values[key] = _from_toml(by_name[key], value, f"{path}: {key}")
    return values


def _from_toml(option: Option, value: object, source: str) -> Any:
    """TOML has types: they must be the field's. A whole number will do for a float, a string for a path."""
    if option.kind is tuple and isinstance(value, list):
        if all(isinstance(word, str) and word and "," not in word for word in value):
            return _checked(option, tuple(value), source)
        raise _refusal(option, value, source)
    if option.kind is float and type(value) is int:
        return _checked(option, float(value), source)
    if option.kind is Path and isinstance(value, str):
        return Path(value)
    if option.optional and value == "none":
        return None
    if type(value) is not option.kind:
        raise _refusal(option, value, source)
    return _checked(option, value, source)


def _nearest(name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def _option(field: dataclasses.Field[Any], hint: Any, help_line: str) -> Option:
    optional, kind, choices = _kind_of(field.name, hint)
    metadata = field.metadata
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return Option(
        name=field.name,
        kind=kind,
        optional=optional,
        choices=tuple(metadata.get("choices", choices)),
        minimum=metadata.get("min"),
        maximum=metadata.get("max"),
        default=default,
        flag=None if metadata.get("positional") else metadata.get("flag", "--" + field.name.replace("_", "-")),
        aliases=tuple(metadata.get("aliases", ())),
        bare=metadata.get("bare"),
        group=metadata.get("group", "Options"),
        hidden=metadata.get("hidden", False),
        is_url=metadata.get("url", False),
        help=help_line,
    )


def _kind_of(name: str, hint: Any) -> tuple[bool, type, tuple[str, ...]]:
    """(None accepted, kind, choices) of a field's type."""
    optional = False
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        assert len(members) == 1, f"{name}: unions other than X | None are not supported"
        optional, hint = True, members[0]
    if typing.get_origin(hint) is Literal:
        return optional, str, tuple(typing.get_args(hint))
    if hint == tuple[str, ...]:
        return optional, tuple, ()
    assert hint in _READERS, f"{name}: {hint} is not a configuration type"
    return optional, hint, ()


class _Parser(argparse.ArgumentParser):
    """Reports errors as ConfigError where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


class _Joined(argparse.Action):
    """A list given in several parts is one list: what was given first is not lost."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: object, flag: object = None) -> None:
        before = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, f"{before},{values}" if before else values)


def _parser(options: list[Option], prog: str, description: str) -> argparse.ArgumentParser:
    parser = _Parser(prog=prog, description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"{prog} {version()}")
    parser.add_argument("--config", metavar="FILE", help="TOML file with any of these options, by field name")
    groups: dict[str, Any] = {}
    for option in options:
        if option.flag is None:
            parser.add_argument(option.name, nargs="?", metavar=option.name.upper(), help=_help(option))
            continue
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        group = groups[option.group]
        if option.kind is bool:
            group.add_argument(option.flag, dest=option.name, action="store_const", const="true", help=_help(option))
            negative = "--no-" + option.flag.removeprefix("--")
            group.add_argument(negative, dest=option.name, action="store_const", const="false", help=argparse.SUPPRESS)
        else:
            metavar = "{" + ",".join(option.choices) + "}" if option.choices else option.kind.__name__.upper()
            metavar = "A,B,..." if option.kind is tuple and not option.choices else metavar
            bare: dict[str, Any] = {} if option.bare is None else {"nargs": "?", "const": option.bare}
            if option.kind is tuple and option.bare is None:
                bare = {"action": _Joined}
            flags = (option.flag, *option.aliases)
            group.add_argument(*flags, dest=option.name, metavar=metavar, help=_help(option), **bare)
    return parser


def _help(option: Option) -> str:
    if option.hidden:
        return argparse.SUPPRESS
    shown = ",".join(option.default) if isinstance(option.default, tuple) else option.default
    default = "required" if option.default is MISSING else f"default: {shown if shown != '' else 'empty'}"
    line = f"{option.help} ({default}; env {option.variable})"
    if option.kind is bool and option.flag is not None:
        line += f" Off: --no-{option.flag.removeprefix('--')}"
    return line.replace("%", "%%")


def check_no_password(url: str, source: str) -> None:
    """ConfigError, without repeating it, for a URL with a password: command lines are for all to see."""
    if ":" in url.partition("://")[2].rpartition("@")[0]:
        raise ConfigError(f"{source}: there is a password in it, which process lists would show; put it into a file")


def version() -> str:
    """The installed version of this distribution."""
    return importlib.metadata.version(DISTRIBUTION)


def load_or_exit(cls: type[Config], argv: Sequence[str], *, prog: str, description: str) -> Config:
    """As `load`, for a process's entry: what cannot be used is said on standard error, and the process ends with 2."""
    try:
        return load(cls, argv, prog=prog, description=description)
    except ConfigError as error:
        sys.stderr.write(f"{prog}: {error.message}\n")
        raise SystemExit(2) from None
