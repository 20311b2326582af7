# SPDX-License-Identifier: Apache-2.0
"""What a start does when weights are loaded, on a stub GPU: run by test_startup.py.

Not collected by itself, since Triton's interpreter must be off before triton loads.
"""

import logging
import os
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import pytest
import torch
from stub_binaries import LIMITS, SMOLLM2, Engine
from stub_driver import stub_gpu
from stub_startup import DEFAULT, GPU, SMALL, settings, with_warps  # noqa: F401
from test_model_shapes import GPT_OSS, LLAMA
from test_tuned import keep, record

from portable_backend import ranks, startup, tuned
from portable_backend.warmup import early_warming
from portable_backend.warmup.binaries import binaries_of
from portable_backend.warmup.buckets import EngineLimits, decode_key
from portable_backend.warmup.early_warming import EarlyWarming
from portable_backend.warmup.layers import file_stem
from portable_backend.warmup.warming import Warmed, missing_binaries

pytestmark = pytest.mark.vllm
CPU = torch.device("cpu")
NO_WORKER = (sys.executable, "-c", "raise SystemExit('no compiler')")


class Early:
    """Stands for the workers: what it is given, it has compiled at once."""

    made: ClassVar["list[Early]"] = []

    def __init__(self, binaries, device, **how):
        self.binaries, self.how = frozenset(binaries), how
        self.compiled, self.failures, self.waits = set(self.binaries), {}, []
        self.stopped = 0
        Early.made.append(self)

    def wait(self, limit_s):
        self.waits.append(limit_s)
        return True

    def stop(self):
        self.stopped += 1


@pytest.fixture
def early(monkeypatch):
    """A cache that holds what workers were given; gives those that were made."""
    monkeypatch.setattr(Early, "made", [])
    monkeypatch.setattr(startup, "EarlyWarming", Early)

    def missing(binaries, device):
        there = {binary for e in Early.made for binary in e.compiled}
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
    assert made.binaries == state.ready
    assert startup._report(GPU).compiled == len(made.binaries) > 10
    assert not made.waits and not made.stopped
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
    report = startup._report(GPU)
    assert report.compiled == report.binaries
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
    assert len(early.made) == 1 and startup._report(GPU).compiled == 0


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
        made.compiled.discard(absent)
    monkeypatch.setattr(startup, "_start", startup._Start())
    load = mock.Mock(return_value=None)
    monkeypatch.setattr(startup, "_load", load)
    with stub_gpu("cuda"):
        begin(engine.vllm_config)
    loaded = [launch for call in load.call_args_list for launch in call.args[0]]
    assert len(load.call_args_list) == len(norms) - 1
    assert {launch.kernel for launch in loaded} == {"rms_norm"}
    assert early.made[-1].binaries == {absent}


@pytest.fixture
def slow(early, monkeypatch):
    """Workers that are done when they are waited for, if they are to be."""

    class Slow(Early):
        ends = True

        def __init__(self, binaries, device, **how):
            super().__init__(binaries, device, **how)
            self.compiled = set()

        def wait(self, limit_s):
            if self.ends:
                self.compiled |= self.binaries - self.failures.keys()
            return super().wait(limit_s) and self.ends

    monkeypatch.setattr(startup, "EarlyWarming", Slow)
    return Slow


def test_what_is_needed_is_waited_for(slow, early):
    start(LLAMA, LIMITS)
    (made,) = early.made
    assert made.waits == [startup.LOCK_TIMEOUT_S]
    assert made.compiled == startup._start.ready and not early.late
    assert not made.stopped


def test_workers_that_hang_are_waited_for_once(slow, early):
    """And stopped, so that nobody waits for the turn that they have."""
    slow.ends = False
    start(LLAMA, LIMITS)
    made = early.made[0]
    assert made.waits == [startup.LOCK_TIMEOUT_S] and made.stopped == 1
    assert set(early.late) == startup._start.ready


def test_workers_on_a_wrong_track_are_stopped(slow, early):
    with stub_gpu("cuda"):

        def begin_with_another(vllm_config):
            vllm_config.cache_config.block_size = 16
            begin(vllm_config)

        Engine(LLAMA, LIMITS, "NHD", before_builder=begin_with_another)
    assert early.made[0].stopped == 1 and early.late


def test_what_failed_is_told_and_not_tried_again(slow, early, caplog):
    with stub_gpu("cuda"):

        def begin_and_fail(vllm_config):
            begin(vllm_config)
            (made,) = early.made
            made.failures = {
                x: "no answer within 300 s"
                for x in made.binaries
                if x.kernel == "merge"
            }

        Engine(LLAMA, LIMITS, "NHD", before_builder=begin_and_fail)
    assert not early.late
    assert "merge" not in {x.kernel for x in startup._start.ready}
    (note,) = startup._report(GPU).notes
    assert "no answer within 300 s" in note


def test_what_the_compiler_is_told_may_change_meanwhile(early, monkeypatch):
    """PyTorch's compiler sets another libdevice: builders look for those kernels."""
    seen = []
    real = startup.binaries_of_launches

    def list_them(launches, device):
        found = real(launches, device)
        if seen:
            found = {
                replace(x, options=(*x.options, ("set_since", True))): uses
                for x, uses in found.items()
            }
        return found

    monkeypatch.setattr(startup, "binaries_of_launches", list_them)
    monkeypatch.setattr(startup, "_load", lambda uses, device: None)
    with stub_gpu("cuda"):

        def begin_and_change(vllm_config):
            begin(vllm_config)
            seen.append(True)

        Engine(LLAMA, LIMITS, "NHD", before_builder=begin_and_change)
    assert set(early.late) == startup._start.ready
    assert not startup._start.ready & early.made[0].binaries


