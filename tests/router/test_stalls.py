"""The limit on each write of a stream, which no timer of its own guards."""

from __future__ import annotations

import asyncio

import pytest

from router.stalls import stall_limit
from runtime.errors import Aborted

LIMIT_S = 0.05


async def for_a_while(num_limits: int) -> None:
    await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=num_limits * LIMIT_S)


async def test_a_write_that_hangs_is_ended() -> None:
    with pytest.raises(Aborted, match=r"nothing for 0\.05 s"):
        async with asyncio.timeout(5), stall_limit(LIMIT_S) as clock:
            # Not the first write: the look at the stream was set before it began.
            clock.start()
            clock.stop()
            await for_a_while(1)
            clock.start()
            await asyncio.get_running_loop().create_future()


async def test_a_stream_without_a_write_under_way_lasts() -> None:
    async with stall_limit(LIMIT_S) as clock:
        clock.start()
        clock.stop()
        await for_a_while(4)


async def test_many_short_writes_are_no_long_one() -> None:
    loop = asyncio.get_running_loop()
    end_s = loop.time() + 4 * LIMIT_S
    async with stall_limit(LIMIT_S) as clock:
        while loop.time() < end_s:
            clock.start()
            await asyncio.sleep(0)
            clock.stop()


async def test_what_else_takes_too_long_is_not_the_clients_fault() -> None:
    with pytest.raises(TimeoutError):
        async with stall_limit(LIMIT_S), asyncio.timeout(0.001):
            await asyncio.get_running_loop().create_future()
