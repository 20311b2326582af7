# SPDX-License-Identifier: Apache-2.0
"""What a start prepares is all that a stub GPU's steps launch: run by test_startup.py.

Not collected by itself, since Triton's interpreter must be off before triton loads.
"""

import logging
import os
import shlex
import threading
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import triton
from stub_binaries import LIMITS, SMOLLM2, WALKS, Engine, walk
from stub_driver import stub_gpu
from test_model_shapes import GEMMA2, GPT_OSS, LLAMA, QWEN3
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from portable_backend import engine_norms, likely_layers, startup, tuned, tuned_rows
from portable_backend.device import DeviceInfo
from portable_backend.kernels import served
from portable_backend.kernels.config import KernelConfig
from portable_backend.kernels.plan import StepKind, default_config
from portable_backend.settings import Settings
from portable_backend.warmup import compile_pool, toolchain
from portable_backend.warmup.binaries import serving_launches
from portable_backend.warmup.binary import binaries_of_launches
from portable_backend.warmup.buckets import EngineLimits
from portable_backend.warmup.compilation import in_graph, recording
from portable_backend.warmup.report import read_report, report_path
from portable_backend.warmup.warming import Warmed

pytestmark = pytest.mark.vllm
DEFAULT = default_config(
    num_queries_per_kv=4,
    head_size=128,
    dtype=torch.bfloat16,
    block_size=64,
    device=DeviceInfo.for_arch("sm90", 132),
    num_kv_heads=8,
)
compile_for_real = triton.compiler.compile
GPU = DeviceInfo.for_arch("sm90", 132)
SMALL = EngineLimits(max_num_seqs=2, max_num_batched_tokens=64)


@pytest.fixture(autouse=True)
def settings(tmp_path, monkeypatch):
    """A process that has prepared nothing, with caches of its own."""
    folder = str(tmp_path / "triton")
    monkeypatch.setattr(startup.plugin, "TRITON_CACHE_AT_START", folder)
    # For what steps compile; as a rule the same.
    monkeypatch.setenv("TRITON_CACHE_DIR", folder)
    monkeypatch.setattr(startup, "_start", startup._Start())

    def use(**environ):
        values = {
            "PORTABLE_BACKEND_CACHE_DIR": str(tmp_path),
            "PORTABLE_BACKEND_COMPILE_AHEAD": "on",
        } | environ
        found = Settings.from_env(values)
        monkeypatch.setattr("portable_backend.settings.get_settings", lambda: found)
        for module in (startup, likely_layers):
            monkeypatch.setattr(module, "get_settings", lambda: found)
        monkeypatch.setattr(tuned, "get_settings", lambda: found)
        tuned._lookup.cache_clear()

    use()
    return use


@pytest.fixture
def all_present(monkeypatch):
    """Nothing is compiled: the stub's compiler answers for whatever is asked."""
    monkeypatch.setattr(startup, "missing_binaries", lambda binaries, device: [])


def kernels(binaries):
    return {binary.kernel for binary in binaries}


@pytest.mark.parametrize("name", WALKS)
def test_steps_compile_nothing_after_a_start(all_present, name):
    prepared = {}
    late = walk(*WALKS[name], steps=120, on_start=prepared.update)
    assert len(prepared) > 10
    surprises = [str(binary) for binary in late.values()]
    assert not surprises, surprises
    assert startup._start.ready == set(prepared.values())


def begin(vllm_config):
    """As when weights are loaded; nothing is missing, so no worker begins."""
    with mock.patch("vllm.config.get_current_vllm_config", lambda: vllm_config):
        startup.begin(torch.device("cpu"))


