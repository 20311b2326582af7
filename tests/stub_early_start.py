# SPDX-License-Identifier: Apache-2.0
"""What a start does when weights are loaded, on a stub GPU: run by test_startup.py.

Not collected by itself, since Triton's interpreter must be off before triton loads.
"""

import logging
import os
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import pytest
import torch
from stub_binaries import LIMITS, SMOLLM2, Engine
from stub_driver import stub_gpu
from stub_startup import GPU, SMALL, settings  # noqa: F401  a fixture
from test_model_shapes import GPT_OSS, LLAMA

from portable_backend import ranks, startup
from portable_backend.warmup import early_warming
from portable_backend.warmup.binaries import binaries_of
from portable_backend.warmup.early_warming import EarlyWarming
from portable_backend.warmup.warming import Warmed, missing_binaries

pytestmark = pytest.mark.vllm
CPU = torch.device("cpu")
NO_WORKER = (sys.executable, "-c", "raise SystemExit('no compiler')")


class Early:
    """Stands for the workers: what it is given, it has compiled at once."""

    made: ClassVar["list[Early]"] = []

    def __init__(self, binaries, device, **how):
        self.binaries, self.compiled, self.how = list(binaries), len(binaries), how
        Early.made.append(self)

    def wait(self, timeout_s):
        return True


@pytest.fixture
def early(monkeypatch):
    """A cache that holds what workers were given; gives those that were made."""
    monkeypatch.setattr(Early, "made", [])
    monkeypatch.setattr(startup, "EarlyWarming", Early)

    def missing(binaries, device):
        there = {binary for e in Early.made for binary in e.binaries}
        return [binary for binary in binaries if binary not in there]

    def warm(binaries, device, workers):
        late.extend(missing(binaries, device))
        Early(late, device)
        return Warmed(compiled=len(late), present=len(binaries) - len(late))

    late = []
    monkeypatch.setattr(startup, "missing_binaries", missing)
    monkeypatch.setattr(startup, "warm_binaries", warm)
    return SimpleNamespace(made=Early.made, late=late)


def begin(vllm_config):
    with mock.patch("vllm.config.get_current_vllm_config", lambda: vllm_config):
        startup.begin(CPU)


def start(config, limits, **options):
    with stub_gpu("cuda"):
        return Engine(config, limits, "NHD", before_builder=begin, **options)


@pytest.mark.parametrize(
    ("config", "limits"),
    [
        (LLAMA, LIMITS),
        (LLAMA, replace(LIMITS, block_size=16)),
        (LLAMA, replace(LIMITS, speculative_tokens=4)),
        (LLAMA | {"attn_logit_softcapping": 30.0}, SMALL),
        (SMOLLM2, replace(SMALL, max_num_seqs=100)),
    ],
)
def test_builders_find_all_that_they_need(early, config, limits):
    start(config, limits)
    (made,) = early.made
    assert not early.late
    state = startup._start
    assert set(made.binaries) == state.ready
    assert state.compiled == len(made.binaries) > 10
    assert state.early is None
    assert made.how["folder"] == startup.cache_folder()


def test_all_layers_of_a_model_are_looked_at(early):
    """Windows and none: vLLM makes a builder for each group of layers."""
    configs = []
    with stub_gpu("cuda"):
        Engine(GPT_OSS, LIMITS, "NHD", before_builder=configs.append)
        layers = {}
        for number, config in enumerate(configs):
            context = config.compilation_config.static_forward_context
            layers |= {f"{number}.{name}": x for name, x in context.items()}
        startup._start = startup._Start()
        early.made.clear(), early.late.clear()
        configs[0].compilation_config.static_forward_context = layers
        begin(configs[0])
        ready = set(early.made[0].binaries)
        Engine(GPT_OSS, LIMITS, "NHD")
    assert len(configs) == 2
    assert not early.late
    assert startup._start.ready == ready


def test_a_wrong_guess_is_made_up_for(early, caplog):
    """vLLM sets the block size after the weights are loaded."""
    with stub_gpu("cuda"):

        def begin_with_another(vllm_config):
            vllm_config.cache_config.user_specified_block_size = False
            vllm_config.cache_config.block_size = 16  # ours is 64 then
            begin(vllm_config)

        limits = replace(LIMITS, block_size=32)
        Engine(LLAMA, limits, "NHD", before_builder=begin_with_another)
    guessed = early.made[0].binaries
    assert 0 < len(early.late) < len(startup._start.ready)
    assert startup._start.ready <= {*guessed, *early.late}
    assert not [x for x in caplog.records if x.levelno >= logging.WARNING]


def test_a_default_block_size_is_guessed_right(early, monkeypatch):
    gpu = SimpleNamespace(is_cpu=lambda: False)
    monkeypatch.setattr("portable_backend.backend.current_platform", gpu)
    with stub_gpu("cuda"):

        def as_before_vllm_has_set_it(vllm_config):
            vllm_config.cache_config = SimpleNamespace(block_size=16)
            begin(vllm_config)

        Engine(LLAMA, LIMITS, "NHD", before_builder=as_before_vllm_has_set_it)
    assert len(early.made) == 1 and not early.late


