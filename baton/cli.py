"""The `baton` command: finds the subcommand, loads its options, runs it.

Owns the list of subcommands and the translation of errors into one line on standard error and an exit code: 2 for what
the user can correct on the command line, 1 for everything else. Each subcommand imports what it needs when it runs.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runtime import config as configuration
from runtime.errors import BatonError, ConfigError


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand."""

    name: str
    """What the user types."""
    group: str
    """Section of --help."""
    summary: str
    """A line for --help."""
    run: Callable[[Sequence[str]], int]
    """Takes the remaining arguments, answers the exit code."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry of the `baton` script; ends the process."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """Runs a command line; the exit code."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else 2
    name = "version" if argv[0] == "--version" else argv[0]
    command = next((command for command in COMMANDS if command.name == name), None)
    try:
        if command is None:
            known = ", ".join(command.name for command in COMMANDS)
            print(f"baton: no subcommand {name!r}; there are: {known}", file=sys.stderr)
            return 2
        return command.run(argv[1:])
    except BatonError as error:
        print(f"baton {name}: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has enough. Nothing may be flushed to it at exit.
        sys.stdout = None
        return 1
    except OSError as error:
        # A full disk behind standard output, for example; what is left in its buffer cannot be written at exit either.
        sys.stdout = None
        print(f"baton {name}: cannot read or write: {error}", file=sys.stderr)
        return 1


def usage() -> str:
    """The text of `baton --help`."""
    lines = [
        "usage: baton COMMAND [options]",
        "",
        "Serves language models with prefill and decode on separate workers.",
    ]
    for group in dict.fromkeys(command.group for command in COMMANDS):
        lines += ["", f"{group}:"]
        lines += [f"  {command.name:<12} {command.summary}" for command in COMMANDS if command.group == group]
    return "\n".join([*lines, "", "baton COMMAND --help shows the options of a command."])


def _serve(argv: Sequence[str]) -> int:
    from baton.options import ServeConfig
    from baton.serving import serve

    description = "Starts Redis, a router, prefill and decode workers on this machine and keeps them running."
    config = configuration.load(ServeConfig, argv, prog="baton serve", description=description)
    return asyncio.run(serve(config, sys.stdout))


def _chat(argv: Sequence[str]) -> int:
    from baton import terminal
    from baton.options import ChatConfig

    description = "Talks with the served model, one line a turn."
    config = configuration.load(ChatConfig, argv, prog="baton chat", description=description)
    return terminal.chat(config, sys.stdin, sys.stdout, sys.stderr)


def _generate(argv: Sequence[str]) -> int:
    from baton import terminal
    from baton.options import GenerateConfig

    description = "Streams the model's answer to one prompt."
    config = configuration.load(GenerateConfig, argv, prog="baton generate", description=description)
    return terminal.generate(config, sys.stdout, sys.stderr)


def _end_session(argv: Sequence[str]) -> int:
    from baton import terminal
    from baton.options import EndSessionConfig

    description = "Forgets a session and frees its KV at all workers."
    config = configuration.load(EndSessionConfig, argv, prog="baton end-session", description=description)
    return terminal.end_session(config, sys.stdout)


def _workers(argv: Sequence[str]) -> int:
    from baton import terminal
    from baton.options import WorkersConfig

    description = "Shows the workers as a router sees them."
    config = configuration.load(WorkersConfig, argv, prog="baton workers", description=description)
    return terminal.workers(config, sys.stdout)


def _trace(argv: Sequence[str]) -> int:
    from baton.options import TraceConfig
    from baton.trace_view import show_traces

    description = "Shows where the time of recent requests went, or of one. The router keeps them with --trace."
    config = configuration.load(TraceConfig, argv, prog="baton trace", description=description)
    return show_traces(config, sys.stdout)


def _drain(argv: Sequence[str]) -> int:
    from baton import terminal
    from baton.options import DrainConfig

    description = "Empties a worker, and may start it again in another role. No request fails for it."
    config = configuration.load(DrainConfig, argv, prog="baton drain", description=description)
    return terminal.drain(config, sys.stdout)


def _token(argv: Sequence[str]) -> int:
    from baton import terminal
    from baton.options import TokenConfig

    description = "Draws a token for a tenant: the token on standard output, its line for --tenants-file beside it."
    config = configuration.load(TokenConfig, argv, prog="baton token", description=description)
    return terminal.token(config, sys.stdout, sys.stderr)


def _demo(argv: Sequence[str]) -> int:
    from baton.demo import DemoConfig, demo

    description = "Starts everything on free ports, asks one question, shows who answered, and stops."
    config = configuration.load(DemoConfig, argv, prog="baton demo", description=description)
    return asyncio.run(demo(config, sys.stdout))


def _bench(argv: Sequence[str]) -> int:
    from baton.bench.command import bench
    from baton.bench.options import BenchConfig

    description = "Puts load on a service and prints what its clients see of it."
    config = configuration.load(BenchConfig, argv, prog="baton bench", description=description)
    return asyncio.run(bench(config, sys.stdout))


def _profile(argv: Sequence[str]) -> int:
    from baton.profiling.command import profile
    from baton.profiling.options import ProfileConfig

    description = "Shows how near the steps of workers come to what their devices can do, and what bounds them."
    config = configuration.load(ProfileConfig, argv, prog="baton profile", description=description)
    return asyncio.run(profile(config, sys.stdout))


def _version(argv: Sequence[str]) -> int:
    if argv in (["-h"], ["--help"]):
        print("usage: baton version\n\nPrints the version; there are no options.")
        return 0
    if argv:
        raise ConfigError("takes no options")
    print(f"baton {configuration.version()}")
    return 0


COMMANDS = (
    Command("serve", "Serving", "start the whole system on this machine", _serve),
    Command("token", "Serving", "draw a token for a tenant", _token),
    Command("demo", "Serving", "start it, ask one question, show who answered, stop", _demo),
    Command("drain", "Serving", "empty a worker, or give it another role", _drain),
    Command("chat", "Asking", "talk with the served model", _chat),
    Command("generate", "Asking", "stream the answer to one prompt", _generate),
    Command("end-session", "Asking", "forget a session and free its KV", _end_session),
    Command("workers", "Looking", "show the workers and their load", _workers),
    Command("trace", "Looking", "show where a request's time went", _trace),
    Command("bench", "Looking", "put load on a service and measure it", _bench),
    Command("profile", "Looking", "show what bounds the steps of workers", _profile),
    Command("version", "Looking", "show the version", _version),
)


if __name__ == "__main__":
    main()
