"""Weights of a Hugging Face folder: one or several memory-mapped safetensors files, read by the library of that name.

Owns which file holds which tensor, and the translation of the library's errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.weights.source import Progress, WeightSource
from runtime.errors import CheckpointError

FLOAT_TYPES = frozenset({"F64", "F32", "F16", "BF16"})
"""What a float model can be read from."""


class SafetensorsWeights(WeightSource):
    """Tensors of all `files`; a name that stands in two of them is an error."""

    def __init__(self, folder: Path, files: Sequence[Path], dtype: torch.dtype, progress: Progress) -> None:
        self._file_of: dict[str, tuple[Path, Any]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            try:
                handle: Any = safe_open(file, framework="pt", device="cpu")
                for name in handle.keys():  # noqa: SIM118 (the handle is not a mapping)
                    if name in self._file_of:
                        raise CheckpointError(f"{file}: tensor {name} stands in {self._file_of[name][0].name} too")
                    self._file_of[name] = (file, handle)
                    shapes[name] = tuple(handle.get_slice(name).get_shape())
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file}: cannot be read as safetensors: {error}") from error
        super().__init__(files[0] if len(files) == 1 else folder, shapes, dtype, progress)

    def file_of(self, name: str) -> Path:
        return self._file_of[name][0]

    def decode(self, name: str, dtype: torch.dtype) -> Tensor:
        file, handle = self._file_of[name]
        stored_type = handle.get_slice(name).get_dtype()
        if stored_type not in FLOAT_TYPES:
            raise CheckpointError(
                f"{file}: tensor {name} is of type {stored_type}, which is not supported; "
                f"supported are: {', '.join(sorted(FLOAT_TYPES))}"
            )
        try:
            stored: Tensor = handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: tensor {name} cannot be read: {error}") from error
        # A copy even where the dtype is the same: what the library returns may be a view of the file.
        return stored.to(dtype, copy=True)
