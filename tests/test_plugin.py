# SPDX-License-Identifier: Apache-2.0
"""Registration with vLLM: enum member, pickles, patches, what must not break."""

import copy
import enum
import json
import logging
import os
import pickle
import subprocess
import sys
import types

import pytest

from portable_backend import plugin

REGISTRY = "vllm.v1.attention.backends.registry"


# --------------------------------------------------------------- a vLLM of each kind


class _LookupByName(enum.EnumMeta):
    """vLLM's metaclass: a miss is a ValueError, not a KeyError."""

    def __getitem__(cls, name):
        try:
            return super().__getitem__(name)
        except KeyError:
            raise ValueError(f"Unknown attention backend: '{name}'") from None


class _EnumWithoutRegister(enum.Enum, metaclass=_LookupByName):
    """As in vLLM 0.25."""

    FLASH_ATTN = "vllm.flash"
    CUSTOM = None


class _EnumWithRegister(enum.Enum, metaclass=_LookupByName):
    """As in vLLM 0.32 and later."""

    FLASH_ATTN = "vllm.flash"
    CUSTOM = None

    @classmethod
    def register(cls, name, value):
        if name in cls._member_map_:
            raise ValueError(f"Backend {name} already exists")
        member = object.__new__(cls)
        member._name_, member._value_ = name, value
        setattr(cls, name, member)
        cls._member_map_[name] = member
        cls._value2member_map_[value] = member
        cls._member_names_.append(name)
        return member


def _copy_of(kind):
    """A fresh enum of this kind: tests add members for good."""
    namespace = _LookupByName.__prepare__(kind.__name__, (enum.Enum,))
    for name, member in kind.__members__.items():
        namespace[name] = member.value
    if "register" in kind.__dict__:
        namespace["register"] = kind.__dict__["register"]
    namespace["__module__"] = REGISTRY
    namespace["__qualname__"] = "AttentionBackendEnum"
    return _LookupByName("AttentionBackendEnum", (enum.Enum,), namespace)


@pytest.fixture(params=[_EnumWithoutRegister, _EnumWithRegister], ids=["0.25", "0.32"])
def fake_enum(request, monkeypatch):
    """A registry module whose enum lacks our member."""
    module = types.ModuleType(REGISTRY)
    module.AttentionBackendEnum = _copy_of(request.param)
    for depth in range(1, REGISTRY.count(".") + 1):
        parent = REGISTRY.rsplit(".", depth)[0]
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    monkeypatch.setitem(sys.modules, REGISTRY, module)
    return module.AttentionBackendEnum


def test_the_member_behaves_like_any_other(fake_enum):
    before = len(fake_enum)
    member = plugin.ensure_member()
    assert fake_enum["PORTABLE"] is member
    assert fake_enum.PORTABLE is member
    assert fake_enum(plugin.PATH) is member
    assert member in fake_enum
    assert list(fake_enum)[-1] is member
    assert len(fake_enum) == before + 1
    assert (member.name, member.value) == ("PORTABLE", plugin.PATH)
    assert isinstance(member, fake_enum)
    with pytest.raises(ValueError, match="Unknown attention backend"):
        fake_enum["MISSING"]


def test_registering_again_changes_nothing(fake_enum):
    member = plugin.ensure_member()
    assert plugin.ensure_member() is member
    assert plugin.add_member_only() is None
    assert [m.name for m in fake_enum].count("PORTABLE") == 1


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_copies_and_pickles_are_the_member_itself(fake_enum, protocol):
    member = plugin.ensure_member()
    assert copy.copy(member) is member
    assert copy.deepcopy({"backend": member})["backend"] is member
    assert pickle.loads(pickle.dumps(member, protocol)) is member
    assert pickle.loads(pickle._dumps(member, protocol)) is member


def test_a_pickle_brings_the_member_along(fake_enum):
    data = pickle.dumps(plugin.ensure_member())
    # The enum of a process that has not loaded plug-ins.
    for table in (fake_enum._member_map_, fake_enum._value2member_map_):
        for key in ("PORTABLE", plugin.PATH):
            table.pop(key, None)
    fake_enum._member_names_.remove("PORTABLE")
    type.__delattr__(fake_enum, "PORTABLE")
    assert "PORTABLE" not in fake_enum.__members__
    assert pickle.loads(data) is fake_enum["PORTABLE"]


