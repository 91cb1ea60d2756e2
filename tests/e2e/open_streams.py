"""A client process that holds streams open: `python open_streams.py ADDRESS COUNT` prints "open" once each has a token.

Started by the tests to be killed.
"""

from __future__ import annotations

import asyncio
import sys

from baton import AsyncClient


async def hold(address: str, count: int) -> None:
    """Opens `count` long answers and reads them to their ends."""
    waiting = set(range(count))
    async with AsyncClient(address) as client, asyncio.TaskGroup() as group:

        async def read(index: int) -> None:
            async for chunk in client.generate(f"Story number {index}:", max_tokens=1500, ignore_eos=True):
                if chunk.tokens and index in waiting:
                    waiting.remove(index)
                    if not waiting:
                        print("open", flush=True)

        for index in range(count):
            group.create_task(read(index))


if __name__ == "__main__":
    asyncio.run(hold(sys.argv[1], int(sys.argv[2])))