@pytest.mark.parametrize("before_builder", [None, begin], ids=["", "begun early"])
@pytest.mark.parametrize("name", WALKS)
def test_steps_compile_nothing_with_recorded_norms_and_writes(
    all_present, monkeypatch, name, before_builder
):
    """Each size has a config of its own, as records might give it."""
    ordinary = tuned_rows._rows

    class Recorded:
        def choose(self, key):
            nth = sorted(dict(key.sizes).values())[0].bit_length() % 3
            values = {"ROWS": 2 << nth, "num_warps": 4}
            if key.kernel == "kv_cache":
                values = {"VECTORS": 64 << nth, "num_warps": 2}
            return mock.Mock(grade="exact", config=KernelConfig.of(**values))

    def rows(lookup, shapes, limits):
        return ordinary(Recorded(), shapes, limits)

    monkeypatch.setattr(tuned_rows, "_rows", rows)
    prepared = {}
    try:
        late = walk(
            *WALKS[name],
            steps=120,
            on_start=prepared.update,
            before_builder=before_builder,
        )
    finally:
        served.forget()
    surprises = [str(binary) for binary in late.values()]
    assert not surprises, surprises
    assert startup._start.begun == (before_builder is not None)
    ready = startup._start.ready
    assert {b.parameters["VECTORS"] for b in ready if b.kernel == "write_kv_cache"} <= {
        64, 128, 256
    }  # fmt: skip
    tiles = {b.parameters["ROWS"] for b in ready if b.kernel == "rms_norm"}
    assert tiles and tiles <= {2, 4, 8}


def test_a_cold_start_compiles_ahead_and_the_next_one_finds_it(
    settings, tmp_path, monkeypatch, caplog
):
    def start(steps):
        """(what compiled in this process, from there on) of an engine."""
        monkeypatch.setattr(startup, "_start", startup._Start())
        here, hits = [], []

        def listen(*, src, cache_hit, **_):
            (hits if cache_hit else here).append(src.fn.__name__)

        with mock.patch.object(knobs.compilation, "listener", listen):
            walk(
                "cuda", SMOLLM2, SMALL, steps,
                compiler=compile_for_real, on_start=lambda found: None,
            )  # fmt: skip
        assert len(set(hits)) > 3
        assert not here
        return startup._start

    caplog.set_level(logging.INFO, "vllm.portable_backend")
    first = start(60)
    assert first.compiled == len(first.ready) > 10
    assert not first.notes
    assert (tmp_path / "triton" / startup.LOCK).exists()
    (told,) = [x for x in caplog.messages if "kernels ready" in x]
    assert f"{first.compiled} kernels ready: {first.compiled} compiled, 0 were" in told

    workers = mock.Mock(side_effect=AssertionError("nothing is to be compiled"))
    monkeypatch.setattr(startup, "warm_binaries", workers)
    settings(PORTABLE_BACKEND_TUNE="off")
    second = start(10)
    assert second.compiled == 0 and second.ready == first.ready
    report = read_report(report_path(tmp_path, GPU.name))
    assert report.compiled == 0 and report.binaries == len(first.ready)
    assert report.mode == "off" and report.grades == {}
    assert report.extra["triton_cache"] == str(tmp_path / "triton")


@pytest.fixture
def another_ptxas(tmp_path, monkeypatch):
    """Named after Triton has asked the usual one, as PyTorch's compiler does it."""
    tool = Path(knobs.nvidia.ptxas.path)
    script = tmp_path / "ptxas"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo another build\n'
        f'exec {shlex.quote(str(tool))} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setattr(toolchain, "_settled", [])
    toolchain.settle(GPU)
    for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
        monkeypatch.setenv(name, str(script))


def cold_start(monkeypatch):
    """(state of a start, kernels compiled in this process)."""
    monkeypatch.setattr(startup, "_start", startup._Start())
    here = []

    def listen(*, src, cache_hit, **_):
        here.extend([] if cache_hit else [src.fn.__name__])

    with mock.patch.object(knobs.compilation, "listener", listen):
        walk(
            "cuda", SMOLLM2, SMALL, 5,
            compiler=compile_for_real, on_start=lambda found: None,
        )  # fmt: skip
    return startup._start, here


