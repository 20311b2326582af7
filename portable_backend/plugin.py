# SPDX-License-Identifier: Apache-2.0
"""vLLM's entry points: they make `--attention-backend portable` a known name.

`register` runs in every vLLM process (API server, engine core, workers, model
inspection) before the back end is known, so it touches no GPU, imports neither Triton
nor a kernel, and never raises: an exception here would break vLLM for everyone on the
machine. `add_member_only` runs earlier, while vllm.config is being imported, so that
a config can be parsed or unpickled before general plug-ins are loaded.
"""

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

NAME = "PORTABLE"
PATH = "portable_backend.backend.PortableBackend"
# Provider of RMSNorm in vLLM's IR op priorities.
PROVIDER = "portable"
NORM_OPS = ("rms_norm", "fused_add_rms_norm")

# Below "vllm", whose handlers print it.
logger = logging.getLogger("vllm.portable_backend")

# As the user has it: vLLM sets it, too, later on.
TRITON_CACHE_AT_START = os.environ.get("TRITON_CACHE_DIR")

# This process works for another one that has selected PORTABLE.
_config_came_pickled = False


def register() -> None:
    """Entry point of group vllm.general_plugins; idempotent."""
    _attempt(_apply_log_level)
    _attempt(ensure_member)
    _attempt(patch_cpu_selection)
    _attempt(patch_norm_priority)
    _attempt(provide_norm)


def _attempt(step: Callable[..., Any], *args: Any) -> None:
    try:
        step(*args)
    except Exception:
        # The one broad except: vLLM does not catch what a plug-in raises.
        logger.exception(
            "portable-backend: %s failed; vLLM goes on without it. "
            "`--attention-backend portable` may be unknown or incomplete.",
            step.__name__,
        )


def add_member_only() -> None:
    """Entry point of group vllm.platform_plugins; None means "not my platform"."""
    ensure_member()


def restore_member(name: str) -> Any:
    """Unpickle the enum member, in a process that may not have loaded plug-ins yet.

    Pickles name this function: it must stay importable under this path.
    """
    global _config_came_pickled
    _config_came_pickled = True
    return ensure_member()


def ensure_member() -> Any:
    """Return AttentionBackendEnum.PORTABLE, adding it first where it is missing."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    # Not AttentionBackendEnum[NAME]: its metaclass turns a miss into a ValueError.
    member = AttentionBackendEnum._member_map_.get(NAME)
    if member is None:
        if hasattr(AttentionBackendEnum, "register"):
            member = AttentionBackendEnum.register(NAME, PATH)
        else:
            member = _extend_enum(AttentionBackendEnum)
    elif member.value != PATH:
        logger.error(
            "Another plug-in has registered attention backend %s as %s; "
            "portable-backend leaves it alone and is not used.",
            NAME,
            member.value,
        )
        return member
    # Enums pickle by value, which a spawned child cannot look up before it has loaded
    # plug-ins; both picklers look the method up on the object.
    member.__dict__.setdefault("__reduce_ex__", lambda _: (restore_member, (NAME,)))
    return member


def _extend_enum(enum: Any) -> Any:
    """Do what `enum` does for each member of a class body; vLLM without register()."""
    member = object.__new__(enum)
    member._name_, member._value_ = NAME, PATH
    member.__objclass__ = enum
    member._sort_order_ = len(enum._member_names_)
    # EnumMeta.__setattr__ refuses names that are members.
    type.__setattr__(enum, NAME, member)
    enum._member_names_.append(NAME)
    enum._member_map_[NAME] = member
    enum._value2member_map_[PATH] = member
    return member


def is_selected(vllm_config: Any) -> bool:
    """Whether the config asks for the portable back end, for any kind of layer."""
    config = getattr(vllm_config, "attention_config", None)
    backends = [getattr(config, "backend", None)]
    backends += (getattr(config, "backend_per_kind", None) or {}).values()
    return any(_is_ours(backend) for backend in backends)


def _is_ours(backend: Any) -> bool:
    # By value as well: the name may be another plug-in's.
    return (
        getattr(backend, "name", None) == NAME
        and getattr(backend, "value", None) == PATH
    )


def _wrap_classmethod(
    cls: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace classmethod `name` of `cls` by make(original function), once."""
    marker = f"_portable_backend_{name}"
    if marker in cls.__dict__:
        return
    original = getattr(cls, name).__func__
    setattr(cls, name, classmethod(make(original)))
    setattr(cls, marker, True)


