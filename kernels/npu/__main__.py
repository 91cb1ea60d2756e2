"""`python -m kernels.npu [INDEX]`: checks an NPU's operators one by one; exit code 1 if one is wrong."""

from __future__ import annotations

import sys

import torch

from kernels import DeviceUnavailable, load_ops
from kernels.npu.checking import Checker


def main(arguments: list[str]) -> int:
    """Prints a line for each check, and answers the exit code; 2 where there is no NPU."""
    try:
        ops = load_ops("npu", int(arguments[0]) if arguments else 0)
    except DeviceUnavailable as error:
        print(f"kernels.npu: {error}", file=sys.stderr)
        return 2
    num_faults = 0
    with torch.inference_mode():
        for outcome in Checker(ops).run():
            num_faults += outcome.fault is not None
            exactness = "" if outcome.difference is None else f"{outcome.difference:.3%}"
            print(f"{'ok' if outcome.fault is None else 'WRONG':<6}{outcome.name:<58}{outcome.fault or exactness}")
    print(f"{num_faults} wrong" if num_faults else "all as documented")
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
