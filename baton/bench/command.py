"""The command: checks options before anything is started, runs one scenario, shows and keeps its results.

Owns the list of scenarios and the exit code: 1 when a request failed. A refusal is an answer and no failure.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from baton.bench import plot, report
from baton.bench.asks import read_conversations
from baton.bench.comparisons import COMPARISONS
from baton.bench.contention import CONTENTION
from baton.bench.conversations import CONVERSATIONS
from baton.bench.options import STANDARD_OUTPUT, BenchConfig, resolve
from baton.bench.routing import ROUTING
from baton.bench.rows import Row
from baton.bench.scenario import Run, Ticker
from baton.bench.speculation import SPECULATION
from runtime.errors import ConfigError

SCENARIOS = {
    scenario.name: scenario for scenario in (*COMPARISONS, *CONTENTION, *CONVERSATIONS, *ROUTING, *SPECULATION)
}
NUM_MESSAGES = 5
"""Different messages of failed requests that are shown."""


async def bench(config: BenchConfig, output: TextIO) -> int:
    """Runs the scenario and prints its rows; the exit code."""
    scenario = SCENARIOS[config.scenario]
    scenario.check(config)
    run = Run(config, scenario, resolve(config, scenario.sizes), Ticker(sys.stderr))
    if config.plot is not None:
        plot.load_library()
    if run.sizes.dataset == "sharegpt":
        read_conversations(config.dataset_file, 1)
    rows = await scenario.run(run)
    run.ticker.clear()
    for message, count in Counter(run.errors).most_common(NUM_MESSAGES):
        print(f"{count} failed: {message}", file=sys.stderr)
    _show(run, rows, output)
    return 1 if run.errors else 0


def _show(run: Run, rows: Sequence[Row], output: TextIO) -> None:
    config = run.config
    if config.json != STANDARD_OUTPUT:
        print(report.table(rows), file=output)
    if config.json is not None:
        results = report.to_json(config.scenario, run.model, config, run.sizes, rows)
        text = json.dumps(results, indent=2, allow_nan=False) + "\n"
        if config.json == STANDARD_OUTPUT:
            output.write(text)
        else:
            _write(Path(config.json), text)
    if config.plot is not None:
        plot.draw(config.plot, f"{config.scenario}, {run.model}", rows, run.samples)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json: {str(path)!r} cannot be written: {error}") from None
