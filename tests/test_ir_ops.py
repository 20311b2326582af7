# SPDX-License-Identifier: Apache-2.0
"""RMSNorm in vLLM: torch ops, IR providers, and the class for a vLLM without IR."""

import types

import pytest
import torch

pytestmark = pytest.mark.vllm

# (leading shape, hidden size): one row, odd sizes, q/k norms in three axes.
SHAPES = [((1,), 64), ((7,), 80), ((5, 3), 96)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(scope="module")
def ops():
    from portable_backend import ir_ops

    ir_ops.register()
    return ir_ops


@pytest.fixture(scope="module")
def native():
    """vLLM's own formulas, to be compared with."""
    from vllm import ir

    return {
        name: getattr(ir.ops, name).impls["native"].impl_fn
        for name in ("rms_norm", "fused_add_rms_norm")
    }


def _inputs(shape, hidden, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, residual = (
        torch.randn(*shape, hidden, generator=generator).to(device, dtype)
        for _ in range(2)
    )
    weight = torch.randn(hidden, generator=generator).to(device, dtype)
    return x, residual, weight


def _assert_close(ours, theirs):
    # Two rounding steps of the largest value: the order of sums differs.
    step = torch.finfo(theirs.dtype).eps * theirs.abs().max().float()
    torch.testing.assert_close(
        ours.float(), theirs.float(), atol=2 * float(step), rtol=0
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "hidden"), SHAPES)
def test_rms_norm_agrees_with_vllms_formula(ops, native, device, shape, hidden, dtype):
    x, _, weight = _inputs(shape, hidden, dtype, device)
    before = x.clone()
    _assert_close(
        torch.ops.portable_backend.rms_norm(x, weight, 1e-5),
        native["rms_norm"](x, weight, 1e-5),
    )
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "hidden"), SHAPES)
def test_fused_add_overwrites_both_inputs(ops, native, device, shape, hidden, dtype):
    x, residual, weight = _inputs(shape, hidden, dtype, device)
    normed, total = native["fused_add_rms_norm"](x, residual, weight, 1e-5)
    torch.ops.portable_backend.fused_add_rms_norm(x, residual, weight, 1e-5)
    _assert_close(x, normed)
    assert torch.equal(residual, total)


def test_gemmas_fp32_weight_beside_bf16_input(ops, native, device):
    # vllm#55311: (1 + w) in fp32; the product is rounded once.
    x, _, weight = _inputs((9,), 64, torch.bfloat16, device)
    weight = weight.float() + 1
    ours = torch.ops.portable_backend.rms_norm(x, weight, 1e-6)
    assert ours.dtype == torch.bfloat16
    _assert_close(ours, native["rms_norm"](x, weight, 1e-6))


def test_a_norm_without_weight(ops, native, device):
    x, _, _ = _inputs((4,), 64, torch.float32, device)
    _assert_close(
        torch.ops.portable_backend.rms_norm(x, None, 1e-5),
        native["rms_norm"](x, None, 1e-5),
    )


def test_strided_rows_as_of_a_fused_projection(ops, native, device):
    qkv, _, _ = _inputs((6,), 192, torch.float32, device)
    _, _, weight = _inputs((6,), 64, torch.float32, device)
    keys = qkv[:, 64:128]
    ours = torch.ops.portable_backend.rms_norm(keys, weight, 1e-5)
    _assert_close(ours, native["rms_norm"](keys, weight, 1e-5))


def test_fake_tensors_get_shape_dtype_and_plain_strides(ops):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(6, 192, dtype=torch.bfloat16)[:, 64:128]
        weight = torch.empty(64, dtype=torch.bfloat16)
        out = torch.ops.portable_backend.rms_norm(x, weight, 1e-5)
        nothing = torch.ops.portable_backend.fused_add_rms_norm(x, x, weight, 1e-5)
    assert (out.shape, out.dtype, out.stride()) == (x.shape, x.dtype, (64, 1))
    assert nothing is None


def test_torch_accepts_the_ops_schemas(ops, device):
    # Aliasing, fake and dynamic shapes against what the ops really do.
    x, residual, weight = _inputs((3,), 64, torch.float32, device)
    for op, args in (
        (torch.ops.portable_backend.rms_norm, (x, weight, 1e-5)),
        (torch.ops.portable_backend.fused_add_rms_norm, (x, residual, weight, 1e-5)),
    ):
        torch.library.opcheck(
            op.default, args, test_utils=("test_schema", "test_faketensor")
        )


def test_providers_are_registered_once(ops):
    from vllm import ir

    ops.register()
    for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm):
        impl = op.impls["portable"]
        assert impl.supported
        assert impl.inplace == (op.name == "fused_add_rms_norm")


