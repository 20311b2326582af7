# SPDX-License-Identifier: Apache-2.0
"""Tuning records decide what norms and cache writes run with, and nothing breaks it."""

import json
import logging
import types
from unittest import mock

import pytest
import torch
from backend_fakes import HEAD_SIZE, KV_HEADS, make_builder, make_impl, modules
from test_tuned import keep, record

from portable_backend.device import DeviceInfo
from portable_backend.kernels import served
from portable_backend.settings import Settings
from portable_backend.warmup.buckets import EngineLimits, kv_cache_key, rms_norm_key
from portable_backend.warmup.kernel_specs import spec_of
from portable_backend.warmup.model_shapes import ModelShape, NormShape

pytestmark = pytest.mark.vllm

LIMITS = EngineLimits(8, 128, 1024, block_size=16)
NORMS = (NormShape(128, True, 1, 8), NormShape(128, False, 1, 1))
MODEL = ModelShape(
    "", "float32", 128, 1, HEAD_SIZE, 4, KV_HEADS, 1, 1024, (), ((0, 1),)
)
OF_NORMS = ModelShape("", "float32", 128, 1, 32, 4, 2, 1, 1, NORMS, ())
CPU = torch.device("cpu")
INFO = DeviceInfo.detect(CPU)
FP32 = torch.float32


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """The module, with a user cache of its own and a model that has norms."""
    from portable_backend import engine_norms, tuned, tuned_rows

    def use(**environ):
        values = {"PORTABLE_BACKEND_CACHE_DIR": str(tmp_path)} | environ
        settings = Settings.from_env(values)
        monkeypatch.setattr(tuned, "get_settings", lambda: settings)
        monkeypatch.setattr(tuned, "_told", tuned._Told())
        monkeypatch.setattr(
            "portable_backend.plugin.norm_is_enabled",
            lambda: settings.rms_norm != "off",
        )
        tuned._lookup.cache_clear()

    use()
    served.forget()
    monkeypatch.setattr(engine_norms, "norms_of", lambda config: [(OF_NORMS, {})])
    yield types.SimpleNamespace(
        tuned=tuned,
        use=use,
        folder=tmp_path,
        serve=lambda: tuned_rows.serve_recorded(None, [MODEL], LIMITS, CPU),
        module=tuned_rows,
    )
    tuned._lookup.cache_clear()
    served.forget()


def other_config(key):
    """One of the space that is not the default."""
    spec = spec_of(key)
    configs = spec.bound(key, INFO).configs
    return next(c for c in reversed(configs) if c != spec.default(key, INFO))


def norm_record(num_rows, *, norm=NORMS[0], **changes):
    key = rms_norm_key(OF_NORMS, LIMITS, norm, num_rows=num_rows)
    return record(key, other_config(key), **changes)


def write_record(num_tokens, **changes):
    key = kv_cache_key(MODEL, LIMITS, num_tokens=num_tokens)
    return record(key, spec_of(key).default(key, INFO), **changes)


def chosen(num_rows, fused_add=True):
    return served.norm_config(FP32, 128, fused_add, num_rows)


def test_without_records_defaults_serve(rows):
    rows.serve()
    assert chosen(16) is None
    assert served.write_steps(FP32, HEAD_SIZE, KV_HEADS) == served.NO_STEPS
    grades = rows.tuned.grades()
    assert set(grades) == {"rms_norm", "kv_cache"}
    assert all(set(counts) == {"default"} for counts in grades.values())


def test_a_record_serves_its_rows_and_near_ones(rows):
    one = norm_record(16)
    keep(rows.folder, one)
    rows.serve()
    assert chosen(1) == chosen(16) == chosen(64) == one.config
    assert chosen(16, fused_add=False) is None
    grades = rows.tuned.grades()["rms_norm"]
    assert grades["exact"] == 1 and grades["nearest"] >= 1 and grades["default"] >= 1


def test_each_bucket_has_its_own_record(rows):
    small, large = norm_record(16), norm_record(128)
    other = next(
        c
        for c in spec_of(large.key).bound(large.key, INFO).configs
        if c != small.config
    )
    keep(rows.folder, small, record(large.key, other))
    rows.serve()
    assert chosen(16) == small.config
    assert chosen(128) == chosen(10_000) == other