def test_workers_use_the_compiler_that_this_process_settled_on(
    another_ptxas, monkeypatch
):
    state, here = cold_start(monkeypatch)
    assert state.compiled == len(state.ready) > 10
    assert not here and not state.notes


def test_kernels_of_another_compiler_are_told(another_ptxas, monkeypatch, caplog):
    monkeypatch.setattr(
        compile_pool, "child_environment", lambda device: dict(os.environ)
    )
    state, here = cold_start(monkeypatch)
    assert len(here) == state.compiled > 10  # the bug that this would be
    (note,) = state.notes
    assert "compiled by another compiler" in note
    assert note in caplog.messages


@pytest.mark.parametrize("config", [GPT_OSS, GEMMA2, LLAMA])
def test_builders_of_an_engine_do_nothing_twice(all_present, config):
    with (
        stub_gpu("cuda"),
        mock.patch.object(
            startup, "serving_launches", wraps=serving_launches
        ) as listed,
    ):
        for _ in range(2):
            Engine(config, LIMITS, "NHD")
    done = [tuple(map(repr, call.args[:3])) for call in listed.call_args_list]
    assert len(done) == len(set(done))
    windows = 2 if config is not LLAMA else 1
    assert len(done) == windows + 1  # and the norms


def test_a_shorter_context_is_no_new_work(all_present):
    with stub_gpu("cuda"):
        Engine(LLAMA, EngineLimits(max_model_len=4096), "NHD")
        known = set(startup._start.needs)
        Engine(LLAMA, EngineLimits(max_model_len=2048), "NHD")
    assert startup._start.needs == known


@pytest.mark.parametrize("norms", ["on", "off"])
def test_norms_are_prepared_where_they_serve(all_present, settings, norms):
    settings(PORTABLE_BACKEND_RMS_NORM=norms)
    with stub_gpu("cuda"):
        Engine(QWEN3, LIMITS, "NHD")
    assert ("rms_norm" in kernels(startup._start.ready)) == (norms == "on")
    assert {"plan", "decode", "prefill"} <= kernels(startup._start.ready)


def test_norms_of_a_config_that_nobody_reads_have_the_hidden_size():
    model_config = mock.Mock(dtype=next(iter(engine_norms._DTYPE_NAMES)))
    model_config.get_hidden_size.return_value = 640
    shape = engine_norms.norm_shape(model_config, {"n_embd": 640}, None)
    assert {(norm.row_size, norm.fused_add) for norm in shape.norms} == {
        (640, True),
        (640, False),
    }
    assert shape.windows == ()


def test_what_does_not_compile_is_told_and_the_rest_is_loaded(
    all_present, monkeypatch, caplog
):
    wrong = []

    def compile_some(binaries, device, folder):
        wrong.append(next(x for x in binaries if x.kernel == "merge"))
        return Warmed(compiled=len(binaries) - 1, failures=[(wrong[0], "no luck")])

    monkeypatch.setattr(startup, "_compile", compile_some)
    with stub_gpu("cuda"):
        Engine(LLAMA, LIMITS, "NHD")
    assert wrong[0] not in startup._start.ready
    assert len(startup._start.ready) > 10
    (told,) = [x for x in caplog.messages if "not ready" in x]
    assert "1 kernels are not ready" in told and "no luck" in told
    assert startup._report(GPU).notes == (f"{wrong[0]}: no luck",)


def test_what_the_device_refuses_is_told():
    launch = mock.Mock(args=(), kwargs={})
    launch.function.run.side_effect = RuntimeError("out of resource")
    failure = startup._load([launch], torch.device("cpu"))
    assert failure == "RuntimeError: out of resource"


