"""Runs the meta functions inside a wheel of torch-npu on the calls of `test_npu_contracts.py`: shapes without numbers.

`python wheel_meta.py WHEEL` prints, as JSON by operator, shape and dtype of every result, or the error. A process of
its own, since it defines all of the wheel's operators. The wheel's file of meta functions is executed out of the
archive; what it imports of torch_npu, which needs a driver, is replaced here.
"""

from __future__ import annotations

import json
import sys
import zipfile
from types import ModuleType
from typing import Any

import torch
from test_npu_contracts import VALID
from torch.utils._pytree import tree_flatten, tree_map

LIBRARY = "torch_npu/lib/libtorch_npu.so"
META_FUNCTIONS = "torch_npu/op_plugin/meta/_meta_registrations.py"


class Anything:
    """Stands for enumerations whose values do not matter."""

    def __getattr__(self, name: str) -> str:
        return name


def define_all(library: bytes) -> torch.library.Library:
    """Every schema in the binary that torch can read."""
    defined, known = torch.library.Library("npu", "DEF"), set()
    place = -1
    while (place := library.find(b") -> ", place + 1)) >= 0:
        start, end = library.rfind(b"\0", 0, place) + 1, library.find(b"\0", place)
        text = library[start:end].decode("latin-1")
        name = text.partition("(")[0]
        if name in known or not name.replace("_", "").replace(".", "").isalnum():
            continue
        try:
            defined.define(text)
        except RuntimeError:
            continue  # of another dialect, or naming classes that are not here
        known.add(name)
    return defined


def stand_in(name: str, **contents: Any) -> None:
    module = ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module


def register(source: str) -> dict[str, Any]:
    """Executes the file of meta functions; its names, with which the registrations end."""
    numbers = {"int4": 285, "hifloat8": 290, "float8_e8m0fnu": 293, "float4_e2m1fn_x2": 296, "float4_e1m2fn_x2": 297}
    stand_in("torch_npu", **numbers)
    stand_in("torch_npu.utils")
    stand_in("torch_npu.utils._error_code", ErrCode=Anything(), ops_error=str)
    stand_in("torch_npu.npu")
    stand_in("torch_npu.npu.utils", get_cann_version=lambda *args: "9.1.0")
    stand_in("torch_npu.npu._backends", get_soc_version=lambda: 220)
    names: dict[str, Any] = {"__name__": "meta_registrations"}
    exec(compile(source, META_FUNCTIONS, "exec"), names)
    return names


def described(name: str) -> list[Any] | str:
    """Shapes and dtypes of an operator's results."""
    arguments = tree_map(lambda value: value.to("meta") if isinstance(value, torch.Tensor) else value, VALID[name][1]())
    try:
        results, _ = tree_flatten(getattr(torch.ops.npu, name)(**arguments))
    except (RuntimeError, TypeError, NotImplementedError) as error:
        return str(error)
    return [[list(result.shape), str(result.dtype)] for result in results if result is not None]


def main(wheel: str) -> None:
    """Prints what it finds."""
    with zipfile.ZipFile(wheel) as archive:
        library, source = archive.read(LIBRARY), archive.read(META_FUNCTIONS).decode()
    kept = (define_all(library), register(source))
    print(json.dumps({name: described(name) for name, (namespace, _) in VALID.items() if namespace == "npu"}))
    del kept


if __name__ == "__main__":
    main(sys.argv[1])
