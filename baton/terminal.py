"""`baton generate`, `baton chat`, `baton workers` and `baton token`: answers and tables on a terminal or a pipe.

Owns formatting alone. Text goes to standard output as it arrives, everything else to standard error, so that output
can be piped on.
"""

from __future__ import annotations

import secrets
import sys
from typing import TextIO

from baton.answers import Finish, Sampling
from baton.client import Client
from baton.options import AnswerConfig, ChatConfig, GenerateConfig, TokenConfig, WorkersConfig
from protos import inference_pb2
from router.tenants import check_name, hash_token
from runtime.errors import BatonError

TOKEN_BYTES = 32
QUIT_WORDS = ("/quit", "/exit")


def generate(config: GenerateConfig, output: TextIO, errors: TextIO) -> int:
    """Streams the answer to one prompt; the exit code."""
    prompt = sys.stdin.read() if config.prompt == "-" else config.prompt
    with Client(config.address, timeout_s=config.timeout_s, **config.credentials()) as client:
        messages = [{"role": "user", "content": prompt}] if config.chat else None
        finish = None
        for chunk in client.generate(
            None if config.chat else prompt, messages=messages, priority=config.priority, **sampling_of(config)
        ):
            output.write(chunk.text)
            output.flush()
            finish = chunk.finish or finish
    output.write("\n")
    if config.stats and finish is not None:
        errors.write(describe(finish) + "\n")
    return 0


def chat(config: ChatConfig, source: TextIO, output: TextIO, errors: TextIO) -> int:
    """A conversation, one line a turn, until end of input or /quit; the exit code.

    A turn that fails is taken back, so that the conversation can go on. From a pipe nobody sees that: the exit code is
    1 then.
    """
    interactive = source.isatty()
    messages = [{"role": "system", "content": config.system}] if config.system else []
    session_id, num_failed = secrets.token_hex(16), 0
    with Client(config.address, timeout_s=config.timeout_s, **config.credentials()) as client:
        if interactive:
            errors.write(f"{client.get_model().model} at {config.address}; {QUIT_WORDS[0]} or Ctrl-D ends\n")
        while True:
            if interactive:
                output.write("> ")
                output.flush()
            line = source.readline()
            if not line or line.strip() in QUIT_WORDS:
                break
            if line.strip():
                messages.append({"role": "user", "content": line.strip()})
                num_failed += not _answer(client, config, messages, session_id, output, errors)
        client.end_session(session_id)
    return 1 if num_failed and not interactive else 0


def _answer(
    client: Client,
    config: AnswerConfig,
    messages: list[dict[str, str]],
    session_id: str,
    output: TextIO,
    errors: TextIO,
) -> bool:
    """One turn; whether it was answered."""
    parts: list[str] = []
    try:
        for chunk in client.generate(
            messages=messages, session_id=session_id, priority=config.priority, **sampling_of(config)
        ):
            parts.append(chunk.text)
            output.write(chunk.text)
            output.flush()
    except BatonError as error:
        messages.pop()
        errors.write(f"\nbaton chat: {error.message}\n")
        return False
    output.write("\n")
    messages.append({"role": "assistant", "content": "".join(parts)})
    return True


def workers(config: WorkersConfig, output: TextIO) -> int:
    """A table of the workers as the router sees them; the exit code."""
    with Client(config.address, timeout_s=config.timeout_s, **config.credentials()) as client:
        statuses = client.workers()
    header = ["worker", "role", "state", "address", "running", "queued", "kv used", "kv cached", "kv total"]
    rows = [header, *(_row(status) for status in statuses)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        output.write("  ".join(cells).rstrip() + "\n")
    return 0


def token(config: TokenConfig, output: TextIO, errors: TextIO) -> int:
    """A new token, which is shown this once, and what a tenants file has of it; the exit code."""
    check_name(config.tenant)
    drawn = f"baton_{secrets.token_urlsafe(TOKEN_BYTES)}"
    output.write(drawn + "\n")
    errors.write(f'[{config.tenant}]\ntoken_sha256 = ["{hash_token(drawn)}"]\n')
    return 0


def _row(status: inference_pb2.WorkerStatus) -> list[str]:
    role = inference_pb2.WorkerRole.Name(status.role).removeprefix("WORKER_ROLE_").lower()
    state = inference_pb2.WorkerState.Name(status.state).removeprefix("WORKER_STATE_").lower()
    load = status.load
    counts = (load.num_running, load.num_queued, load.pool.used, load.pool.cached, load.pool.total)
    return [status.worker_id, role, state, status.address, *map(str, counts)]


def sampling_of(config: AnswerConfig) -> Sampling:
    """The sampling options that were given."""
    options = Sampling()
    for name in Sampling.__annotations__.keys() & type(config).__dataclass_fields__.keys():
        value = getattr(config, name)
        if value is not None:
            options[name] = value  # type: ignore[literal-required]
    return options


def describe(finish: Finish) -> str:
    """Workers, counts and durations in a few lines."""
    served, timing, usage = finish.served_by, finish.timing, finish.usage
    moved = f"{served.kv_bytes} KV bytes handed off by {served.transport}" if served.transport else "no KV handed off"
    return (
        f"prefilled by {served.prefill_worker_id}, decoded by {served.decode_worker_id}\n"
        f"time to first token {timing.time_to_first_token_ms:.1f} ms, "
        f"inter-token latency {timing.inter_token_latency_ms:.1f} ms, {moved}\n"
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), "
        f"{usage.completion_tokens} generated; finish: {finish.reason}"
    )
