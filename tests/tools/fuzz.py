"""Fuzzes every port of live processes: a router, workers and their KV, by strangers and by callers with a credential.

Run from the repository root: `python tests/tools/fuzz.py [NUM_MESSAGES] [SEED]`; a million by default, in minutes. It
starts `baton serve tracer` with tenants and a secret of its own. Strangers may get no answer whatever; who has a
credential may get none that hands over KV. Meanwhile honest requests must be answered right, and in the end every
process must be the one that was started and hold nothing. Exits 1 if anything of this is not so.
"""

from __future__ import annotations

import asyncio
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzzed import Corpus, Known, calls
from google.protobuf import message_factory
from google.protobuf.message import Message
from raw_http2 import PREFACE, Connection, ConnectionEnded

from baton import AsyncClient
from baton.options import ServeConfig
from baton.serving import RunningSystem, running
from baton.supervisor import Change
from engine import tracer
from engine.batch import SampleRow
from engine.request import SamplingParams
from protos import inference_pb2, worker_pb2, worker_pb2_grpc
from router.tenants import hash_token
from runtime.doors import Pass
from runtime.rpc import create_channel

SECRET, TOKEN = "the-secret-of-fuzzed-processes-01", "the-token-of-a-fuzzing-tenant-01"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
SILENT = ("/baton.v1.KVTransfer/Fetch", "/baton.v1.KVTransfer/Release", "/baton.v1.Decode/Finish")
"""Answer nothing to whoever does not know the id of an attempt."""
LINGERING = tuple(
    f"/baton.v1.{name}"
    for name in (
        "Inference/Generate",
        "Prefill/Run",
        "Decode/Run",
        "Decode/Attach",
        "KVTransfer/Fetch",
        "Worker/Watch",
        "Worker/Profile",
    )
)
"""May go on for as long as the caller stays or wants, if it has a credential."""
BY_DESIGN = ("/baton.v1.Worker/Drain",)
"""Does to a worker what a credential is for."""
JUNK_EVERY = 200
"""Batches between two connections of bytes that are no HTTP/2."""
MAX_GROWTH_BYTES = 128 * 2**20
"""What a process may grow by: pools, threads and what the allocator keeps, but nothing for each message."""
LIMIT_S = 10.0
PROMPT = tuple(b"The baton passes from one runner to the next.")


class Violation(Exception):
    """Something that must not happen did."""


@dataclass(frozen=True, slots=True)
class Target:
    """A port."""

    name: str
    """The process."""
    address: str
    """Where it listens."""
    token: str
    """What opens it."""
    files: tuple[Any, ...]
    """The generated modules whose services it has."""


@dataclass(slots=True)
class Tally:
    """What was sent and what came of it."""

    num_messages: Counter[str] = field(default_factory=Counter)
    """By target and kind of caller."""
    num_answered: Counter[str] = field(default_factory=Counter)
    """Calls that got data."""
    num_ended: int = 0
    """Connections that the server ended."""
    num_junk: int = 0
    """Connections that were no HTTP/2."""
    is_over: bool = False
    """Set to end it early: threads cannot be cancelled."""


