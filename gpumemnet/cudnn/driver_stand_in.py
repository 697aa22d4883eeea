"""A shared library in place of the CUDA driver's ``libcuda.so.1``, for machines without a driver.

cuDNN's run-time compiled engines are linked to six functions of the driver.  To list plans, cuDNN
needs them to be there and to return 0.  The library is made in memory, byte by byte, so that no
compiler is needed, and no file is left that another
program could load.  Format: System V ABI, "Object files" and "Program loading and dynamic linking".
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Sequence
from typing import Final

DRIVER_NAME: Final = "libcuda.so.1"
DRIVER_FUNCTIONS: Final = (
    *("cuGetErrorString", "cuModuleGetFunction", "cuModuleLoadData", "cuModuleUnload"),
    *("cuTensorMapEncodeIm2col", "cuTensorMapEncodeTiled"),
)

_MACHINES: Final = {
    "x86_64": (62, bytes.fromhex("31c0c3")),
    "aarch64": (183, bytes.fromhex("00008052c0035fd6")),
}
"""Machine → its number in the ELF header, and the code of a function that returns 0."""
_PAGE: Final = 0x10000
_HEADER_BYTES: Final = 64
_SEGMENT_BYTES: Final = 56
_SYMBOL_BYTES: Final = 24
_DYNAMIC: Final = {
    "NULL": 0,
    "HASH": 4,
    "STRTAB": 5,
    "SYMTAB": 6,
    "STRSZ": 10,
    "SYMENT": 11,
    "SONAME": 14,
}
_LOAD, _DYNAMIC_SEGMENT, _STACK = 1, 2, 0x6474E551
_EXECUTE, _WRITE, _READ = 1, 2, 4


def load_driver_stand_in() -> None:
    """Load the stand-in into this process: libraries loaded later that need ``libcuda.so.1`` get
    it.

    Raises:
        OSError: this machine is neither x86-64 nor AArch64 Linux.
    """
    descriptor = os.memfd_create(DRIVER_NAME)
    os.write(descriptor, shared_library(DRIVER_NAME, DRIVER_FUNCTIONS))
    ctypes.CDLL(f"/proc/self/fd/{descriptor}", mode=ctypes.RTLD_GLOBAL)


def shared_library(name: str, functions: Sequence[str]) -> bytes:
    """Return an ELF shared library called ``name`` whose ``functions`` return 0.

    Raises:
        OSError: this machine is neither x86-64 nor AArch64.
    """
    if platform.machine() not in _MACHINES:
        raise OSError(f"no stand-in for {name} on {platform.machine()}")
    machine, code = _MACHINES[platform.machine()]
    names, places = b"\0", []
    for each in (*functions, name):
        places.append(len(names))
        names += each.encode() + b"\0"
    count = len(functions) + 1
    hashes = struct.pack(
        f"<{3 + count}I", 1, count, 1, *[0, *range(2, count), 0][:count]
    )  # one chain of all symbols
    segments_end = _HEADER_BYTES + 4 * _SEGMENT_BYTES
    at_symbols = segments_end
    at_hashes = at_symbols + count * _SYMBOL_BYTES
    at_names = at_hashes + len(hashes)
    at_code = (at_names + len(names) + 15) // 16 * 16
    end = at_code + len(code)
    symbols = bytes(_SYMBOL_BYTES) + b"".join(
        struct.pack("<IBBHQQ", place, 0x12, 0, 1, at_code, len(code)) for place in places[:-1]
    )
    dynamic = b"".join(
        struct.pack("<QQ", _DYNAMIC[tag], value)
        for tag, value in (
            *(
                ("SONAME", places[-1]),
                ("HASH", at_hashes),
                ("STRTAB", at_names),
                ("SYMTAB", at_symbols),
            ),
            *(("STRSZ", len(names)), ("SYMENT", _SYMBOL_BYTES), ("NULL", 0)),
        )
    )
    segments = b"".join(
        struct.pack("<IIQQQQQQ", kind, flags, at, at, at, size, size, alignment)
        for kind, flags, at, size, alignment in (
            (_LOAD, _READ | _EXECUTE, 0, end, _PAGE),
            (_LOAD, _READ | _WRITE, _PAGE, len(dynamic), _PAGE),
            (_DYNAMIC_SEGMENT, _READ | _WRITE, _PAGE, len(dynamic), 8),
            (_STACK, _READ | _WRITE, 0, 0, 16),
        )
    )
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        *(b"\x7fELF\x02\x01\x01", 3, machine, 1, 0, _HEADER_BYTES, 0, 0),
        *(_HEADER_BYTES, _SEGMENT_BYTES, 4, 64, 0, 0),
    )
    front = (header + segments + symbols + hashes + names).ljust(at_code, b"\0") + code
    return front.ljust(_PAGE, b"\0") + dynamic
