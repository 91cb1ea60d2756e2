"""CPU operations. For now the reference is the CPU implementation; faster kernels override its methods here."""

from __future__ import annotations

from kernels import reference


class Ops(reference.Ops):
    """What runs on `torch.device("cpu")`."""