def methods_of(target: Target, leaving_out: Sequence[str] = ()) -> dict[str, type[Message]]:
    """Every method of its services by path, with the class of its request."""
    found = {
        f"/{service.full_name}/{method.name}": message_factory.GetMessageClass(method.input_type)
        for file in target.files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    return {path: cls for path, cls in found.items() if path not in leaving_out}


def attack(target: Target, known: Known, num_messages: int, seed: int, is_stranger: bool, tally: Tally) -> None:
    """Sends so many messages to one port. Raises Violation for an answer that must not be."""
    rng = random.Random(seed)
    if is_stranger:
        methods = {**methods_of(target), REFLECTION: inference_pb2.GetModelRequest}
        tokens = [None, None, "", "x", target.token[:-1], target.token + "x", target.token.upper(), "é" * 20]
    else:
        methods, tokens = methods_of(target, BY_DESIGN), [target.token]
    corpus = Corpus(methods, known, rng)
    kind = f"{target.name}, {'no credential' if is_stranger else 'with a credential'}"
    num_sent = num_batches = 0
    connection = Connection(target.address)
    while num_sent < num_messages and not tally.is_over:
        batch = list(calls(corpus, tokens, rng, () if is_stranger else LINGERING))
        try:
            received = connection.exchange([call for _, call in batch])
        except ConnectionEnded:
            connection.close()
            connection, tally.num_ended = Connection(target.address), tally.num_ended + 1
            continue
        for (path, _), num_bytes in zip(batch, received, strict=True):
            if num_bytes and (is_stranger or path in SILENT):
                raise Violation(f"{target.name} gave {num_bytes} bytes to {kind} at {path} (seed {seed})")
            tally.num_answered[kind] += num_bytes > 0
        tally.num_messages[kind] += len(batch)
        num_sent += len(batch)
        num_batches += 1
        if num_batches % JUNK_EVERY == 1:
            junk(target.address, rng)
            tally.num_junk += 1
    connection.close()


def junk(address: str, rng: random.Random) -> None:
    """A connection of anything; whatever becomes of it."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as connection:
        connection.sendall(rng.choice((b"", PREFACE, PREFACE[:10], b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00")))
        connection.sendall(rng.randbytes(rng.choice((1, 9, 100, 5000))))


async def fuzz(num_messages: int, seed: int, report: Any = sys.stdout) -> Tally:
    """Starts the processes and fuzzes them; answers the tally. Raises Violation."""
    tally, started, died = Tally(), dict[str, int](), list[str]()

    def note(change: Change) -> None:
        if change.kind == "started":
            started[change.name] = change.pid
        if change.kind == "died":
            died.append(f"{change.name} {change.exit_text}")

    with tempfile.TemporaryDirectory() as folder:
        config = _config(Path(folder))
        async with running(config, note) as system:
            targets, known = await _look(system)
            await _serves(targets[0], 1)
            before = {name: _resident_bytes(pid) for name, pid in started.items()}
            begun_s = time.monotonic()
            async with asyncio.TaskGroup() as group:
                attached = group.create_task(_attached(targets))
                honest = group.create_task(_honest(targets[0]))
                shares = [(target, is_stranger) for target in targets for is_stranger in (True, False)]
                jobs = [
                    group.create_task(
                        asyncio.to_thread(
                            attack, target, known, num_messages // len(shares), seed + index, is_stranger, tally
                        )
                    )
                    for index, (target, is_stranger) in enumerate(shares)
                ]
                try:
                    await asyncio.wait(jobs)
                finally:
                    tally.is_over = True
                attached.cancel()
                honest.cancel()
            took_s = time.monotonic() - begun_s
            await _serves(targets[0], 8)
            for target in targets[1:]:
                await _until_empty(target)
            if died:
                raise Violation(f"processes died: {died}")
            after = {name: _resident_bytes(pid) for name, pid in started.items()}
            grown = [name for name in after if after[name] - before[name] > MAX_GROWTH_BYTES]
            if grown:
                raise Violation(f"processes grew by more than {MAX_GROWTH_BYTES >> 20} MiB: {grown}")
    _print(tally, took_s, before, after, report)
    return tally


def _config(folder: Path) -> ServeConfig:
    """The system, with its secret and its tenants in a folder."""
    secret, tenants = folder / "secret", folder / "tenants.toml"
    secret.write_text(SECRET + "\n")
    tenants.write_text(f'[fuzz]\ntoken_sha256 = ["{hash_token(TOKEN)}"]\noperator = true\n')
    return ServeConfig(
        model="tracer",
        port=0,
        tenants_file=tenants,
        cluster_secret_file=secret,
        num_kv_blocks=1024,
        max_queue_wait_s=0.0,
        log_level="error",
        drain_timeout_s=1.0,
    )


async def _look(system: RunningSystem) -> tuple[list[Target], Known]:
    """The ports, and values that are right there."""
    router = Target("router", system.topology.addresses[0], TOKEN, (inference_pb2,))
    async with AsyncClient(router.address, token=TOKEN) as client:
        workers = await client.workers()
    targets = [router, *(Target(each.worker_id, each.address, SECRET, (worker_pb2,)) for each in workers)]
    described = []
    for target in targets[1:]:
        async with create_channel(target.address, _pass(target)) as channel:
            described.append(await worker_pb2_grpc.WorkerStub(channel).Describe(worker_pb2.DescribeRequest()))
    right = inference_pb2.SamplingParams(top_p=1, repetition_penalty=1, max_tokens=6, ignore_eos=True)
    known = {
        "fingerprint": [each.model.fingerprint for each in described],
        "model": [described[0].model.model],
        "layout": [each.layout for each in described],
        "epoch": [each.epoch for each in described],
        "router_id": ["fuzz"],
        "transport": ["grpc", "shm"],
        "address": [each.address for each in targets[1:]] + ["127.0.0.1:1"],
        "sampling": [right],
        "prompt_token_ids": [PROMPT, PROMPT[:3], PROMPT * 4],
        "priority": [0, 1, 2, 3],
        "have_tokens": [0, 16],
    }
    return targets, known


async def _attached(targets: Sequence[Target]) -> None:
    """Takes the tokens of the fuzzing caller's own attempts, so that some of them run."""
    async with asyncio.TaskGroup() as group:
        for target in targets[1:]:
            group.create_task(_attach(target))


async def _attach(target: Target) -> None:
    """Until cancelled; another stream of the same name takes this one's place, and is taken over again."""
    async with create_channel(target.address, _pass(target)) as channel:
        while not target.name.startswith("prefill"):
            async for _ in worker_pb2_grpc.DecodeStub(channel).Attach(worker_pb2.AttachRequest(router_id="fuzz")):
                pass
            await asyncio.sleep(1.0)


async def _honest(router: Target) -> None:
    """Requests of a client who knows nothing of all this; until cancelled."""
    number = 0
    while True:
        number += 1
        await _serves(router, number)
        await asyncio.sleep(1.0)


async def _serves(router: Target, number: int) -> None:
    """Raises Violation unless a request of a prompt of its own is answered right."""
    prompt = (*PROMPT, *b"%d" % number)
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    wanted = tracer.expected_tokens(prompt, 8, SampleRow(0, 0, params))
    async with AsyncClient(router.address, token=router.token, timeout_s=6 * LIMIT_S) as client:
        answer = await client.complete(
            prompt_token_ids=prompt, temperature=0.0, ignore_eos=True, max_tokens=8, priority="high"
        )
    got = [token.token_id for token in answer.tokens]
    if got != wanted:
        raise Violation(f"an honest request got {got}, the answer is {wanted}")


async def _until_empty(target: Target) -> None:
    """Raises Violation unless the worker soon reports that it holds nothing."""
    load = None
    async with create_channel(target.address, _pass(target)) as channel:
        try:
            async with asyncio.timeout(LIMIT_S):
                async for report in worker_pb2_grpc.WorkerStub(channel).Watch(worker_pb2.WatchRequest()):
                    load, pool = report.load, report.load.pool
                    if not any((pool.used, pool.accounted, load.num_leases, load.num_queued, load.num_running)):
                        return
        except TimeoutError:
            raise Violation(f"{target.name} still holds {load}") from None


def _pass(target: Target) -> Pass:
    return Pass(bearer=lambda: target.token)


def _resident_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * 4096


def _print(tally: Tally, took_s: float, before: dict[str, int], after: dict[str, int], report: Any) -> None:
    total = sum(tally.num_messages.values())
    print(f"{total} messages in {took_s:.0f} s, {total / took_s:.0f} a second; no violation", file=report)
    for kind, count in sorted(tally.num_messages.items()):
        print(f"  {kind}: {count} messages, {tally.num_answered[kind]} answered", file=report)
    print(f"  {tally.num_ended} connections ended by servers, {tally.num_junk} were no HTTP/2", file=report)
    for name, size in sorted(after.items()):
        print(f"  {name}: {before[name] >> 20} MiB resident before, {size >> 20} after", file=report)


def main() -> None:
    """See the module."""
    num_messages = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else time.time_ns() % 2**32
    print(f"{num_messages} messages, seed {seed}", flush=True)
    found: list[str] = []
    try:
        asyncio.run(fuzz(num_messages, seed))
    except* Violation as violations:
        found = [str(each) for each in violations.exceptions]
    if found:
        sys.exit(f"seed {seed}: {found}")


if __name__ == "__main__":
    main()
