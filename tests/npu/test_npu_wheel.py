"""The simulated operators compared with what is inside published wheels of torch-npu: their schemas, and the shapes
that the wheels' meta functions give.

The wheels are read, never installed: `--torch-npu-wheel FILE`, once or several times. docs/npu.md says how to get one.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from operator_schemas import ATB, NPU, name_of
from simulated_host import Npu
from test_npu_contracts import FUSED, VALID, call
from torch.utils._pytree import tree_flatten

LIBRARIES = {"npu": "torch_npu/lib/libtorch_npu.so", "atb": "torch_npu/lib/libop_plugin_atb.so"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "wheel" in metafunc.fixturenames:
        wheels = metafunc.config.getoption("--torch-npu-wheel", default=[]) or [None]
        metafunc.parametrize("wheel", wheels, ids=lambda wheel: "none" if wheel is None else Path(wheel).name)


def canonical(schema: str) -> str:
    """As torch prints it, whatever its spaces."""
    return str(torch._C.parse_schema(schema))


def schemas_of(library: bytes, name: str) -> set[str]:
    """All texts in a library that are a schema of this operator."""
    found, place = set(), -1
    while (place := library.find(f"{name}(".encode(), place + 1)) >= 0:
        text = re.match(rb"[ -~]+? -> [ -~]+", library[place : place + 10_000])
        if text is not None and not re.match(rb"[\w.]", library[place - 1 : place]):
            found.add(canonical(text[0].decode()))
    return found


def arguments_of(library: bytes, name: str) -> set[str]:
    """The types of its arguments, as the names of compiled functions carry them."""
    pattern = rb"CompileTimeFunctionPointerIF(\w+?)EXadL_ZN3atb%d%sE" % (len(name), name.encode())
    return {found.decode() for found in re.findall(pattern, library)}


def mangled(schema: str) -> str:
    """The same, of a schema without a result."""
    parts = []
    for argument in torch._C.parse_schema(schema).arguments:
        if str(argument.type) == "Tensor":
            is_first, is_written = "RKN2at6TensorE" not in parts, argument.is_out or argument.alias_info is not None
            parts.append("RS5_" if is_written else "RKN2at6TensorE" if is_first else "S7_")
        else:
            parts.append({"int": "l", "float": "d", "Optional[Tensor]": "RKSt8optionalIS5_E"}[str(argument.type)])
    return "v" + "".join(parts)


def given(wheel: str | None) -> str:
    """The wheel; skips a test without one."""
    if wheel is None:
        pytest.skip("no wheel of torch-npu was given: --torch-npu-wheel FILE")
    return wheel


@pytest.mark.parametrize("namespace", LIBRARIES)
def test_schemas_are_those_of_the_wheel(wheel: str | None, namespace: str) -> None:
    with zipfile.ZipFile(given(wheel)) as archive:
        library = archive.read(LIBRARIES[namespace])
    for schema in {"npu": NPU, "atb": ATB}[namespace]:
        found, mine = schemas_of(library, name_of(schema)), canonical(schema)
        if namespace == "atb" and not found:
            # Some builds keep these texts in pieces; the types of arguments are in one.
            found, mine = arguments_of(library, name_of(schema)), mangled(schema)
        assert mine in found, f"{name_of(schema)}: {mine} is not in the wheel, which has {found or 'none'}"


WITHOUT_META = {"npu_format_cast"}
"""Operators of which the wheels have no meta function."""


def test_results_have_the_shapes_of_the_wheels_meta_functions(wheel: str | None, npu: Npu) -> None:
    script = Path(__file__).with_name("wheel_meta.py")
    ran = subprocess.run([sys.executable, str(script), given(wheel)], check=True, capture_output=True, text=True)
    found = json.loads(ran.stdout)
    assert {name for name, shapes in found.items() if isinstance(shapes, str)} == WITHOUT_META, found
    for name in found.keys() - WITHOUT_META:
        results, _ = tree_flatten(call(name, VALID[name][1]()))
        mine = [[list(result.shape), str(result.dtype)] for result in results if result is not None]
        # The second result of attention is nothing unless it is asked for; of what shape, documents differ.
        compared = slice(1) if name == FUSED else slice(None)
        assert mine[compared] == found[name][compared], name


def test_other_schemas_are_told_apart() -> None:
    """The comparison sees a renamed argument, another default, and an operator that is missing."""
    library = b"\x00npu_swiglu(Tensor input, int dim=-1) -> Tensor\x00xnpu_swiglu_v2(Tensor x) -> Tensor\x00"
    assert canonical("npu_swiglu(Tensor input,int dim=-1)  ->  Tensor") in schemas_of(library, "npu_swiglu")
    for other in ("npu_swiglu(Tensor x, int dim=-1) -> Tensor", "npu_swiglu(Tensor input, int dim=1) -> Tensor"):
        assert canonical(other) not in schemas_of(library, "npu_swiglu")
    assert not schemas_of(library, "npu_rms_norm") and not schemas_of(library, "swiglu_v2")


def test_types_of_arguments_are_told_apart() -> None:
    schema = (
        "_npu_x(Tensor query, Tensor cache, int heads, float scale, Tensor(a!) out, *, Tensor? workspace=None) -> ()"
    )
    name = "vRKN2at6TensorES7_ldRS5_RKSt8optionalIS5_E"
    library = f"N3c10CompileTimeFunctionPointerIF{name}EXadL_ZN3atb6_npu_xES7_S7_ldS8_SC_EEEE".encode()
    assert arguments_of(library, "_npu_x") == {mangled(schema)} == {name}
    assert mangled(schema.replace("int heads", "float heads")) != name and not arguments_of(library, "_npu_y")