def test_a_second_start_begins_nothing(early):
    start(LLAMA, LIMITS)
    startup._start = startup._Start()
    start(LLAMA, LIMITS)
    assert len(early.made) == 1 and startup._start.compiled == 0


def test_only_the_first_rank_compiles(early, monkeypatch):
    monkeypatch.setattr(ranks, "decides", lambda: False)
    with stub_gpu("cuda"):
        Engine(
            LLAMA, LIMITS, "NHD",
            before_builder=lambda config: (begin(config), early.late.append(None)),
        )  # fmt: skip
    assert not early.made[0].how  # the builder's own


def test_what_is_tuned_first_is_not_compiled_before(early, settings):  # noqa: F811
    settings(PORTABLE_BACKEND_TUNE="startup")
    configs = []
    settings_at_builder = {"PORTABLE_BACKEND_TUNE": "load"}
    with stub_gpu("cuda"):

        def then_load(config):
            begin(config)
            configs.append(len(early.made))
            settings(**settings_at_builder)

        Engine(LLAMA, LIMITS, "NHD", before_builder=then_load)
    assert configs == [0]


def test_begin_happens_once_and_keeps_no_model_from_loading(monkeypatch, caplog):
    broken = mock.Mock(side_effect=OSError("no disk"))
    monkeypatch.setattr(startup, "_begin", broken)
    with stub_gpu("cuda"):
        for _ in range(2):
            startup.begin(CPU)
    broken.assert_called_once()
    assert not [x for x in caplog.records if x.levelno >= logging.WARNING]


def test_norms_that_the_cache_holds_are_loaded_with_the_weights(early, monkeypatch):
    engine = start(LLAMA, LIMITS)
    norms = {x for x in startup._start.ready if x.kernel == "rms_norm"}
    absent = next(iter(norms))
    for made in early.made:
        made.binaries = [x for x in made.binaries if x != absent]
    monkeypatch.setattr(startup, "_start", startup._Start())
    load = mock.Mock(return_value=None)
    monkeypatch.setattr(startup, "_load", load)
    with stub_gpu("cuda"):
        begin(engine.vllm_config)
    loaded = [launch for call in load.call_args_list for launch in call.args[0]]
    assert len(load.call_args_list) == len(norms) - 1
    assert {launch.kernel for launch in loaded} == {"rms_norm"}
    assert early.made[-1].binaries == [absent]


def test_workers_that_do_not_end_are_not_waited_for_forever(early, monkeypatch):
    waited = []

    class Stuck(Early):
        def __init__(self, binaries, device, **how):
            super().__init__([], device, **how)

        def wait(self, timeout_s):
            waited.append(timeout_s)
            return False

    monkeypatch.setattr(startup, "EarlyWarming", Stuck)
    start(LLAMA, LIMITS)
    assert waited == [startup.LOCK_TIMEOUT_S]
    assert set(early.late) == startup._start.ready


# The workers themselves


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "usual"))
    return tmp_path / "usual"


def some_binaries(kernel="merge"):
    from stub_binaries import described

    model, traits = described(SMOLLM2)
    return [x for x in binaries_of(model, traits, SMALL, GPU) if x.kernel == kernel]


def test_workers_keep_to_the_folder_that_was_set_when_they_began(cache, monkeypatch):
    """vLLM sets another one while they compile."""
    binaries = some_binaries() + some_binaries("plan")
    inside, go = threading.Event(), threading.Event()

    class Turn:
        def __init__(self, folder):
            assert folder == cache

        def __enter__(self):
            inside.set()
            assert go.wait(60)

        def __exit__(self, *error):
            pass

    work = EarlyWarming(binaries, GPU, folder=cache, workers=2, turn=Turn)
    assert inside.wait(60)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache.with_name("another")))
    assert not work.wait(0.0)
    go.set()
    assert work.wait(120)
    assert work.compiled == len(binaries) > 1
    assert not cache.with_name("another").exists()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    assert not missing_binaries(binaries, GPU)
    again = EarlyWarming(binaries, GPU, folder=cache, workers=2, turn=startup.turn)
    assert again.wait(60) and again.compiled == 0


def test_workers_that_fail_leave_it_to_the_builder(cache, caplog):
    binaries = some_binaries()
    work = EarlyWarming(
        binaries, GPU, folder=cache, workers=1, turn=startup.turn, command=NO_WORKER
    )
    assert work.wait(60) and work.compiled == 0
    assert not [x for x in caplog.records if x.levelno >= logging.WARNING]


def test_a_fault_of_the_thread_is_nobody_elses(cache, monkeypatch):
    monkeypatch.setattr(
        early_warming, "compile_all", mock.Mock(side_effect=OSError("no disk"))
    )
    work = EarlyWarming(
        some_binaries(), GPU, folder=cache, workers=1, turn=startup.turn
    )
    assert work.wait(60) and work.compiled == 0


def test_environment_is_left_alone(cache):
    before = dict(os.environ)
    work = EarlyWarming([], GPU, folder=cache, workers=1, turn=startup.turn)
    assert work.wait(60)
    assert dict(os.environ) == before
