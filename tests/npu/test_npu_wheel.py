"""The schemas that the simulated operators have, compared with those inside published wheels of torch-npu.

The wheels are read, never installed or imported: `--torch-npu-wheel FILE`, once or several times. docs/npu.md says how
to get one.
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest
import torch
from operator_schemas import ATB, NPU, name_of

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
    found = re.findall(rb"(?<![\w.])" + name.encode() + rb"\([ -~]*?\) -> [ -~]+", library)
    return {canonical(text.decode()) for text in found}


@pytest.mark.parametrize("namespace", LIBRARIES)
def test_schemas_are_those_of_the_wheel(wheel: str | None, namespace: str) -> None:
    if wheel is None:
        pytest.skip("no wheel of torch-npu was given: --torch-npu-wheel FILE")
    with zipfile.ZipFile(wheel) as archive:
        library = archive.read(LIBRARIES[namespace])
    for schema in {"npu": NPU, "atb": ATB}[namespace]:
        found = schemas_of(library, name_of(schema))
        assert canonical(schema) in found, f"{name_of(schema)}: the wheel has {found or 'none'}"


def test_other_schemas_are_told_apart() -> None:
    """The comparison sees a renamed argument, another default, and an operator that is missing."""
    library = b"\x00npu_swiglu(Tensor input, int dim=-1) -> Tensor\x00xnpu_swiglu_v2(Tensor x) -> Tensor\x00"
    assert canonical("npu_swiglu(Tensor input,int dim=-1)  ->  Tensor") in schemas_of(library, "npu_swiglu")
    for other in ("npu_swiglu(Tensor x, int dim=-1) -> Tensor", "npu_swiglu(Tensor input, int dim=1) -> Tensor"):
        assert canonical(other) not in schemas_of(library, "npu_swiglu")
    assert not schemas_of(library, "npu_rms_norm") and not schemas_of(library, "swiglu_v2")
