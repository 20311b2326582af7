# SPDX-License-Identifier: Apache-2.0
"""Tuning records decide what an engine's attention runs with, and nothing breaks it."""

import logging
import types

import pytest
import torch

from portable_backend.device import DeviceInfo
from portable_backend.kernels.config import KernelConfig
from portable_backend.kernels.plan import StepKind
from portable_backend.settings import Settings
from portable_backend.warmup.buckets import EngineLimits, decode_key, prefill_key
from portable_backend.warmup.digest import current_digests
from portable_backend.warmup.matching import current_toolchain
from portable_backend.warmup.model_shapes import ModelShape
from portable_backend.warmup.records import TuningRecord
from portable_backend.warmup.store import RecordStore
from portable_backend.worker_extension import PortableWorkerExtension

pytestmark = pytest.mark.vllm

LIMITS = EngineLimits(8, 128, 1024, block_size=16)
MODEL = ModelShape("", "float32", 128, 1, 32, 4, 2, 1, 1024, (), ((0, 1),))
LAYERS = {
    "num_query_heads": 4,
    "num_kv_heads": 2,
    "head_size": 32,
    "sliding_window": None,
    "dtype": torch.float32,
    "device": torch.device("cpu"),
    "limits": LIMITS,
    "max_num_seqs": 8,
}
DECODE = KernelConfig.of(
    BLOCK_N=32,
    num_warps=1,
    num_stages=1,
    CTAS_PER_UNIT=4,
    MIN_CHUNK=1,
    launch_pdl=None,
    matrix_instr_nonkdim=16,
    LOAD="pointer",
    MERGE="last",
)


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """The module, with a user cache of its own and settings as given to `use`."""
    from portable_backend import tuned

    def use(**environ):
        values = {"PORTABLE_BACKEND_CACHE_DIR": str(tmp_path)} | environ
        settings = Settings.from_env(values)
        monkeypatch.setattr(tuned, "get_settings", lambda: settings)
        monkeypatch.setattr(tuned, "_told", tuned._Told())
        tuned._lookup.cache_clear()

    use()
    yield types.SimpleNamespace(module=tuned, use=use, folder=tmp_path)
    tuned._lookup.cache_clear()


def record(key, config, **changes):
    values = {
        "gpu": "interpreter",
        "arch": "interpreter",
        "time_us": 5.0,
        "kernel_digest": current_digests()[key.kernel],
        "toolchain": current_toolchain(),
        "verified": True,
    }
    return TuningRecord(key=key, config=config, **values | changes)


def keep(folder, *records):
    with RecordStore.open(folder, shipped=folder / "none") as store:
        for one in records:
            assert store.put(one)


def test_without_records_every_step_keeps_its_default(tuned):
    assert tuned.module.configs_for_engine(**LAYERS) == {}


def test_a_record_serves_the_steps_of_its_bucket_and_near_ones(tuned):
    keep(tuned.folder, record(decode_key(MODEL, LIMITS, num_seqs=4), DECODE))
    configs = tuned.module.configs_for_engine(**LAYERS)
    assert {kind.max_decodes for kind in configs} == {1, 2, 4, 8}
    assert all(config.decode == DECODE for config in configs.values())
    assert not any(kind.mixed for kind in configs)
    assert tuned.module.grades() == {
        "decode": {"exact": 1, "nearest": 3},
        "prefill": {"default": 2},
    }


def test_prefill_knows_whether_anything_is_cached(tuned):
    from portable_backend.warmup.kernel_specs import spec_of

    key = prefill_key(MODEL, LIMITS, num_tokens=128, no_context=True)
    info = DeviceInfo.detect("cpu")
    config = spec_of(key).bound(key, info).configs[-1]
    keep(tuned.folder, record(key, config))
    configs = tuned.module.configs_for_engine(**LAYERS)
    assert {kind.no_context for kind in configs} == {True}
    assert configs[StepKind(1, no_context=True)].prefill == config