def test_another_plugins_member_of_that_name_is_left_alone(fake_enum, caplog):
    if not hasattr(fake_enum, "register"):
        pytest.skip("nobody but us can add a member here")
    theirs = fake_enum.register("PORTABLE", "other.Backend")
    with caplog.at_level(logging.ERROR, logger="vllm.portable_backend"):
        assert plugin.ensure_member() is theirs
    assert theirs.value == "other.Backend"
    assert "other.Backend" in caplog.text
    assert not plugin.is_selected(_config(theirs))


def _config(backend, per_kind=None):
    attention = types.SimpleNamespace(backend=backend)
    if per_kind is not None:
        attention.backend_per_kind = per_kind
    return types.SimpleNamespace(attention_config=attention)


def test_selection_is_seen_for_all_layers_or_one_kind(fake_enum):
    ours, other = plugin.ensure_member(), fake_enum["FLASH_ATTN"]
    assert plugin.is_selected(_config(ours))
    assert plugin.is_selected(_config(other, {"sliding_window": ours}))
    assert not plugin.is_selected(_config(other, {"sliding_window": other}))
    assert not plugin.is_selected(_config(None, {}))
    assert not plugin.is_selected(types.SimpleNamespace())


def test_register_logs_what_fails_and_goes_on(monkeypatch, caplog):
    done = []

    def ensure_member():
        raise RuntimeError("no such enum")

    def provide_norm():
        done.append("norm")

    monkeypatch.setattr(plugin, "ensure_member", ensure_member)
    monkeypatch.setattr(plugin, "patch_cpu_selection", lambda: done.append("cpu"))
    monkeypatch.setattr(plugin, "patch_norm_priority", lambda: done.append("priority"))
    monkeypatch.setattr(plugin, "provide_norm", provide_norm)
    with caplog.at_level(logging.ERROR, logger="vllm.portable_backend"):
        plugin.register()
    assert "ensure_member failed" in caplog.text
    assert "no such enum" in caplog.text
    assert done == ["cpu", "priority", "norm"]


# -------------------------------------------------------------- the vLLM that is here


@pytest.fixture
def platform():
    from vllm.platforms import current_platform

    plugin.register()
    return current_platform


@pytest.fixture
def environment(monkeypatch):
    """Set PORTABLE_BACKEND_* variables as if they had been there from the start."""
    from portable_backend.settings import get_settings

    def set_variable(name, value):
        monkeypatch.setenv(name, value)
        get_settings.cache_clear()

    get_settings.cache_clear()
    yield set_variable
    get_settings.cache_clear()


def _selector_config(**changes):
    import torch
    from vllm.v1.attention.selector import AttentionSelectorConfig

    values = {
        "head_size": 64,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": None,
    }
    return AttentionSelectorConfig(**(values | changes))


def _on_cpu():
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


@pytest.mark.vllm
def test_a_config_takes_the_name_in_any_case(platform):
    from pydantic import TypeAdapter
    from vllm.config import AttentionConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert AttentionConfig(backend="portable").backend is AttentionBackendEnum.PORTABLE
    parsed = TypeAdapter(AttentionConfig).validate_json('{"backend": "Portable"}')
    assert parsed.backend is AttentionBackendEnum.PORTABLE
    assert pickle.loads(pickle.dumps(parsed)).backend is AttentionBackendEnum.PORTABLE


@pytest.mark.vllm
def test_the_member_leads_to_the_back_end(platform):
    member = plugin.ensure_member()
    assert member.get_path() == plugin.PATH
    assert member.get_class().get_name() == member.name


@pytest.mark.vllm
def test_the_cpu_platform_selects_portable_and_nothing_else_changes(platform):
    if not _on_cpu():
        pytest.skip("other platforms select by themselves")
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    config = _selector_config()
    portable = plugin.ensure_member()
    selected = platform.get_attn_backend_cls(portable, config, num_heads=4)
    assert selected == plugin.PATH
    cpu = AttentionBackendEnum.CPU_ATTN.get_path()
    for other in (
        None,
        AttentionBackendEnum.CPU_ATTN,
        AttentionBackendEnum.TRITON_ATTN,
    ):
        assert platform.get_attn_backend_cls(other, config) == cpu


@pytest.mark.vllm
def test_the_cpu_platform_is_wrapped_once(platform):
    if not _on_cpu():
        pytest.skip("other platforms select by themselves")
    names = ("get_attn_backend_cls", "get_default_ir_op_priority")
    wrapped = [type(platform).__dict__[name] for name in names]
    plugin.patch_cpu_selection()
    plugin.patch_norm_priority()
    assert [type(platform).__dict__[name] for name in names] == wrapped


