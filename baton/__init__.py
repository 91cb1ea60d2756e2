"""Baton from Python: `from baton import Client, AsyncClient`. Light: no torch, and no server code is imported."""

from __future__ import annotations

from baton.answers import Chunk, Completion, Finish, Sampling, ServedBy, Timing, Token, Usage
from baton.client import AsyncClient, Client

__all__ = [
    "AsyncClient",
    "Chunk",
    "Client",
    "Completion",
    "Finish",
    "Sampling",
    "ServedBy",
    "Timing",
    "Token",
    "Usage",
]
