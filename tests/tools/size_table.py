"""Prints lines of Python by top-level folder, and refuses source files that have grown too long.

Run from the repository root. Generated code is not counted.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

MAX_LINES = 400
"""Of a source file; tests may be longer."""


def main() -> None:
    """Prints the table; exits 1 when a source file is too long."""
    listed = subprocess.run(["git", "ls-files", "*.py"], check=True, capture_output=True, text=True).stdout.split()
    paths = [Path(name) for name in listed if "_pb2" not in name and Path(name).exists()]
    num_lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    sizes: dict[str, list[int]] = defaultdict(list)
    for path, count in num_lines.items():
        folder = "/".join(path.parts[:2]) if path.parts[0] == "tests" and len(path.parts) > 2 else path.parts[0]
        sizes[folder].append(count)
    print(f"{'folder':<16}{'files':>7}{'lines':>8}{'longest':>9}")
    for folder, counts in sorted(sizes.items(), key=lambda item: (item[0].startswith("tests"), item[0])):
        print(f"{folder:<16}{len(counts):>7}{sum(counts):>8}{max(counts):>9}")
    product = sum(count for path, count in num_lines.items() if path.parts[0] != "tests")
    print(f"{'product':<16}{'':>7}{product:>8}")
    print(f"{'tests':<16}{'':>7}{sum(num_lines.values()) - product:>8}")
    source = ((path, count) for path, count in num_lines.items() if path.parts[0] != "tests")
    too_long = [f"{path} has {count} lines" for path, count in source if count > MAX_LINES]
    if too_long:
        sys.exit(f"over {MAX_LINES} lines: {'; '.join(too_long)}")


if __name__ == "__main__":
    main()
