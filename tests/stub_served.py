# SPDX-License-Identifier: Apache-2.0
"""Chosen configs of norms and cache writes on a stub GPU: run by test_served.py.

Not collected by itself, since Triton's interpreter must be off before triton loads.
"""

import pytest
import torch
from stub_driver import stub_gpu

from portable_backend.kernels import rms_norm, served, write_kv_cache
from portable_backend.kernels.config import KernelConfig
from portable_backend.kernels.kv_cache_space import VECTOR_BUCKET

BF16 = torch.bfloat16
HEADS, SIZE, BLOCK = 2, 64, 16
PER_TOKEN = HEADS * SIZE // 8  # vectors of a token
SMALL = KernelConfig.of(ROWS=4, num_warps=2)
LARGE = KernelConfig.of(ROWS=8, num_warps=4)
FEW = KernelConfig.of(VECTORS=64, num_warps=2)
MANY = KernelConfig.of(VECTORS=512, num_warps=8)


@pytest.fixture
def gpu():
    with stub_gpu("cuda") as gpu:
        yield gpu
        served.forget()


def norm(rows, *, size=256, fused=False, dtype=BF16, config=None):
    x = torch.zeros(rows, size, dtype=dtype)
    residual = torch.zeros_like(x) if fused else None
    return lambda: rms_norm(x, None, 1e-5, residual=residual, config=config)


def write(tokens, *, heads=HEADS, config=None):
    new = torch.zeros(tokens, heads, SIZE, dtype=BF16)
    cache = torch.zeros(4, BLOCK, heads, SIZE, dtype=BF16)
    other, slots = torch.zeros_like(cache), torch.full((tokens,), -1)
    return lambda: write_kv_cache(new, new, cache, other, slots, config=config)


def launched(gpu, call):
    """(tile, programs) of the one launch that `call` makes."""
    (launch,) = gpu.record(call)
    name = "ROWS" if "norm" in launch.kernel else "VECTORS"
    return launch.specialised[name].constant, launch.grid[0]


def test_each_step_of_rows_has_its_config(gpu):
    default = {rows: launched(gpu, norm(rows)) for rows in (1, 16, 17, 100, 1000)}
    served.serve({(BF16, 256, False): served.Steps((16, 64), (SMALL, LARGE))})
    assert launched(gpu, norm(1)) == (4, 1)
    assert launched(gpu, norm(16)) == (4, 4)
    assert launched(gpu, norm(17)) == (8, 3)
    assert launched(gpu, norm(1000)) == (8, 125)  # as the last step
    served.forget()
    assert {rows: launched(gpu, norm(rows)) for rows in default} == default


@pytest.mark.parametrize(
    "other", [{"size": 512}, {"fused": True}, {"dtype": torch.float16}], ids=str
)
def test_norms_of_another_kind_keep_the_default(gpu, other):
    default = launched(gpu, norm(16, **other))
    served.serve({(BF16, 256, False): served.Steps((16,), (LARGE,))})
    assert launched(gpu, norm(16)) == (8, 2)
    assert launched(gpu, norm(16, **other)) == default


def test_a_step_without_a_config_keeps_the_default(gpu):
    default = launched(gpu, norm(16)), launched(gpu, write(16))
    served.serve(
        {(BF16, 256, False): served.Steps((16, 64), (None, LARGE))},
        {(BF16, SIZE, HEADS): served.Steps((16, 64), (None, MANY))},
    )
    assert (launched(gpu, norm(16)), launched(gpu, write(16))) == default
    assert launched(gpu, norm(64)) == (8, 8)
    assert launched(gpu, write(64)) == (512, 2)


def test_a_config_of_the_call_goes_before(gpu):
    served.serve(
        {(BF16, 256, False): served.Steps((16,), (LARGE,))},
        {(BF16, SIZE, HEADS): served.Steps((16,), (MANY,))},
    )
    assert launched(gpu, norm(16, config=SMALL)) == (4, 4)
    assert launched(gpu, write(16, config=FEW)) == (64, 16 * PER_TOKEN // 64)


def test_each_step_of_tokens_has_its_config(gpu):
    far = VECTOR_BUCKET // PER_TOKEN
    default = {tokens: launched(gpu, write(tokens)) for tokens in (1, 16, 17, far + 1)}
    served.serve(writes={(BF16, SIZE, HEADS): served.Steps((16, far), (FEW, MANY))})
    assert launched(gpu, write(1)) == (64, 1)
    assert launched(gpu, write(16)) == (64, 16 * PER_TOKEN // 64)
    assert launched(gpu, write(17)) == (512, 1)
    assert launched(gpu, write(far)) == (512, VECTOR_BUCKET // 512)
    assert launched(gpu, write(far + 1)) == (512, VECTOR_BUCKET // 512 + 1)
    assert launched(gpu, write(16, heads=1))[0] == default[16][0]
    served.forget()
    assert {tokens: launched(gpu, write(tokens)) for tokens in default} == default


def test_defaults_change_where_they_did_within_a_step(gpu):
    far = VECTOR_BUCKET // PER_TOKEN
    default = {tokens: launched(gpu, write(tokens)) for tokens in (far, far + 1)}
    assert len({tile for tile, _ in default.values()}) == 2
    sizes = (16, 2 * far)
    served.serve(writes={(BF16, SIZE, HEADS): served.Steps(sizes, (FEW, None))})
    assert launched(gpu, write(16))[0] == 64
    assert {tokens: launched(gpu, write(tokens)) for tokens in default} == default


def test_steps_that_share_a_config_share_a_launch(gpu):
    sizes, configs = (16, 64, 256), (MANY, MANY, MANY)
    served.serve(writes={(BF16, SIZE, HEADS): served.Steps(sizes, configs)})
    functions = {gpu.record(write(n))[0].function for n in (1, 17, 65, 300)}
    assert len(functions) == 1


def test_what_does_not_change_is_not_bound_anew(gpu):
    steps = {(BF16, 256, False): served.Steps((16,), (SMALL,))}
    served.serve(steps)
    launched(gpu, norm(16))
    dispatched = gpu.dispatched
    served.serve(steps)
    launched(gpu, norm(16))
    assert gpu.dispatched == dispatched