@pytest.mark.vllm
def test_the_cpu_platform_refuses_what_portable_cannot_do(platform):
    if not _on_cpu():
        pytest.skip("other platforms validate by themselves")
    config = _selector_config(kv_cache_dtype="fp8", head_size=512)
    with pytest.raises(ValueError) as caught:
        platform.get_attn_backend_cls(plugin.ensure_member(), config)
    assert "quantised KV caches are not implemented yet, got fp8" in str(caught.value)
    assert "head size must be a multiple of 8 from 32 to 256, got 512" in str(
        caught.value
    )


@pytest.mark.vllm
def test_without_the_interpreter_the_cpu_refuses_and_names_the_variable(
    platform, monkeypatch
):
    if not _on_cpu():
        pytest.skip("needs no interpreter")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="set TRITON_INTERPRET=1"):
        platform.get_attn_backend_cls(plugin.ensure_member(), _selector_config())


def _priority(platform, backend):
    from vllm.config import VllmConfig

    config = VllmConfig()
    config.attention_config.backend = backend
    return platform.get_default_ir_op_priority(config)


@pytest.mark.vllm
def test_our_norm_comes_first_where_portable_is_selected(platform, environment):
    priority = _priority(platform, plugin.ensure_member())
    plain = _priority(platform, None)
    for op in plugin.NORM_OPS:
        assert getattr(priority, op) == ["portable", *getattr(plain, op)]
        assert "portable" not in getattr(plain, op)


@pytest.mark.vllm
def test_our_norm_can_be_switched_off(platform, environment):
    environment("PORTABLE_BACKEND_RMS_NORM", "off")
    assert "portable" not in _priority(platform, plugin.ensure_member()).rms_norm
    environment("PORTABLE_BACKEND_RMS_NORM", "on")
    assert _priority(platform, plugin.ensure_member()).rms_norm[0] == "portable"


@pytest.mark.vllm
def test_our_norm_is_off_in_batch_invariant_runs(platform, environment, monkeypatch):
    from vllm import envs

    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    assert "portable" not in _priority(platform, plugin.ensure_member()).rms_norm


@pytest.mark.vllm
def test_the_users_own_order_of_norms_wins(platform, environment):
    from vllm.config import AttentionConfig, KernelConfig, VllmConfig

    config = VllmConfig(
        attention_config=AttentionConfig(backend="portable"),
        kernel_config=KernelConfig(ir_op_priority={"rms_norm": ["native"]}),
    )
    priority = config.kernel_config.ir_op_priority
    assert priority.rms_norm[0] == "native"
    assert priority.fused_add_rms_norm[0] == "portable"


@pytest.mark.vllm
def test_a_wrong_setting_stops_only_those_who_select_portable(
    platform, environment, caplog
):
    environment("PORTABLE_BACKEND_RMS_NORM", "sometimes")
    with caplog.at_level(logging.WARNING, logger="vllm.portable_backend"):
        plugin.register()
    assert "one of auto, on, off, got 'sometimes'" in caplog.text
    assert "portable" not in _priority(platform, None).rms_norm
    with pytest.raises(ValueError, match="one of auto, on, off, got 'sometimes'"):
        _priority(platform, plugin.ensure_member())
    if _on_cpu():
        with pytest.raises(ValueError, match="one of auto, on, off, got 'sometimes'"):
            platform.get_attn_backend_cls(plugin.ensure_member(), _selector_config())


def _python(code, **variables):
    command = [sys.executable, "-P", "-c", code]
    env = os.environ | variables
    run = subprocess.run(command, capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.vllm
def test_register_is_light_beside_what_vllm_has_loaded():
    found = _python(
        """
import json, sys, time
import vllm.engine.arg_utils
from vllm.platforms import current_platform
current_platform.is_cpu()
before = set(sys.modules)
start = time.process_time()
from portable_backend.plugin import register
register()
used_s = time.process_time() - start
print(json.dumps({"used_s": used_s, "new": sorted(set(sys.modules) - before)}))
"""
    )
    assert found["used_s"] < 0.05
    new = {name.split(".")[0] for name in found["new"]}
    assert new <= {"portable_backend"}
    assert "portable_backend.kernels" not in found["new"]


@pytest.mark.vllm
def test_a_child_that_loads_no_plugin_can_still_unpickle_the_config():
    data = pickle.dumps(plugin.ensure_member()).hex()
    found = _python(
        f"""
import json, pickle
from vllm.v1.attention.backends.registry import AttentionBackendEnum
before = "PORTABLE" in AttentionBackendEnum.__members__
member = pickle.loads(bytes.fromhex("{data}"))
print(json.dumps([before, member is AttentionBackendEnum["PORTABLE"]]))
""",
        VLLM_PLUGINS="none",
    )
    assert found == [False, True]
