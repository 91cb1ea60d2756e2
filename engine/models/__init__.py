"""The model families that Baton knows: one file each, named after `model_type` in config.json.

The file name is the registration. Each file defines `Model`, a class derived from `engine.decoder.Decoder`, and says
only what differs from the shared decoder.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.errors import CheckpointError

if TYPE_CHECKING:
    from engine.decoder import Decoder


def known_models() -> list[str]:
    """The values of `model_type` that can be served."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load_model_class(model_type: object, path: Path) -> type[Decoder]:
    """The class for `model_type`. Raises CheckpointError naming `path` and the known ones if there is none."""
    if model_type not in known_models():
        raise CheckpointError(
            f"{path}: model_type {model_type!r} is not supported; supported are: {', '.join(known_models())}"
        )
    model_class: type[Decoder] = importlib.import_module(f"{__name__}.{model_type}").Model
    return model_class
