"""From a device number to an NPU that answers: the guarded import of torch_npu, and what is missing where it fails.

Owns the diagnosis, in the order in which a host is set up: wheel, pair of versions, CANN, driver, devices. Nothing of
torch_npu is imported before it is asked for, so that a host without NPUs needs none of it.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from kernels import DeviceUnavailable, MemoryBytes

MISSING_PARTS = (
    ("libatb", "NNAL is missing, or its nnal/atb/set_env.sh was not sourced"),
    ("libascend_hal", "the NPU driver is missing, or its libraries are not mounted into this container"),
    ("libdrvdsmi", "the NPU driver is missing, or its libraries are not mounted into this container"),
    ("undefined symbol", "torch, torch_npu and CANN are not of versions that belong together"),
    ("cannot open shared object", "CANN is missing, or its ascend-toolkit/set_env.sh was not sourced"),
    ("ASCEND_", "CANN's environment is incomplete: source its ascend-toolkit/set_env.sh"),
)
"""What a failed import says, and what that means; the first that fits."""
SEE = "see docs/npu.md"


def open_npu(index: int) -> torch.device:
    """Makes NPU `index` the one of this thread. Raises DeviceUnavailable, saying what is missing."""
    check_wheels()
    npu = import_npu()
    count = npu.device_count()
    if not count:
        raise DeviceUnavailable(
            "no NPU is visible: the driver is missing, /dev/davinci* is not in this container, or "
            f"ASCEND_RT_VISIBLE_DEVICES names none; {SEE}"
        )
    if index >= count:
        raise DeviceUnavailable(f"npu:{index} does not exist: this process sees {count}, npu:0 to npu:{count - 1}")
    name = npu.get_device_name(index)
    if "310" in name:
        raise DeviceUnavailable(f"npu:{index} is an {name}, which keeps KV in another form; Atlas A2 and A3 are known")
    npu.set_device(index)
    npu.set_compile_mode(jit_compile=False)  # operators as CANN brings them, not compiled anew for each shape
    npu.config.allow_internal_format = True  # without it a weight stays in the usual format
    return npu_device(index)


def npu_device(index: int) -> torch.device:
    """As torch names it, which it can only after the import of torch_npu."""
    return torch.device("npu", index)


def check_wheels() -> None:
    """Raises DeviceUnavailable unless torch_npu is installed and made for this torch."""
    try:
        installed = version("torch_npu")
    except PackageNotFoundError:
        raise DeviceUnavailable(
            f"torch_npu is not installed: pip install 'baton-llm[npu]' -c constraints-npu.txt; {SEE}"
        ) from None
    if torch.version.cuda is not None:
        raise DeviceUnavailable(f"torch {torch.__version__} is built for CUDA; NPUs need the build for CPUs; {SEE}")
    if installed.split(".")[:3] != torch.__version__.partition("+")[0].split(".")[:3]:
        raise DeviceUnavailable(
            f"torch_npu {installed} does not belong to torch {torch.__version__}: the first three numbers must be "
            f"equal; {SEE}"
        )


def import_npu() -> Any:
    """`torch_npu.npu`. Raises DeviceUnavailable where the import fails."""
    try:
        module = importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        text = str(error)
        reason = next((reason for sign, reason in MISSING_PARTS if sign in text), "torch_npu cannot be imported")
        raise DeviceUnavailable(f"{reason}: {text}; {SEE}") from error
    return module.npu


def memory_bytes(index: int) -> MemoryBytes:
    """Of the NPU as a whole, whoever uses it."""
    free, total = import_npu().mem_get_info(index)
    return MemoryBytes(free=free, total=total)
