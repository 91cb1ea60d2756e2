"""Names of the devices that workers compute on: "cpu", or a kind and a number, "npu:0".

Owns the form of these names, which the command line and configurations share. Whether there is such a device is known
where it is opened (`kernels`).
"""

from __future__ import annotations

import re

from runtime.errors import ConfigError

KINDS = ("npu", "cuda")
"""Of devices with a number; without one they mean number 0, or where several workers are started, one device each."""


def check_device(device: str, model: str) -> None:
    """Raises ConfigError for what is no device, or none for this model."""
    if model == "tracer" and device != "cpu":
        raise ConfigError(f"--device: the tracer computes nothing, so only cpu is accepted, got {device!r}")
    if not re.fullmatch(rf"cpu|({'|'.join(KINDS)})(:\d{{1,3}})?", device):
        raise ConfigError(f"--device: must be cpu, npu:N or cuda:N, got {device!r}")


def device_of_rank(device: str, rank: int) -> str:
    """The device of a worker's rank, where `device` is that of its first: the numbers after it."""
    kind, _, number = device.partition(":")
    return device if kind == "cpu" else f"{kind}:{int(number or 0) + rank}"


def device_kind(device: str) -> str:
    """The name without its number."""
    return device.partition(":")[0]
