"""A TCP connection that a test can cut or freeze: it stands between a router and a worker.

`cut` resets every connection, as the death of a process does; `freeze` keeps them open and passes nothing on, as a
stopped process or a broken network does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

PIECE_BYTES = 65536


class Wire:
    """Forwards a port of its own to `target` (host:port)."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.address = ""
        self.accepted = asyncio.Semaphore(0)
        """Released at each connection."""
        self._server: asyncio.Server
        self._flows = asyncio.Event()
        self._flows.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted.release()
        host, _, port = self.target.rpartition(":")
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await source.read(PIECE_BYTES):
                await self._flows.wait()
                sink.write(piece)
                await sink.drain()
        sink.close()

    def cut(self) -> None:
        """Resets all connections; new ones are taken."""
        writers, self._writers = self._writers, set()
        for writer in writers:
            writer.transport.abort()

    def freeze(self) -> None:
        """Nothing passes until `thaw`."""
        self._flows.clear()

    def thaw(self) -> None:
        """Everything passes again, also what came meanwhile."""
        self._flows.set()

    async def stop(self) -> None:
        """Refuses connections and resets those there are."""
        self._server.close()
        self.thaw()
        self.cut()
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


@contextlib.asynccontextmanager
async def wire_to(target: str) -> AsyncIterator[Wire]:
    """A wire for the block."""
    wire = Wire(target)
    await wire.start()
    try:
        yield wire
    finally:
        await wire.stop()