@pytest.mark.parametrize("captured", [8, 300])
@pytest.mark.parametrize("drafts", [0, 4])
def test_steps_may_be_larger_than_batches(early, captured, drafts):
    with stub_gpu("cuda"):

        def with_graphs(vllm_config):
            config = vllm_config.compilation_config
            config.cudagraph_capture_sizes = [1, 2, captured]
            if drafts:
                vllm_config.speculative_config.parallel_drafting = True
            begin(vllm_config)

        limits = EngineLimits(16, 512, speculative_tokens=drafts)
        Engine(LLAMA, limits, "NHD", before_builder=with_graphs)
    assert not early.late and early.made[0].binaries == startup._start.ready


@pytest.mark.parametrize(("mode", "warps"), [("load", {4, 8}), ("off", {4})])
def test_tuning_records_are_taken_as_builders_take_them(
    early, settings, tmp_path, mode, warps  # noqa: F811
):  # fmt: skip
    settings(PORTABLE_BACKEND_TUNE=mode)
    limits = replace(LIMITS, max_model_len=4096)
    model = tuned.model_of(
        num_query_heads=32, num_kv_heads=8, head_size=128, sliding_window=None,
        dtype=torch.bfloat16, limits=limits,
    )  # fmt: skip
    config = with_warps(DEFAULT.decode, 8)
    keys = [decode_key(model, limits, num_seqs=n) for n in (1, 4, 64, 256)]
    keep(tmp_path, *(record(key, config, gpu="sm90", arch="sm90") for key in keys))
    tuned._lookup.cache_clear()
    start(LLAMA, limits)
    tuned._lookup.cache_clear()
    (made,) = early.made
    assert not early.late and made.binaries == startup._start.ready
    decodes = [dict(x.options) for x in made.binaries if x.kernel == "decode"]
    assert {options["num_warps"] for options in decodes} == warps


def test_damaged_records_are_told_once(early, settings, tmp_path, caplog):  # noqa: F811
    (tmp_path / "decode").mkdir()
    (tmp_path / "decode" / f"{file_stem(GPU.name)}.json").write_text("{")
    settings()
    start(LLAMA, LIMITS)
    told = [x for x in caplog.records if x.levelno >= logging.WARNING]
    assert len(told) == 1
    tuned._lookup.cache_clear()


def test_a_cache_without_room_begins_nothing(early, monkeypatch):
    monkeypatch.setattr(startup, "_takes_files", lambda folder: False)
    with stub_gpu("cuda"):
        engine = Engine(LLAMA, LIMITS, "NHD")
        startup._start = startup._Start()
        early.made.clear()
        begin(engine.vllm_config)
    assert not early.made


@pytest.mark.parametrize(("switch", "begun"), [("on", 1), ("off", 0)])
def test_weights_that_are_loaded_begin_it(
    early, settings, monkeypatch, switch, begun  # noqa: F811
):  # fmt: skip
    settings(PORTABLE_BACKEND_COMPILE_AHEAD=switch)
    found = startup.get_settings()
    monkeypatch.setattr("portable_backend.impl.get_settings", lambda: found)
    with stub_gpu("cuda"):
        engine = Engine(LLAMA, LIMITS, "NHD")
        startup._start = startup._Start()
        early.made.clear()
        (impl, *_), *_ = engine.layers
        config = engine.vllm_config
        with mock.patch("vllm.config.get_current_vllm_config", lambda: config):
            for _ in range(2):  # weights may be loaded again
                impl.process_weights_after_loading(torch.bfloat16)
    assert len(early.made) == begun


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
    assert work.compiled == set(binaries) and len(binaries) > 1
    assert not cache.with_name("another").exists()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    assert not missing_binaries(binaries, GPU)
    again = EarlyWarming(binaries, GPU, folder=cache, workers=2, turn=startup.turn)
    assert again.wait(60) and not again.compiled


def test_workers_that_fail_leave_it_to_the_builder(cache, caplog):
    binaries = some_binaries()
    work = EarlyWarming(
        binaries, GPU, folder=cache, workers=1, turn=startup.turn, command=NO_WORKER
    )
    assert work.wait(60) and not work.compiled
    assert work.failures.keys() == set(binaries)
    assert not [x for x in caplog.records if x.levelno >= logging.WARNING]


def test_a_fault_of_the_thread_is_nobody_elses(cache, monkeypatch):
    monkeypatch.setattr(
        early_warming, "compile_all", mock.Mock(side_effect=OSError("no disk"))
    )
    work = EarlyWarming(
        some_binaries(), GPU, folder=cache, workers=1, turn=startup.turn
    )
    assert work.wait(60) and not work.compiled


def test_workers_that_hang_can_be_stopped(cache, tmp_path):
    """And the turn is free then."""
    script = "import time; time.sleep(600)"
    work = EarlyWarming(
        some_binaries(), GPU, folder=cache, workers=1, turn=startup.turn,
        command=(sys.executable, "-c", script),
    )  # fmt: skip
    assert not work.wait(1.0)
    began = time.monotonic()
    work.stop()
    assert work.wait(0.0) and not work.failures
    with startup.turn(cache, timeout_s=60):
        assert time.monotonic() - began < 10


def test_environment_is_left_alone(cache):
    before = dict(os.environ)
    work = EarlyWarming([], GPU, folder=cache, workers=1, turn=startup.turn)
    assert work.wait(60)
    assert dict(os.environ) == before
