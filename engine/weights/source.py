"""What every weight format offers: tensors by their Hugging Face names, checked and in one dtype.

Owns the checks that formats share (missing tensor, wrong shape) and the account of progress. Does not know models: who
reads says which shape it expects. Every failure is a CheckpointError that names the file and the tensor.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from runtime.errors import CheckpointError

Progress = Callable[[float], None]
"""Called with the share of all elements read so far, in [0, 1], never falling."""


class Weights(Protocol):
    """What a model is loaded from."""

    def holds(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        ...

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor, contiguous and the caller's own, in `dtype` or the model's. Raises CheckpointError."""
        ...


class WeightSource(ABC):
    """An open checkpoint. Tensors it returns are the caller's own: they outlive it and may be written to."""

    def __init__(
        self, place: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, progress: Progress
    ) -> None:
        self._place = place
        self._shapes = shapes
        self._dtype = dtype
        self._progress = progress
        self._num_total = max(1, sum(math.prod(shape) for shape in shapes.values()))
        self._num_read = 0

    def holds(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._shapes

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor, contiguous, in `dtype` (default: the one the source was opened with).

        Raises CheckpointError if it is missing, has another shape, or cannot be decoded.
        """
        if name not in self._shapes:
            raise CheckpointError(f"{self._place}: tensor {name} is missing")
        if self._shapes[name] != shape:
            raise CheckpointError(
                f"{self.file_of(name)}: tensor {name} has shape {list(self._shapes[name])}, "
                f"but the configuration asks for {list(shape)}"
            )
        tensor = self.decode(name, dtype or self._dtype)
        self._num_read += tensor.numel()
        self._progress(min(1.0, self._num_read / self._num_total))
        return tensor

    @abstractmethod
    def file_of(self, name: str) -> Path:
        """The file that holds a tensor, for messages."""

    @abstractmethod
    def decode(self, name: str, dtype: torch.dtype) -> Tensor:
        """A copy of a tensor that is there. Raises CheckpointError if its bytes cannot be used."""
