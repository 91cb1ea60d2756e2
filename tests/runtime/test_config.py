"""Configuration: sources, their order, types, and refusals that say what is wrong and where."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from runtime import config as configuration
from runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Base:
    """What a base class adds."""

    model: str = field(metadata={"group": "Model"})
    """What to serve, 100% of it."""


@dataclass(frozen=True, slots=True)
class Example(Base):
    """One field of every type."""

    port: int = field(default=5, metadata={"group": "Network", "min": 0, "max": 65535})
    """A port,
    on two lines."""
    rate: float = field(default=1.0, metadata={"min": 0})
    """A rate."""
    verbose: bool = False
    """Whether to talk."""
    role: Literal["decode", "mixed"] = "decode"
    """A role."""
    names: tuple[str, ...] = ("a",)
    """Names."""
    folder: Path = Path("/tmp")
    """A folder."""
    limit: int | None = None
    """A limit."""
    level: str = field(default="low", metadata={"flag": "--how-high", "choices": ["low", "high"]})
    """A level."""
    count: int = field(default=1, metadata={"aliases": ("--number", "--num")})
    """A count."""
    report: str | None = field(default=None, metadata={"bare": "-"})
    """A file."""
    secret_fd: int | None = field(default=None, metadata={"hidden": True})
    """Not for people."""


def load(*argv: str, env: dict[str, str] | None = None, cls: type[Any] = Example) -> Any:
    return configuration.load(cls, argv, prog="example", description="An example.", env=env or {})


def test_defaults_hold_where_nothing_is_given() -> None:
    assert load("--model", "m") == Example("m")


def test_each_source_beats_the_one_before(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('model = "file"\nport = 1\nrate = 1\nlimit = 1\n')
    env = {"BATON_PORT": "2", "BATON_RATE": "2", "BATON_LIMIT": "none"}
    loaded = load("--config", str(file), "--rate", "3", env=env)
    assert (loaded.model, loaded.port, loaded.rate, loaded.limit) == ("file", 2, 3.0, None)


@pytest.mark.parametrize(
    ("flag", "name", "expected"),
    [
        ("--port=0", "port", 0),
        ("--rate=1e-3", "rate", 0.001),
        ("--verbose", "verbose", True),
        ("--no-verbose", "verbose", False),
        ("--role=mixed", "role", "mixed"),
        ("--names=x, y,z", "names", ("x", "y", "z")),
        ("--names=", "names", ()),
        ("--folder=/a/b", "folder", Path("/a/b")),
        ("--limit=7", "limit", 7),
        ("--limit=None", "limit", None),
        ("--how-high=high", "level", "high"),
        ("--count=2", "count", 2),
        ("--number=3", "count", 3),
        ("--num=4", "count", 4),
        ("--report", "report", "-"),
        ("--report=file", "report", "file"),
    ],
)
def test_flags_of_every_type(flag: str, name: str, expected: object) -> None:
    assert getattr(load("--model=m", flag), name) == expected


@pytest.mark.parametrize("word", ["true", "1", "YES", "on"])
def test_words_for_true(word: str) -> None:
    assert load("--model=m", env={"BATON_VERBOSE": word}).verbose is True


@pytest.mark.parametrize(
    ("argv", "env", "words"),
    [
        (["--model=m", "--port=x"], {}, ["--port", "'x'", "a whole number, at least 0 and at most 65535"]),
        (["--model=m", "--port=65536"], {}, ["--port", "65536"]),
        (["--model=m", "--port=-1"], {}, ["--port", "-1"]),
        (["--model=m", "--port=1.5"], {}, ["--port", "'1.5'"]),
        (["--model=m", "--rate=nan"], {}, ["--rate", "a number"]),
        (["--model=m", "--rate=inf"], {}, ["--rate", "a number"]),
        (["--model=m", "--role=king"], {}, ["--role", "'king'", "decode or mixed"]),
        (["--model=m", "--how-high=middle"], {}, ["--how-high", "low or high"]),
        (["--model=m", "--names=a,,b"], {}, ["--names", "words separated by commas"]),
        (["--model=m", "--limit=many"], {}, ["--limit", "(or none)"]),
        (["--model=m"], {"BATON_VERBOSE": "perhaps"}, ["BATON_VERBOSE", "'perhaps'", "true or false"]),
        (["--model=m"], {"BATON_PORT": ""}, ["BATON_PORT", "''"]),
        (["--model=m", "--prot=1"], {}, ["--prot=1", "example --help"]),
        (["--model=m", "stray"], {}, ["stray"]),
        (["--mod=m"], {}, ["--mod=m"]),
        (["--model=m", "--number=x"], {}, ["--count", "'x'", "a whole number"]),
        ([], {}, ["--model", "BATON_MODEL", "text"]),
        (["--model=m", "--config=/nonexistent.toml"], {}, ["/nonexistent.toml", "cannot be read"]),
    ],
)
def test_refusals_name_source_value_and_what_is_accepted(
    argv: list[str], env: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*argv, env=env)
    assert [word for word in words if word not in caught.value.message] == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("prot = 1", ["unknown key 'prot'", "did you mean 'port'?"]),
        ("zzzzzz = 1", ["unknown key 'zzzzzz'", "known: model, port"]),
        ('port = "1"', ["port", "'1'", "a whole number"]),
        ("port = true", ["port", "True"]),
        ("port = 70000", ["port", "70000"]),
        ("rate = nan", ["rate", "a number"]),
        ("verbose = 1", ["verbose", "true or false"]),
        ('names = "a,b"', ["names", "words separated by commas"]),
        ('names = ["a,b"]', ["names"]),
        ("names = [1]", ["names"]),
        ('role = "king"', ["role", "decode or mixed"]),
        ("model = 5", ["model", "text"]),
        ("[section]\nport = 1", ["unknown key 'section'"]),
        ("port = ", ["cannot be read"]),
    ],
)
def test_a_file_is_as_strict_as_flags(tmp_path: Path, content: str, words: list[str]) -> None:
    file = tmp_path / "c.toml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load("--model=m", f"--config={file}")
    assert [word for word in [str(file), *words] if word not in caught.value.message] == []


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(b'model = "\xff"')
    with pytest.raises(ConfigError, match="cannot be read"):
        load(f"--config={file}")


def test_a_file_gives_every_type(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        'model = "m"\nport = 1\nrate = 2\nverbose = true\nrole = "mixed"\nnames = ["x", "y"]\nfolder = "/f"\n'
        'limit = "none"\nlevel = "high"\n'
    )
    expected = Example("m", 1, 2.0, True, "mixed", ("x", "y"), Path("/f"), None, "high")
    assert load(f"--config={file}") == expected


def test_other_variables_are_left_alone() -> None:
    assert load("--model=m", env={"BATON_OF_ANOTHER_PROCESS": "?", "PORT": "9"}) == Example("m")


@pytest.mark.parametrize(
    "value",
    [
        Example("m"),
        Example("-m", 7, 0.1, True, "mixed", (), Path("x y"), 3, "high", 5, "r", 4),
        Example("a=b", names=("x", "--y")),
    ],
)
def test_to_argv_builds_the_same_value_whatever_the_environment_says(value: Example) -> None:
    env = {"BATON_PORT": "1", "BATON_LIMIT": "1", "BATON_VERBOSE": "true", "BATON_NAMES": "q", "BATON_SECRET_FD": "8"}
    assert load(*configuration.to_argv(value), env=env) == value


@dataclass(frozen=True, slots=True)
class Positional:
    """A field without a flag."""

    text: str = field(metadata={"positional": True})
    """The text."""
    port: int = 1
    """A port."""


def test_positional_fields() -> None:
    assert load("hello", "--port", "2", cls=Positional) == Positional("hello", 2)
    assert load(*configuration.to_argv(Positional("--odd", 3)), cls=Positional) == Positional("--odd", 3)
    with pytest.raises(ConfigError, match="a value is needed for TEXT"):
        load(cls=Positional)


def test_help_shows_groups_docstrings_defaults_and_variables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    for words in ["Model: --model", "What to serve, 100% of it. (required; env BATON_MODEL)", "Network: --port INT"]:
        assert words in text
    assert "A port, on two lines. (default: 5; env BATON_PORT)" in text
    assert "{decode,mixed}" in text and "Off: --no-verbose" in text and "(default: a; env BATON_NAMES)" in text
    assert "Not for people" not in text and "secret" not in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load("--version")
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"example {configuration.version()}\n"


def test_a_loaded_value_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load("--model=m").port = 6


def test_load_or_exit_says_it_in_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATON_MODEL", raising=False)
    with pytest.raises(SystemExit) as caught:
        configuration.load_or_exit(Example, ["--port=x"], prog="example", description="")
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("example: --port: 'x' is not accepted")


def test_a_list_in_several_parts_is_one_list() -> None:
    assert load("--model=m", "--names=x,y", "--names", "z").names == ("x", "y", "z")
    assert load("--model=m", "--names=z", env={"BATON_NAMES": "x"}).names == ("z",), "other sources are replaced"
