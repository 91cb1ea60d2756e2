"""`baton demo`: the whole system once, from nothing to an answer and back to nothing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TextIO

from baton.client import AsyncClient
from baton.options import ServeConfig
from baton.progress import Progress
from baton.serving import running
from baton.terminal import describe
from runtime.errors import BatonError
from runtime.rpc import wait_for_shutdown_signal


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """`baton demo`."""

    model: str = "smollm2"
    """What to serve; "smollm2" is the packaged SmolLM2-135M-Instruct."""
    question: str = "What is the capital of France?"
    """What to ask."""
    max_tokens: int = field(default=64, metadata={"min": 1})
    """Most tokens of the answer."""
    answer_timeout_s: float = field(default=120.0, metadata={"min": 0})
    """How long the answer may take."""


async def demo(config: DemoConfig, output: TextIO) -> int:
    """Runs the demonstration; the exit code. A signal ends it early, with everything stopped."""
    asking = asyncio.create_task(_demo(config, output))
    stop = asyncio.create_task(wait_for_shutdown_signal())
    await asyncio.wait([asking, stop], return_when=asyncio.FIRST_COMPLETED)
    stopped = not asking.done()
    stop.cancel()
    asking.cancel()
    try:
        await asking
    except asyncio.CancelledError:
        return 130 if stopped else 1
    return 0


async def _demo(config: DemoConfig, output: TextIO) -> None:
    progress = Progress(output)
    serve_config = ServeConfig(model=config.model, port=0, drain_timeout_s=5.0)
    try:
        async with running(serve_config, progress.on_change) as system:
            progress.finish_loading()
            await _ask(config, system.topology.addresses[0], output)
    finally:
        progress.abandon_loading()


async def _ask(config: DemoConfig, address: str, output: TextIO) -> None:
    print(f"\n> {config.question}", file=output)
    finish = None
    async with AsyncClient(address, timeout_s=config.answer_timeout_s) as client:
        # The tracer has no text of its own and no template; it is asked the plain question.
        model = await client.get_model()
        messages = [{"role": "user", "content": config.question}] if model.has_chat_template else None
        prompt = None if messages else config.question
        stream = client.generate(prompt, messages=messages, temperature=0, max_tokens=config.max_tokens)
        async for chunk in stream:
            print(chunk.text, end="", file=output, flush=True)
            finish = chunk.finish or finish
    if finish is None:
        raise BatonError("the answer ended without its last message")
    print(f"\n\n{describe(finish)}", file=output, flush=True)
