# SPDX-License-Identifier: Apache-2.0
"""RMSNorm for vLLM: opaque torch ops, and the two ways into vLLM's layers.

The ops are opaque to torch.compile on purpose: vLLM lowers its IR by tracing providers
with fake tensors, which a kernel launch cannot take, and a config chosen by token count
must not be frozen into a compile cache.

vLLM keys its compile cache by the text of this file. A changed op schema gets a new op
name. No `from __future__ import annotations` here: vLLM compares provider signatures.
"""

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from portable_backend.device import interpreting
from portable_backend.plugin import PROVIDER, is_selected, norm_is_enabled

logger = logging.getLogger("vllm.portable_backend")

# Library objects must live as long as their ops.
_LIBRARY = torch.library.Library("portable_backend", "FRAGMENT")
_LIBRARY.define("rms_norm(Tensor x, Tensor? weight, float eps) -> Tensor")
_LIBRARY.define(
    "fused_add_rms_norm(Tensor(a!) x, Tensor(b!) residual, Tensor? weight, float eps)"
    " -> ()"
)


@functools.cache
def _kernel() -> Callable[..., Any]:
    """Imported late, since it brings Triton; once, since each import takes time."""
    from portable_backend.kernels import rms_norm as kernel

    return kernel


def _rms_norm_op(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    out = _kernel()(x, weight, eps)
    assert isinstance(out, Tensor)
    return out


def _fused_add_rms_norm_op(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> None:
    _kernel()(x, weight, eps, residual=residual, out=x, residual_out=residual)


def _rms_norm_fake(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    # Contiguous, as the kernel allocates it, whatever x's strides.
    return x.new_empty(x.shape)


def _fused_add_rms_norm_fake(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> None:
    return


for _key in ("CUDA", "CPU"):  # ROCm's key is CUDA too
    _LIBRARY.impl("rms_norm", _rms_norm_op, _key)
    _LIBRARY.impl("fused_add_rms_norm", _fused_add_rms_norm_op, _key)
# What fake tensors run; register_fake would search all of sys.modules for this file.
_LIBRARY.impl("rms_norm", _rms_norm_fake, "Meta")
_LIBRARY.impl("fused_add_rms_norm", _fused_add_rms_norm_fake, "Meta")


# Providers: signatures, defaults and names are those of vllm.ir.ops.


def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    """Provider of vllm.ir.ops.rms_norm."""
    out: Tensor = torch.ops.portable_backend.rms_norm.default(x, weight, epsilon)
    return out


def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Provider of vllm.ir.ops.fused_add_rms_norm; x and x_residual are overwritten."""
    op = torch.ops.portable_backend.fused_add_rms_norm.default
    op(x, x_residual, weight, epsilon)
    return x, x_residual


_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _fits(x: Tensor, weight: Tensor | None) -> bool:
    # Dtypes, ranks and last strides only: sizes can be symbolic here.
    if x.dtype not in _DTYPES or x.dim() < 1 or x.stride(-1) != 1:
        return False
    return weight is None or (
        weight.dtype in _DTYPES and weight.dim() == 1 and weight.stride(0) == 1
    )


def supports_rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return variance_size is None and _fits(x, weight)


def supports_fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return (
        variance_size is None
        and x.dtype == x_residual.dtype
        and x.dim() == x_residual.dim()
        and x_residual.stride(-1) == 1
        and _fits(x, weight)
    )


def has_ir() -> bool:
    """Whether this vLLM dispatches norms through its IR ops."""
    return importlib.util.find_spec("vllm.ir") is not None


def is_registered() -> bool:
    """Whether vLLM's IR knows our providers."""
    if not has_ir():
        return False
    from vllm import ir

    return PROVIDER in ir.ops.rms_norm.impls


def register() -> None:
    """Make the norms available to vLLM; idempotent. Selecting them is another step."""
    if has_ir():
        _register_providers()
    else:
        _register_layer()


def _register_providers() -> None:
    from vllm import ir
    from vllm.platforms import current_platform

    if is_registered():
        return
    supported = current_platform.is_cuda_alike() or (
        current_platform.is_cpu() and interpreting()
    )
    ir.ops.rms_norm.register_impl(
        PROVIDER, supported=supported, supports_args=supports_rms_norm
    )(rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(
        PROVIDER,
        supported=supported,
        supports_args=supports_fused_add_rms_norm,
        inplace=True,
    )(fused_add_rms_norm)


def _register_layer() -> None:
    """For a vLLM without IR ops: an out-of-tree class that takes RMSNorm's place."""
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.layernorm import RMSNorm

    if "RMSNorm" not in op_registry_oot:
        RMSNorm.register_oot(name="RMSNorm")(portable_norm_class(RMSNorm))
    elif not hasattr(op_registry_oot["RMSNorm"], "uses_portable_kernel"):
        logger.warning(
            "Another plug-in provides RMSNorm; portable-backend's is not used."
        )


def portable_norm_class(base: type) -> type:
    """Subclass vLLM's RMSNorm so that it calls our ops where PORTABLE is selected."""

    class PortableRMSNorm(base):
        uses_portable_kernel = False

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            from vllm.config import get_current_vllm_config_or_none

            config = get_current_vllm_config_or_none()
            self.uses_portable_kernel = (
                config is not None
                and is_selected(config)
                and norm_is_enabled()
                and getattr(self, "variance_size_override", None) is None
            )

        def forward_native(
            self, x: Tensor, residual: Tensor | None = None
        ) -> Tensor | tuple[Tensor, Tensor]:
            if not self.uses_portable_kernel:
                result: Tensor | tuple[Tensor, Tensor]
                result = super().forward_native(x, residual)
                return result
            weight = self.weight.data if getattr(self, "has_weight", True) else None
            if residual is None:
                return rms_norm(x, weight, self.variance_epsilon)
            return fused_add_rms_norm(x, residual, weight, self.variance_epsilon)

        def forward_cuda(
            self, x: Tensor, residual: Tensor | None = None
        ) -> Tensor | tuple[Tensor, Tensor]:
            if not self.uses_portable_kernel:
                result: Tensor | tuple[Tensor, Tensor]
                result = super().forward_cuda(x, residual)
                return result
            return self.forward_native(x, residual)

    return PortableRMSNorm