def test_ir_dispatches_to_our_provider(ops, native, device):
    from vllm import ir

    from portable_backend.kernels import launch_counts

    x, residual, weight = _inputs((5,), 64, torch.float32, device)
    kept = x.clone(), residual.clone()
    before = launch_counts(device)
    with (
        ir.ops.rms_norm.set_priority(["portable", "native"]),
        ir.ops.fused_add_rms_norm.set_priority(["portable", "native"]),
    ):
        _assert_close(
            ir.ops.rms_norm(x, weight, 1e-5), native["rms_norm"](x, weight, 1e-5)
        )
        normed, total = ir.ops.fused_add_rms_norm(x, residual, weight, 1e-5)
        # The functional form must not touch its inputs though our provider does.
        assert torch.equal(x, kept[0])
        assert torch.equal(residual, kept[1])
        expected = native["fused_add_rms_norm"](x, residual, weight, 1e-5)
        _assert_close(normed, expected[0])
        assert torch.equal(total, expected[1])
    after = launch_counts(device)
    assert after["rms_norm"] == before["rms_norm"] + 1
    assert after["fused_add_rms_norm"] == before["fused_add_rms_norm"] + 1


def test_ir_passes_over_our_provider_for_arguments_it_lacks(ops, native, device):
    from vllm import ir

    x, _, weight = _inputs((5,), 64, torch.float32, device)
    with ir.ops.rms_norm.set_priority(["portable", "native"]):
        assert ir.ops.rms_norm.dispatch(x, weight, 1e-5).provider == "portable"
        assert ir.ops.rms_norm.dispatch(x, weight, 1e-5, 32).provider == "native"
        ours = ir.ops.rms_norm(x, weight, 1e-5, 32)
    assert torch.equal(ours, native["rms_norm"](x, weight, 1e-5, 32))


def test_supports_args_answers_bool_for_symbolic_sizes(ops):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        size = mode.shape_env.create_unbacked_symint()
        x = torch.empty(size, 64)
        weight = torch.empty(64)
        assert ops.supports_rms_norm(x, weight, 1e-5) is True
        assert ops.supports_fused_add_rms_norm(x, x, weight, 1e-5) is True
        assert ops.supports_rms_norm(x.double(), weight, 1e-5) is False
        assert ops.supports_rms_norm(x.t(), weight, 1e-5) is False
        assert ops.supports_fused_add_rms_norm(x, x.half(), weight, 1e-5) is False


def _norm_layer(monkeypatch, ops, *, backend, setting="auto", variance_size=None):
    """vLLM's RMSNorm under our class, made under a config that selects `backend`."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm

    from portable_backend import settings

    monkeypatch.setenv("PORTABLE_BACKEND_RMS_NORM", setting)
    settings.get_settings.cache_clear()
    config = VllmConfig()
    config.attention_config = types.SimpleNamespace(backend=backend)
    with set_current_vllm_config(config):
        layer = ops.portable_norm_class(RMSNorm)(64, 1e-5, variance_size)
    settings.get_settings.cache_clear()
    return layer


def test_the_class_for_a_vllm_without_ir_uses_our_kernel(
    ops, native, device, monkeypatch
):
    from portable_backend.kernels import launch_counts
    from portable_backend.plugin import ensure_member

    layer = _norm_layer(monkeypatch, ops, backend=ensure_member()).to(device)
    x, residual, weight = _inputs((5,), 64, torch.float32, device)
    layer.weight.data.copy_(weight)
    expected = native["fused_add_rms_norm"](x, residual, weight, 1e-5)
    before = launch_counts(device)
    _assert_close(layer(x), native["rms_norm"](x, weight, 1e-5))
    normed, total = layer(x, residual)
    _assert_close(normed, expected[0])
    assert torch.equal(total, expected[1])
    after = launch_counts(device)
    assert after["rms_norm"] == before["rms_norm"] + 1
    assert after["fused_add_rms_norm"] == before["fused_add_rms_norm"] + 1


@pytest.mark.parametrize(
    ("selected", "setting", "variance_size"),
    [(False, "auto", None), (True, "off", None), (True, "on", 32)],
    ids=["another back end", "switched off", "partial variance"],
)
def test_the_class_for_a_vllm_without_ir_steps_aside(
    ops, native, device, monkeypatch, selected, setting, variance_size
):
    from portable_backend.kernels import launch_counts
    from portable_backend.plugin import ensure_member

    layer = _norm_layer(
        monkeypatch,
        ops,
        backend=ensure_member() if selected else None,
        setting=setting,
        variance_size=variance_size,
    ).to(device)
    x, _, _ = _inputs((5,), 64, torch.float32, device)
    before = launch_counts(device)
    expected = native["rms_norm"](x, layer.weight.data, 1e-5, variance_size)
    assert torch.equal(layer.forward_native(x), expected)
    assert launch_counts(device) == before
