"""A chaos run over the real model: answers must be those of the undisturbed system, or part from them at near-ties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from asked import Asked, prompts, varied_lengths
from chaos_load import Check
from chaos_run import ChaosRun, Outcome, Settings
from chaos_ways import Ways
from ties import count_near_ties

from baton import AsyncClient, Completion

NUM_REQUESTS = 16
MAX_TOKENS = 16
WORKER_FLAGS = ("--dtype=float32", "--num-kv-blocks=256", "--max-num-seqs=16", "--chunk-size=128")


async def play_model(settings: Settings, ways: Ways) -> Outcome:
    """Asks everything once while nothing is wrong, and then again and again while much is."""
    found = prompts(varied_lengths(NUM_REQUESTS, 300, seed=settings.seed % 97), seed=settings.seed % 89)
    requests = [Asked(prompt, MAX_TOKENS, seed=None if index % 4 else index + 1) for index, prompt in enumerate(found)]
    undisturbed: dict[Asked, Completion] = {}

    def check(asked: Asked, tokens: Sequence[int]) -> None:
        outcome.num_near_ties += count_near_ties([asked], [undisturbed[asked]], [tokens], "chaos")

    async def prepare(client: AsyncClient) -> Check:
        for asked in requests:
            undisturbed[asked] = await asked.send(client)
        return check

    played = replace(settings, model="smollm2", worker_flags=WORKER_FLAGS, has_floods=False)
    run = ChaosRun(played, ways)
    outcome = run.outcome
    return await run.run(requests, prepare)
