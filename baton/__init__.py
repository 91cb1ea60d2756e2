"""Baton from Python: `from baton import LLM, Client, AsyncClient, Conversation`. No torch is imported."""

from __future__ import annotations

from baton.answers import Chunk, Completion, Finish, Sampling, ServedBy, Timing, Token, Usage
from baton.client import AsyncClient, Client
from baton.conversation import Conversation
from baton.llm import LLM, Config

__all__ = [
    "LLM",
    "AsyncClient",
    "Chunk",
    "Client",
    "Completion",
    "Config",
    "Conversation",
    "Finish",
    "Sampling",
    "ServedBy",
    "Timing",
    "Token",
    "Usage",
]
