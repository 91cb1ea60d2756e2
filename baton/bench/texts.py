"""Texts for measurements of what guesses from the text itself are worth: stories, and code and records.

Owns two kinds of prompts, made from words that a seed draws. Stories hardly repeat themselves, and are gone on with at
length; code and records are continued much as they began. Both are cut to a length in tokens by whoever asks.
"""

from __future__ import annotations

import random
from collections.abc import Callable

NAMES = ("Amara", "Boris", "Chen", "Dalia", "Edgar", "Farid", "Greta", "Hana", "Ivo", "Jonas", "Kirsi", "Lena")
PLACES = ("harbour", "mill", "station", "orchard", "library", "market", "bridge", "lighthouse", "foundry", "school")
DEEDS = ("counted the lamps", "mended a net", "lost the key", "read the ledger", "drew a map", "waited for the ferry")
FIELDS = ("name", "age", "city", "price", "status", "owner", "weight", "colour", "level", "code")
VERBS = ("add", "scale", "clip", "merge", "shift", "round", "pack", "drop")


def story(chance: random.Random) -> str:
    """The beginning of a tale."""
    hero, other = chance.sample(NAMES, 2)
    sentences = [f"It was the year when {hero} came back to the {chance.choice(PLACES)}."]
    for _ in range(12):
        who, place, deed = (
            chance.choice((hero, other, "Nobody", "The clerk")),
            chance.choice(PLACES),
            chance.choice(DEEDS),
        )
        when = chance.choice(("At dawn", "Later", "That winter", "Before the bell", "On the third day"))
        sentences.append(f"{when}, {who} {deed} near the {place} and thought of {chance.choice(NAMES)}.")
    return " ".join(sentences)


def records(chance: random.Random) -> str:
    """A list of JSON records, or a file of like functions, that goes on."""
    return _json(chance) if chance.random() < 0.5 else _code(chance)


def _json(chance: random.Random) -> str:
    fields = chance.sample(FIELDS, 4)
    rows = []
    for number in range(1, 9):
        values = ", ".join(f'"{name}": "{chance.choice(NAMES)}"' for name in fields[1:])
        rows.append(f'  {{"id": {number}, "{fields[0]}": {chance.randrange(100)}, {values}}}')
    return "[\n" + ",\n".join(rows) + ",\n"


def _code(chance: random.Random) -> str:
    field = chance.choice(FIELDS)
    functions = [
        f"def {verb}_{field}(values, amount):\n"
        f"    result = []\n"
        f"    for value in values:\n"
        f"        result.append({verb}(value.{field}, amount))\n"
        f"    return result\n"
        for verb in chance.sample(VERBS, 4)
    ]
    return "\n\n".join(functions) + "\n\n"


SETS: dict[str, Callable[[random.Random], str]] = {"story": story, "records": records}
"""By name."""
