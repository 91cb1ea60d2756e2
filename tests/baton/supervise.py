"""A supervisor as a process: `supervise.py REDIS_PORT` prints the pids of all it runs, then waits for a signal."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import redis.asyncio

from baton import metadata_server
from baton.supervisor import Change, Supervisor
from baton.topology import ProcessSpec
from runtime.rpc import wait_for_shutdown_signal

FAKE = str(Path(__file__).with_name("fake_child.py"))


async def main() -> None:
    pids: dict[str, int] = {}

    def on_change(change: Change) -> None:
        pids[change.name] = change.pid

    port = int(sys.argv[1])
    supervisor = Supervisor(on_change, drain_timeout_s=2.0)
    stop = asyncio.create_task(wait_for_shutdown_signal())
    try:
        worker = ProcessSpec("worker", (sys.executable, FAKE, "serve"), gates_readiness=True)
        await supervisor.start([worker, metadata_server.process_spec(port)])
        client = redis.asyncio.Redis(host="127.0.0.1", port=port)
        server = (await client.info())["process_id"]
        await client.aclose()
        print(*pids.values(), server, flush=True)
        await stop
    finally:
        await supervisor.stop()


asyncio.run(main())
