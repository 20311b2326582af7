# SPDX-License-Identifier: Apache-2.0
"""Rounding that is the same on every target, Triton's CPU interpreter included."""

import triton.language as tl

from portable_backend.kernels._jit import device_function


@device_function
def round_to(x, dtype: tl.constexpr, EMULATE_BF16: tl.constexpr):
    """fp32 x rounded to the nearest value of `dtype`, ties to even.

    The interpreter truncates fp32 to bf16; with EMULATE_BF16 the rounding is done on
    the bits first.
    """
    if EMULATE_BF16 and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)