def test_nothing_is_loaded_while_a_graph_is_captured(all_present, monkeypatch):
    monkeypatch.setattr(startup, "capturing", lambda: True)
    with stub_gpu("cuda"):
        Engine(LLAMA, LIMITS, "NHD")
        assert not startup._start.needs
        monkeypatch.setattr(startup, "capturing", lambda: False)
        Engine(LLAMA, LIMITS, "NHD")
    assert startup._start.ready


def test_another_thread_meanwhile_sees_the_real_triton():
    """As does everybody afterwards, whatever they kept."""
    seen = {}

    def look(name):
        seen[name] = (
            DeviceInfo.detect("cuda"),
            driver.active.get_current_device(),
            driver.active.get_current_stream(0),
            driver.active.get_current_target(),
            driver.active.utils,
            startup.capturing(),
        )

    def in_thread(call, *args):
        thread = threading.Thread(target=call, args=args)
        thread.start()
        thread.join(60)

    function = mock.Mock(spec=JITFunction)
    with stub_gpu("cuda", num_units=7) as gpu:
        gpu.in_graph = False
        ordinary = []

        def run(self, *args, **kwargs):
            ordinary.append((args, kwargs))

        with mock.patch.object(JITFunction, "run", run):
            look("before")
            with recording(DeviceInfo.for_arch("gfx942")) as launches, in_graph(True):
                kept_run, kept_driver = JITFunction.run, driver.active
                kept_detect = DeviceInfo.detect
                assert DeviceInfo.detect("cuda").arch == "gfx942"
                assert driver.active.get_current_device() == "gfx942"
                in_thread(look, "meanwhile")
                in_thread(lambda: kept_run(function, 1, grid=(1,), warmup=False))
                assert ordinary == [((1,), {"grid": (1,), "warmup": False})]
                function.__name__ = "_some_kernel"
                kept_run(function, 2, grid=(1,), warmup=False)
                assert [launch.args for launch in launches] == [(2,)]
            kept_run(function, 3, grid=(1,), warmup=False)
            look("after")
        assert len(launches) == 1 and len(ordinary) == 2
        assert kept_driver.get_current_device() == 0
        assert kept_detect("cuda").num_units == 7
    assert seen["before"] == seen["meanwhile"] == seen["after"]


def test_a_listing_leaves_loaded_kernels_alone(all_present):
    """The next builder's list does not unload what the first one's start has loaded."""
    found = []
    with stub_gpu("cuda") as gpu:

        def compile_and_note(src, target=None, options=None, **more):
            found.append(src.fn.__name__)
            return gpu.compile(src, target, options)

        with mock.patch.object(triton.compiler, "compile", compile_and_note):
            Engine(LLAMA, LIMITS, "NHD")
            (need,) = [x for x in startup._start.needs if x.model.windows]
            launches = need.launches(GPU)
            count = len(found)
            for uses in binaries_of_launches(launches, GPU).values():
                assert startup._load(uses, torch.device("cpu")) is None
    assert len(found) == count > 10


def test_what_serves_is_listed_and_no_default_beside_it(all_present, monkeypatch):
    from portable_backend import metadata

    chosen = []

    def choose(*, max_num_seqs, **_):
        """A config for each kind of step, as records might give it."""
        kinds = StepKind.within(max_num_seqs)
        chosen.append(replace(DEFAULT, decode=with_warps(DEFAULT.decode, 8)))
        return dict.fromkeys(kinds, chosen[0])

    monkeypatch.setattr(metadata, "configs_for_engine", choose)
    with stub_gpu("cuda"):
        Engine(LLAMA, LIMITS, "NHD")
    (need,) = [x for x in startup._start.needs if x.model.windows]
    assert {config for _, _, config in need.configs} == {chosen[0]}
    warps = {
        dict(binary.options)["num_warps"]
        for binary in startup._start.ready
        if binary.kernel == "decode"
    }
    assert warps == {8}


def with_warps(config, number):
    return KernelConfig.of(**(config.to_dict() | {"num_warps": number}))
