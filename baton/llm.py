"""`LLM`: the whole system behind one Python object, for scripts and notebooks.

It runs the same processes as `baton serve`, on free ports, for as long as the object is open, and talks to them as any
client does. Owns the thread in which their supervisor runs. No model code runs in the caller's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any, Self, TextIO, TypeVar, Unpack, overload

from baton.answers import Completion, Priority, Sampling
from baton.client import AsyncClient, Client
from baton.options import ServeConfig
from baton.progress import Progress
from runtime.errors import ConfigError

Answer = TypeVar("Answer")
Config = ServeConfig
"""Everything that `baton serve` can be told; see its fields."""

MAX_IN_FLIGHT = 256
"""Prompts of one call that are sent at once; the scheduler queues them."""


class LLM:
    """A served model. Use it in a `with` block, or call `close`."""

    def __init__(
        self,
        model: str = "smollm2",
        config: Config | None = None,
        *,
        device: str | None = None,
        verbose: bool = False,
        **options: Any,
    ) -> None:
        """Starts the system and waits until it is ready.

        `model`: a Hugging Face folder, a .gguf file or a packaged model. `device` as of
        `baton serve`: "cpu", "npu", "npu:0", ... `options` are fields of `Config`
        (`max_batch_size=32`, `num_decode=2`, ...) and replace those of `config`. `verbose` shows the start on standard
        error. Raises ConfigError for an option or device that is not supported, Unavailable or StartFailed when a
        process cannot start.
        """
        known = {field.name for field in dataclasses.fields(Config)} - {"model"}
        unknown = sorted(options.keys() - known)
        if unknown:
            raise ConfigError(f"{unknown[0]}: no such option; there are: {', '.join(sorted(known))}")
        base = config or Config(model=model, port=0)
        for name in ("tenants_file", "tls_cert_file", "tls_client_ca_file"):
            if options.get(name, getattr(base, name)) is not None:
                raise ConfigError(f"{name}: an LLM is its own and only client; use `baton serve` for others")
        if base.max_queue_wait_s is None:
            # A call sends many prompts and waits for all: none should be refused for the time that the others take.
            base = dataclasses.replace(base, max_queue_wait_s=0.0)
        if device is not None:
            options["device"] = device
        self._config = dataclasses.replace(base, **{"model": model, "port": 0, **options})
        self._progress = Progress(sys.stderr) if verbose else None
        self._loop = asyncio.new_event_loop()
        self._stop: asyncio.Event
        self._client: AsyncClient
        self._started: threading.Event = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="baton-llm", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    @property
    def address(self) -> str:
        """host:port of the router, for other clients."""
        return self._address

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes. Repeating it does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a Sequence[str]; it is taken as one prompt
        self, prompts: str, *, priority: Priority = ..., progress: bool = ..., **sampling: Unpack[Sampling]
    ) -> str: ...

    @overload
    def generate(
        self, prompts: Sequence[str], *, priority: Priority = ..., progress: bool = ..., **sampling: Unpack[Sampling]
    ) -> list[str]: ...

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        priority: Priority = "normal",
        progress: bool = True,
        **sampling: Unpack[Sampling],
    ) -> str | list[str]:
        """The text that follows a prompt, or each of several, in their order.

        `sampling` as in `Sampling`; `progress` shows a line on a terminal while several are computed. Raises the
        errors of `Client.generate`; the first one ends the others.
        """
        if isinstance(prompts, str):
            return self.complete(prompts, priority=priority, **sampling).text
        answers = self._wait(self._complete_all(list(prompts), progress, {"priority": priority, **sampling}))
        return [answer.text for answer in answers]

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        priority: Priority = "normal",
        session_id: str | None = None,
        **sampling: Unpack[Sampling],
    ) -> str:
        """The answer to a conversation of {"role": ..., "content": ...}. What turns of one `session_id` have in common
        is computed once."""
        options: dict[str, Any] = {"messages": messages, "priority": priority, "session_id": session_id, **sampling}
        return self._wait(self._client.complete(None, **options)).text

    def complete(self, prompt: str, *, priority: Priority = "normal", **sampling: Unpack[Sampling]) -> Completion:
        """As `generate` for one prompt, with tokens, usage, timing and the workers that served it."""
        options: dict[str, Any] = {"priority": priority, **sampling}
        return self._wait(self._client.complete(prompt, **options))

    def stream(self, prompt: str, *, priority: Priority = "normal", **sampling: Unpack[Sampling]) -> Iterator[str]:
        """Text as it comes. Leaving the loop early cancels the request."""
        with (
            Client(self._address) as client,
            contextlib.closing(client.generate(prompt, priority=priority, **sampling)) as chunks,
        ):
            for chunk in chunks:
                if chunk.text:
                    yield chunk.text

    def _wait(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        if not self._thread.is_alive():
            work.close()
            raise RuntimeError("this LLM is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _complete_all(self, prompts: Sequence[str], progress: bool, options: dict[str, Any]) -> list[Completion]:
        bar = _Bar(len(prompts), sys.stderr) if progress and sys.stderr.isatty() else None
        places = asyncio.Semaphore(MAX_IN_FLIGHT)

        async def complete(prompt: str) -> Completion:
            async with places:
                answer = await self._client.complete(prompt, **options)
            if bar is not None:
                bar.add(len(answer.tokens))
            return answer

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(complete(prompt)) for prompt in prompts]
        except* Exception as errors:
            raise errors.exceptions[0] from None
        finally:
            if bar is not None:
                bar.close()
        return [task.result() for task in tasks]

    # The thread

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:  # the caller's thread raises it
            self._failure = error
        finally:
            self._started.set()
            self._loop.close()

    async def _serve(self) -> None:
        # Not at the top: `import baton` is what clients do, and they need none of it.
        from baton.serving import running

        self._stop = asyncio.Event()
        progress = self._progress
        async with running(self._config, (lambda change: None) if progress is None else progress.on_change) as system:
            if progress is not None:
                progress.finish_loading()
            self._address = system.topology.addresses[0]
            async with AsyncClient(self._address) as self._client:
                self._started.set()
                await self._stop.wait()


class _Bar:
    """One line that counts."""

    def __init__(self, num_prompts: int, stream: TextIO) -> None:
        self._num_prompts, self._stream = num_prompts, stream
        self._num_done = self._num_tokens = 0
        self._started_s = time.monotonic()

    def add(self, num_tokens: int) -> None:
        self._num_done += 1
        self._num_tokens += num_tokens
        rate = self._num_tokens / (time.monotonic() - self._started_s)
        filled = "#" * round(20 * self._num_done / self._num_prompts)
        self._stream.write(f"\r[{filled:<20}] {self._num_done}/{self._num_prompts} prompts, {rate:.0f} tokens/s")
        self._stream.flush()

    def close(self) -> None:
        self._stream.write("\n")
