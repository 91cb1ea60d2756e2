"""CUDA devices, by the reference operations: nothing is optimised, everything runs."""

from __future__ import annotations

import torch

from kernels import DeviceUnavailable, MemoryBytes, reference


class Ops(reference.Ops):
    """What runs on `torch.device("cuda", index)`."""

    @staticmethod
    def open_device(index: int) -> torch.device:
        count = torch.cuda.device_count()
        if index >= count:
            raise DeviceUnavailable(
                f"cuda:{index} does not exist: this process sees {count} CUDA devices, by torch {torch.__version__}"
            )
        return torch.device("cuda", index)

    def memory_bytes(self) -> MemoryBytes | None:
        free, total = torch.cuda.mem_get_info(self.device)
        return MemoryBytes(free=free, total=total)
