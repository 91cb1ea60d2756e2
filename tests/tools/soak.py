"""Plays chaos and runs the fault and property tests again and again for some minutes, with other cases each time.

Run from the repository root: `python tests/tools/soak.py MINUTES`. Stops at the first failure and prints its seed.
"""

from __future__ import annotations

import subprocess
import sys
import time

CHAOS_MINUTES = 5.0
"""Of chaos in each round."""
FOLDERS = (
    "tests/engine",
    "tests/doors",
    "tests/tracer",
    "tests/router",
    "tests/faults",
    "tests/kvstore",
    "tests/text",
    "tests/interleaving",
)


def main() -> None:
    """Exits with the failing run's code, or 0 when the time is over. At least one round is run."""
    ends_s = time.monotonic() + 60 * float(sys.argv[1])
    num_rounds = 0
    while num_rounds == 0 or time.monotonic() < ends_s:
        seed = time.time_ns() % 2**32
        print(f"round {num_rounds + 1}, seed {seed}", flush=True)
        minutes = min(CHAOS_MINUTES, max(0.5, (ends_s - time.monotonic()) / 60))
        for command in (
            ["tests/tools/ordeals.py", "chaos", f"--seed={seed}", f"--minutes={minutes:.1f}"],
            ["-m", "pytest", "-q", "-x", f"--hypothesis-seed={seed}", f"--first-seed={seed}", *FOLDERS],
        ):
            result = subprocess.run([sys.executable, *command], check=False)
            if result.returncode:
                sys.exit(result.returncode)
        num_rounds += 1
    print(f"{num_rounds} rounds passed")


if __name__ == "__main__":
    main()
