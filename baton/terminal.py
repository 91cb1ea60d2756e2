"""`baton generate`, `chat`, `end-session`, `workers`, `drain` and `token`: answers and tables on a terminal or a pipe.

Owns formatting alone. Text goes to standard output as it arrives, everything else to standard error, so that output
can be piped on.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from typing import TextIO

import grpc.aio

from baton.answers import Finish, Sampling
from baton.client import Client
from baton.conversation import Conversation
from baton.options import (
    AnswerConfig,
    ChatConfig,
    DrainConfig,
    EndSessionConfig,
    GenerateConfig,
    TokenConfig,
    WorkersConfig,
)
from protos import inference_pb2, worker_pb2, worker_pb2_grpc
from router.tenants import check_name, hash_token
from runtime import rpc
from runtime.doors import open_cluster
from runtime.errors import BatonError, Unauthenticated

TOKEN_BYTES = 32
QUIT_WORDS = ("/quit", "/exit")


def generate(config: GenerateConfig, output: TextIO, errors: TextIO) -> int:
    """Streams the answer to one prompt; the exit code."""
    prompt = sys.stdin.read() if config.prompt == "-" else config.prompt
    with Client(config.address, timeout_s=config.timeout_s, **config.credentials()) as client:
        messages = [{"role": "user", "content": prompt}] if config.chat else None
        finish = None
        for chunk in client.generate(
            None if config.chat else prompt,
            messages=messages,
            session_id=config.session_id,
            append=config.append,
            priority=config.priority,
            **sampling_of(config),
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
    num_failed = 0
    with Client(config.address, timeout_s=config.timeout_s, **config.credentials()) as client:
        if interactive:
            errors.write(f"{client.get_model().model} at {config.address}; {QUIT_WORDS[0]} or Ctrl-D ends\n")
        conversation = Conversation(client, system=config.system, priority=config.priority)
        while True:
            if interactive:
                output.write("> ")
                output.flush()
            line = source.readline()
            if not line or line.strip() in QUIT_WORDS:
                break
            if line.strip():
                num_failed += not _answer(conversation, line.strip(), sampling_of(config), output, errors)
        conversation.end()
    return 1 if num_failed and not interactive else 0


def _answer(conversation: Conversation, question: str, sampling: Sampling, output: TextIO, errors: TextIO) -> bool:
    """One turn; whether it was answered."""
    try:
        for chunk in conversation.say(question, **sampling):
            output.write(chunk.text)
            output.flush()
    except BatonError as error:
        errors.write(f"\nbaton chat: {error.message}\n")
        return False
    output.write("\n")
    return True


def end_session(config: EndSessionConfig, output: TextIO) -> int:
    """Ends a session; the exit code."""
    with Client(config.address, timeout_s=config.timeout_s, **config.credentials()) as client:
        existed = client.end_session(config.session_id)
    output.write("ended\n" if existed else "nothing was known of it\n")
    return 0


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


def drain(config: DrainConfig, output: TextIO) -> int:
    """Empties a worker, by a call to the worker itself; the exit code."""
    role = (config.next_role or "unspecified").upper()
    request = worker_pb2.DrainRequest(timeout_ms=round(1000 * config.drain_timeout_s), next_role=f"WORKER_ROLE_{role}")
    answer = asyncio.run(_drain(config, request))
    then = f", starting again as {config.next_role}" if config.next_role else ", and it takes nothing any more"
    output.write(f"{config.worker} is empty, {answer.num_evicted} requests go on elsewhere{then}\n")
    return 0


async def _drain(config: DrainConfig, request: worker_pb2.DrainRequest) -> worker_pb2.DrainResponse:
    async with rpc.create_channel(config.worker, open_cluster(config).calling) as channel:
        try:
            answer: worker_pb2.DrainResponse = await worker_pb2_grpc.WorkerStub(channel).Drain(request)
        except grpc.aio.AioRpcError as error:
            failure = rpc.error_from_call(error)
            if isinstance(failure, Unauthenticated):
                known = "the file that the cluster's processes were given; `baton serve` says at its start where it is"
                raise Unauthenticated(f"{failure.message}; --cluster-secret-file: {known}") from None
            raise failure from None
    return answer


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
    drafted = f" ({usage.accepted_tokens} of {usage.drafted_tokens} drafts)" if usage.drafted_tokens else ""
    return (
        f"prefilled by {served.prefill_worker_id}, decoded by {served.decode_worker_id}\n"
        f"time to first token {timing.time_to_first_token_ms:.1f} ms, "
        f"inter-token latency {timing.inter_token_latency_ms:.1f} ms, {moved}\n"
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), "
        f"{usage.completion_tokens} generated{drafted}; finish: {finish.reason}"
    )
