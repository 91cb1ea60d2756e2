"""Compiled kernels, and the threads they run on: those that torch computes with.

torch's CPU build brings an OpenMP runtime whose pool belongs to the thread that calls torch. The same threads run the
kernels here, so that no second pool competes for the cores. Invariant: a kernel is told how many threads share its
work, and its result must not depend on their number. Where that runtime is not found, the calling thread does it all.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from llvmlite import binding
from numba import cfunc, types

LOG = logging.getLogger(__name__)
SIGNATURE = types.void(types.CPointer(types.int64))
"""A kernel takes the address of its arguments, which are 64-bit words."""
thread_index = types.ExternalFunction("baton_thread_index", types.int32())
"""Inside a kernel: which of the threads this is, from 0."""
num_threads = types.ExternalFunction("baton_num_threads", types.int32())
"""Inside a kernel: how many threads run it."""
barrier = types.ExternalFunction("baton_barrier", types.void())
"""Inside a kernel: waits until all threads that run it are here."""
SHARE = 1 << 15
"""Elements read that are worth a thread of their own; starting one costs a few microseconds."""


def revision(folder: Path = Path(__file__).parent) -> int:
    """A number that changes with any source file of this package.

    Numba finds compiled code again by the source file of the kernel and the variables of its closure, and would miss
    changes of what the kernel calls; so every kernel's closure holds this.
    """
    sources = sorted(folder.glob("*.py"))
    digest = hashlib.blake2b(b"".join(source.read_bytes() for source in sources), digest_size=6)
    return int.from_bytes(digest.digest(), "little") | 1


class Kernel:
    """A compiled function of arguments at an address."""

    def __init__(self, function: Callable[[Any], None], fastmath: set[str]) -> None:
        """Compiles `function`, or loads what was compiled earlier on a CPU of this kind."""
        self._compiled = compile_or_load(function, fastmath)
        address = self._compiled.address
        self.address = address
        """Of the machine code."""
        self._brief = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(address)
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
        self._parallel = find_parallel()

    def __call__(self, arguments: int, size: int) -> None:
        """Runs it; `size` elements are read, which decides on threads. The arguments must stay until it returns."""
        if size < SHARE:
            # Giving up the interpreter lock for so short a time could cost the wait for it.
            self._brief(arguments)
            return
        wanted = min(torch.get_num_threads(), size // SHARE)
        if wanted > 1 and self._parallel is not None:
            self._parallel(self.address, arguments, wanted, 0)
        else:
            self._alone(arguments)


def compile_or_load(function: Callable[[Any], None], fastmath: set[str]) -> Any:
    """Machine code is kept on disk, beside the source or in the user's cache; where neither can be written, not."""
    provide_symbols()
    # Without Python's check of every divisor, which would keep loops from being vectorised.
    options = {"fastmath": fastmath, "error_model": "numpy"}
    try:
        return cfunc(SIGNATURE, cache=True, **options)(function)
    except RuntimeError as error:
        LOG.info("kernels are compiled at each start, since there is nowhere to keep them: %s", error)
        return cfunc(SIGNATURE, **options)(function)


def find_parallel() -> Any:
    """The OpenMP runtime's way to start threads, or None. It is among the symbols that torch has loaded."""
    library = ctypes.CDLL(None)
    if not all(hasattr(library, name) for name in ("GOMP_parallel", "GOMP_barrier")):
        return None
    parallel = library.GOMP_parallel
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


def provide_symbols() -> None:
    """Gives compiled code the functions it calls by name."""
    library = ctypes.CDLL(None)
    try:
        functions = [library.omp_get_thread_num, library.omp_get_num_threads, library.GOMP_barrier]
        addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
    except AttributeError:
        addresses = [number.address for number in _one_thread()]
    binding.add_symbol("baton_thread_index", addresses[0])
    binding.add_symbol("baton_num_threads", addresses[1])
    binding.add_symbol("baton_barrier", addresses[2])


@functools.cache
def _one_thread() -> tuple[Any, Any, Any]:
    """The answers where one thread does it all; kept, since compiled code holds their addresses."""
    return cfunc(types.int32())(lambda: 0), cfunc(types.int32())(lambda: 1), cfunc(types.void())(lambda: None)