def patch_cpu_selection() -> None:
    """Let the CPU platform select PORTABLE; it ignores every name but its own."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_attn_backend_cls(
            cls: type,
            selected_backend: Any,
            attn_selector_config: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            if not _is_ours(selected_backend):
                return original(
                    cls, selected_backend, attn_selector_config, *args, **kwargs
                )
            reasons = selected_backend.get_class().validate_configuration(
                device_capability=None, **attn_selector_config._asdict()
            )
            if reasons:
                raise ValueError(
                    f"Selected backend {selected_backend} is not valid for this "
                    f"configuration. Reason: {reasons}"
                )
            logger.info("Using %s attention backend on the CPU.", NAME)
            return selected_backend.get_path()

        return get_attn_backend_cls

    _wrap_classmethod(type(current_platform), "get_attn_backend_cls", make)


def patch_norm_priority() -> None:
    """Put our RMSNorm first in the platform's default order, if PORTABLE is selected.

    A user's own --ir-op-priority still comes before the platform's defaults.
    """
    from vllm.platforms import current_platform

    cls = type(current_platform)
    if not hasattr(cls, "get_default_ir_op_priority"):
        return

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_default_ir_op_priority(cls: type, vllm_config: Any) -> Any:
            priority = original(cls, vllm_config)
            if is_selected(vllm_config) and norm_is_enabled():
                _attempt(_prefer_norm, priority)
            return priority

        return get_default_ir_op_priority

    _wrap_classmethod(cls, "get_default_ir_op_priority", make)


def _prefer_norm(priority: Any) -> None:
    from portable_backend import ir_ops

    ir_ops.register()
    if not ir_ops.is_registered():
        return
    for op in NORM_OPS:
        providers = getattr(priority, op, None)
        if providers is not None and PROVIDER not in providers:
            providers.insert(0, PROVIDER)


def norm_is_enabled() -> bool:
    """Whether our RMSNorm should run where the portable back end is selected.

    Raises:
        ValueError: a PORTABLE_BACKEND_* variable does not parse.
    """
    from vllm import envs

    from portable_backend.settings import get_settings

    # Batch-invariant runs need a fixed order of sums, which is not promised yet.
    batch_invariant = getattr(envs, "VLLM_BATCH_INVARIANT", False)
    return get_settings().rms_norm != "off" and not batch_invariant


def provide_norm() -> None:
    """Make RMSNorm known to vLLM's IR, as late as vLLM allows.

    Importing vllm.ir takes a tenth of a second. vLLM calls import_ir_kernels of the
    platform before it looks a provider up, but 0.25 does not when it only hashes a
    config, which a process may do that was handed one.
    """
    from vllm.platforms import current_platform

    cls = type(current_platform)
    can_wait = hasattr(cls, "import_ir_kernels") and "vllm.ir" not in sys.modules
    if _config_came_pickled or not can_wait:
        _register_norm()
        return

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def import_ir_kernels(cls: type) -> None:
            original(cls)
            _attempt(_register_norm)

        return import_ir_kernels

    _wrap_classmethod(cls, "import_ir_kernels", make)


def _register_norm() -> None:
    from portable_backend import ir_ops

    ir_ops.register()


def _apply_log_level() -> None:
    from portable_backend.settings import get_settings

    try:
        level = get_settings().log_level
    except ValueError as error:
        # Only a warning: this user may not have selected us.
        logger.warning("portable-backend cannot be used: %s", error)
        return
    if level is not None:
        logger.setLevel(level)
