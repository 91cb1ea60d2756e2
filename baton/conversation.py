"""A conversation: turns of one session, of which each sends what is new, and everything where the service has lost it.

Owns the messages, so that nothing depends on what the service remembers. A turn that fails is taken back: the
conversation goes on from the one before it.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator
from typing import Unpack

from baton.answers import Chunk, Priority, Sampling
from baton.client import Client
from runtime.errors import SessionLost


class Conversation:
    """Talks with the model behind a client. Not for several threads at once."""

    def __init__(
        self, client: Client, *, system: str | None = None, session_id: str = "", priority: Priority | None = None
    ) -> None:
        """`system` is a message to begin with; `session_id` is drawn when it is empty."""
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        """What was said so far."""
        self.session_id = session_id or secrets.token_hex(16)
        """Its name at the service."""
        self.num_lost = 0
        """Turns for which everything had to be sent again."""
        self._client = client
        self._priority = priority
        self._session_tokens: int | None = None  # of the session at the service; None: it has none yet

    def say(self, content: str, **sampling: Unpack[Sampling]) -> Generator[Chunk, None, None]:
        """One turn: streams the answer to `content`. Raises what `Client.generate` raises, but SessionLost."""
        self.messages.append({"role": "user", "content": content})
        parts: list[str] = []
        finish = None
        try:
            for chunk in self._turn(sampling):
                parts.append(chunk.text)
                finish = chunk.finish or finish
                yield chunk
        finally:
            if finish is None:
                self.messages.pop()
            else:
                self.messages.append({"role": "assistant", "content": "".join(parts)})
                self._session_tokens = finish.usage.session_tokens

    def end(self) -> bool:
        """Frees what the service keeps of it; whether it kept anything."""
        return self._client.end_session(self.session_id)

    def _turn(self, sampling: Sampling) -> Generator[Chunk, None, None]:
        if self._session_tokens is not None:
            try:
                yield from self._client.generate(
                    messages=self.messages[-1:],
                    session_id=self.session_id,
                    append=True,
                    session_tokens=self._session_tokens,
                    priority=self._priority,
                    **sampling,
                )
                return
            except SessionLost:
                # Nothing was answered yet.
                self.num_lost += 1
        yield from self._client.generate(
            messages=self.messages, session_id=self.session_id, priority=self._priority, **sampling
        )