@pytest.mark.parametrize(
    "changes",
    [{"kernel_digest": "sha256:other"}, {"verified": False}, {"arch": "sm90"}],
    ids=str,
)
def test_a_record_that_is_not_for_this_code_and_gpu_serves_nothing(tuned, changes):
    key = decode_key(MODEL, LIMITS, num_seqs=4)
    keep(tuned.folder, record(key, DECODE, **changes))
    assert tuned.module.configs_for_engine(**LAYERS) == {}


def test_a_config_that_no_space_holds_serves_nothing(tuned):
    key = decode_key(MODEL, LIMITS, num_seqs=4)
    keep(tuned.folder, record(key, DECODE.replace(BLOCK_N=24)))
    assert tuned.module.configs_for_engine(**LAYERS) == {}


def test_off_reads_nothing(tuned):
    keep(tuned.folder, record(decode_key(MODEL, LIMITS, num_seqs=4), DECODE))
    tuned.use(PORTABLE_BACKEND_TUNE="off")
    assert tuned.module.configs_for_engine(**LAYERS) == {}


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", '{"schema": 99}', "\0" * 50],
    ids=["empty", "cut", "list", "newer", "zeros"],
)
def test_a_damaged_file_costs_a_warning(tuned, damage, caplog):
    keep(tuned.folder, record(decode_key(MODEL, LIMITS, num_seqs=4), DECODE))
    (file,) = tuned.folder.glob("decode/*.json")
    file.write_text(damage)
    assert tuned.module.configs_for_engine(**LAYERS) == {}
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


def test_each_layer_that_is_no_folder_costs_a_warning(tuned, caplog):
    file, absent = tuned.folder / "file", tuned.folder / "absent"
    file.touch()
    layers = f"{absent}:{tuned.folder}:{file}"
    tuned.use(PORTABLE_BACKEND_CACHE_LAYERS=layers)
    for _ in range(2):
        assert tuned.module.configs_for_engine(**LAYERS) == {}
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(told) == 2
    assert all("PORTABLE_BACKEND_CACHE_LAYERS" in text for text in told)
    assert f"{absent} does not exist" in told[0] and f"{file} is no folder" in told[1]


def test_a_lookup_that_breaks_costs_a_warning(tuned, monkeypatch, caplog):
    def broken():
        raise RuntimeError("no source")

    monkeypatch.setattr(tuned.module, "current_digests", broken)
    assert tuned.module.configs_for_engine(**LAYERS) == {}
    assert "default configs serve" in caplog.text


def test_the_hash_of_choices_tells_configs_and_layers_apart(tuned):
    from backend_fakes import make_builder, make_impl, modules

    pb = modules()

    def start(**impl):
        tuned.use()
        make_builder(pb, [make_impl(pb, **impl)], torch.device("cpu"))
        return tuned.module.choices()

    default = start()
    assert start() == default
    assert start(sliding_window=16) != default
    keep(tuned.folder, record(decode_key(MODEL, LIMITS, num_seqs=4), DECODE))
    assert start() != default


def test_the_back_end_plans_with_recorded_configs(tuned, caplog):
    from backend_fakes import make_builder, make_impl, modules

    pb = modules()
    keep(tuned.folder, record(decode_key(MODEL, LIMITS, num_seqs=4), DECODE))
    caplog.set_level(logging.INFO, "vllm.portable_backend")
    builder = make_builder(pb, [make_impl(pb)], torch.device("cpu"))
    (line,) = [x for x in caplog.messages if x.startswith("tuning records")]
    assert line == (
        "tuning records: decode exact 1, nearest 3; kv_cache default 3; "
        "prefill default 2; choices " + tuned.module.choices()
    )
    (planner,) = builder.planners.values()
    grades = {
        "decode": {"exact": 1, "nearest": 3},
        "kv_cache": {"default": 3},
        "prefill": {"default": 2},
    }
    choices = {"choices": tuned.module.choices(), "grades": grades, "tune_s": 0.0}
    choices["background"] = {}
    assert PortableWorkerExtension().portable_choices() == choices
    assert planner.config_for(StepKind(4)).decode == DECODE
    assert planner.config_for(StepKind(4, mixed=True)).decode != DECODE
