"""Python code of protos/*.proto: `stubs.py --write` generates it in place, `stubs.py --check` compares.

Run from the repository root. The code is committed, so that an installation needs no compiler; the check keeps it
equal to what the pinned grpcio-tools makes of the definitions.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path


def generate(target: Path) -> None:
    """Writes the code of all definitions below `target`."""
    definitions = sorted(map(str, Path("protos").glob("*.proto")))
    outputs = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *definitions], check=True)


def differences() -> list[str]:
    """Names of files that differ from what is generated, are missing, or have no definition any more."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = {path.name: path.read_bytes() for path in Path(folder, "protos").iterdir()}
    committed = {path.name: path.read_bytes() for path in Path("protos").glob("*_pb2*") if path.is_file()}
    return sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))


def main() -> None:
    if sys.argv[1:] == ["--write"]:
        generate(Path("."))
    elif sys.argv[1:] == ["--check"]:
        if names := differences():
            sys.exit(f"not as generated: {', '.join(names)}; run `make protos`")
    else:
        sys.exit("usage: stubs.py --write | --check")


if __name__ == "__main__":
    main()
