# SPDX-License-Identifier: Apache-2.0
"""The shortcuts through Triton's interpreter change no result."""

import subprocess
import sys
import textwrap

import pytest
import torch
import triton
import triton.language as tl

from portable_backend.kernels._interpreter import quicken

pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="of the interpreter"
)


@triton.jit
def _sums_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < size, other=0)
    total = tl.zeros([1], tl.float32) + tl.sum(x.to(tl.float32), 0)
    tl.store(out_ptr + tl.arange(0, 1), total + tl.cdiv(size, 4))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.float32, torch.int8, torch.int64, torch.uint8]
)
def test_dtypes_and_library_functions_work(dtype):
    x = torch.arange(10).to(dtype)
    out = torch.zeros(1)
    for _ in range(2):
        _sums_kernel[(1,)](x, out, 10, BLOCK=16)
        assert out.item() == 45 + 3


def test_it_is_done_once():
    from triton.runtime.interpreter import InterpretedFunction

    quicken()  # as importing the kernels does
    before = InterpretedFunction.__call__
    assert before.quick
    quicken()
    assert InterpretedFunction.__call__ is before


def _run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(code)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout.strip()


def test_an_interpreter_of_another_make_is_left_alone():
    assert "as it was" in _run(
        """
        from triton.runtime import interpreter
        del interpreter._get_np_dtype
        call = interpreter.InterpretedFunction.__call__
        from portable_backend.kernels._interpreter import quicken
        quicken()
        if interpreter.InterpretedFunction.__call__ is call: print("as it was")
        """
    )


@pytest.mark.parametrize(("debug", "checks"), [("0", "False"), ("1", "True")])
def test_overflow_is_looked_for_when_debugging(debug, checks, monkeypatch):
    monkeypatch.setenv("TRITON_DEBUG", debug)
    code = """
        import portable_backend.kernels.attention
        from triton.runtime.interpreter import interpreter_builder
        print(interpreter_builder.options.sanitize_overflow)
        """
    assert _run(code) == checks