def test_a_record_of_writes_serves_them(rows):
    one = write_record(16)
    keep(rows.folder, one)
    rows.serve()
    steps = served.write_steps(FP32, HEAD_SIZE, KV_HEADS)
    assert steps.at(1) == steps.at(16) == one.config
    assert served.write_steps(FP32, HEAD_SIZE, 1) == served.NO_STEPS


@pytest.mark.parametrize(
    "changes",
    [{"kernel_digest": "sha256:other"}, {"verified": False}, {"arch": "sm90"}],
    ids=str,
)
def test_a_record_that_is_not_for_this_code_and_gpu_serves_nothing(rows, changes):
    keep(rows.folder, norm_record(16, **changes), write_record(16, **changes))
    rows.serve()
    assert chosen(16) is None
    assert served.write_steps(FP32, HEAD_SIZE, KV_HEADS) == served.NO_STEPS


def test_norms_that_are_off_are_not_looked_up(rows):
    rows.use(PORTABLE_BACKEND_RMS_NORM="off")
    keep(rows.folder, norm_record(16))
    rows.serve()
    assert chosen(16) is None
    assert set(rows.tuned.grades()) == {"kv_cache"}


def test_off_reads_nothing(rows):
    keep(rows.folder, norm_record(16), write_record(16))
    rows.use(PORTABLE_BACKEND_TUNE="off")
    rows.serve()
    assert chosen(16) is None
    assert rows.tuned.grades() == {}


def test_a_model_that_nobody_reads_costs_a_warning(rows, monkeypatch, caplog):
    def broken(config):
        raise AttributeError("no such thing")

    monkeypatch.setattr("portable_backend.engine_norms.norms_of", broken)
    keep(rows.folder, norm_record(16))
    rows.serve()
    assert chosen(16) is None
    assert "norms keep their default configs" in caplog.text


def test_what_fails_leaves_what_attention_was_told(rows, monkeypatch):
    def choose(lookup, info):
        return [lookup.choose(kv_cache_key(MODEL, LIMITS, num_tokens=8)).grade]

    assert rows.tuned.decide_for_all(choose, CPU) == ["default"]
    grades = rows.tuned.grades()
    monkeypatch.setattr(rows.module, "_rows", mock.Mock(side_effect=OSError))
    rows.serve()
    assert rows.tuned.grades() == grades != {}
    assert not rows.tuned._told.note and served.is_default()


def test_nothing_changes_while_a_graph_is_captured(rows, monkeypatch):
    keep(rows.folder, norm_record(16))
    monkeypatch.setattr(rows.module, "capturing", lambda: True)
    rows.serve()
    assert chosen(16) is None


def test_other_ranks_serve_what_the_first_one_sends(rows, monkeypatch):
    keep(rows.folder, norm_record(16), write_record(16))
    sent = []

    def first(decide, limit_s):
        sent.append(decide())
        return sent[-1]

    monkeypatch.setattr(rows.tuned.ranks, "from_first_rank", first)
    rows.serve()
    here = chosen(16), served.write_steps(FP32, HEAD_SIZE, KV_HEADS)
    hashed = rows.tuned.choices()
    served.forget()

    def other(decide, limit_s):
        return json.loads(json.dumps(sent[0]))

    rows.use(PORTABLE_BACKEND_TUNE="off")  # sees no records of its own
    monkeypatch.setattr(rows.tuned.ranks, "from_first_rank", other)
    rows.serve()
    assert (chosen(16), served.write_steps(FP32, HEAD_SIZE, KV_HEADS)) == here
    assert rows.tuned.choices() == hashed


def test_a_builder_serves_them_and_says_so(rows, caplog):
    one = write_record(16)
    keep(rows.folder, one, norm_record(16))
    caplog.set_level(logging.INFO, "vllm.portable_backend")
    make_builder(modules(), [make_impl(modules())], CPU)
    (line,) = [x for x in caplog.messages if x.startswith("tuning records")]
    assert "rms_norm exact 1" in line and "kv_cache exact 1" in line
    assert chosen(16) is not None
