# SPDX-License-Identifier: Apache-2.0
"""What compiled code does: its size, its matrix instructions, its widest load.

Read from the assembly that Triton keeps beside a binary, PTX or AMD's.
"""

import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any

_EXECUTABLE = 0x4  # of an ELF section's flags
_MATRIX = re.compile(
    r"^\s*(?:@%\w+\s+)?(?:wgmma\.mma_async|mma\.sync|wmma\.mma|tcgen05\.mma"
    r"|v_s?mfma|v_swmmac|v_wmma)",
    re.M,
)
# ld.global.v4.b32, with any cache hints in between.
_PTX_LOAD = re.compile(r"\bld\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.[bsuf](\d+)\b")
_PTX_COPY = re.compile(
    r"\bcp\.async\.c[ag]\.shared\.global(?:\.[\w:]+)*\s*\[[^\]]*\],\s*\[[^\]]*\],"
    r"\s*(0x[0-9a-fA-F]+|\d+)"
)
_PTX_BULK = re.compile(r"\bcp\.async\.bulk(?:\.[\w:]+)*\.shared")
# global_load_dwordx4, buffer_load_b128.
_AMD_LOAD = re.compile(
    r"\b(?:global|buffer|flat)_load_(?:(lds_)?dword(?:x(\d))?|b(\d+)|([us]?short|d16))"
)
_BULK_BYTES = 16  # at least


def read_code(asm: Mapping[str, Any]) -> dict[str, int | None]:
    """Fields of a `Readout`: code_bytes, matrix_instructions and load_bytes.

    Args:
        asm: of Triton's CompiledKernel, by kind; what is missing gives None.
    """
    binary = asm.get("cubin") or asm.get("hsaco")
    text = asm.get("ptx") or asm.get("amdgcn")
    found: dict[str, int | None] = dict.fromkeys(
        ("code_bytes", "matrix_instructions", "load_bytes")
    )
    if isinstance(binary, bytes):
        found["code_bytes"] = code_bytes(binary)
    if isinstance(text, str):
        found["matrix_instructions"] = len(_MATRIX.findall(text))
        found["load_bytes"] = max(_load_widths(text), default=0)
    return found


def code_bytes(binary: bytes) -> int | None:
    """Size of the instructions of a cubin or hsaco; None where it is none."""
    if binary[:4] != b"\x7fELF":
        return None
    (offset,) = struct.unpack_from("<Q", binary, 0x28)
    size, number = struct.unpack_from("<HH", binary, 0x3A)
    total = 0
    for i in range(number):
        _, _, flags, _, _, length = struct.unpack_from(
            "<IIQQQQ", binary, offset + i * size
        )
        total += length if flags & _EXECUTABLE else 0
    return total


def _load_widths(text: str) -> Iterator[int]:
    """Bytes of a lane of each load from global memory."""
    for vector, bits in _PTX_LOAD.findall(text):
        yield int(vector or 1) * int(bits) // 8
    for width in _PTX_COPY.findall(text):
        yield int(width, 0)
    if _PTX_BULK.search(text):
        yield _BULK_BYTES
    for _, dwords, bits, short in _AMD_LOAD.findall(text):
        yield 2 if short else int(bits) // 8 if bits else 4 * int(dwords or 1)
