# SPDX-License-Identifier: Apache-2.0
"""The shipped tables for GPUs that nobody has measured, and how they are served.

They go stale when a kernel, a default, a space or the sweeps change. To make them anew:

    python -P scripts/predict_tables.py tests/sweeps --out kernels/configs
"""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from record_fakes import log_lines

from portable_backend import kernels
from portable_backend.device import ARCH_LIMITS, DeviceInfo
from portable_backend.warmup.digest import current_digests
from portable_backend.warmup.kernel_specs import spec_of
from portable_backend.warmup.lookup import Lookup
from portable_backend.warmup.matching import Environment
from portable_backend.warmup.predicted_tables import (
    KERNELS,
    Model,
    common_keys,
    fingerprint,
    predicted_record,
    why_stale,
)
from portable_backend.warmup.readouts import FILE, Readouts
from portable_backend.warmup.space_check import space_check
from portable_backend.warmup.store import SHIPPED, RecordStore, shipped_folder
from portable_backend.warmup.sweeps import read_sweeps
from portable_backend.warmup.targets import unmeasured_devices

SWEEPS = Path(__file__).with_name("sweeps")
REMEDY = "run: python -P scripts/predict_tables.py tests/sweeps --out kernels/configs"
DEVICES = {device.name: device for device in unmeasured_devices()}
# By vendor, what the issue of portability names.
NAMED = ("nvidia_a100", "nvidia_h100", "nvidia_b200", "nvidia_l40s", "nvidia_rtx_5090")
NAMED += ("amd_instinct_mi250x", "amd_instinct_mi300x", "amd_instinct_mi355x")
NAMED += ("amd_radeon_rx_7900_xtx", "amd_radeon_rx_9070_xt")


@pytest.fixture(scope="module")
def store():
    return RecordStore.open(None)


@pytest.fixture(scope="module")
def sweeps():
    return read_sweeps(SWEEPS)


@pytest.fixture(scope="module")
def readouts():
    return Readouts(SWEEPS / FILE)


@pytest.fixture(scope="module")
def model(sweeps, readouts):
    return Model.of("decode", sweeps, readouts)


def predictions(store):
    for kernel in KERNELS:
        for layer, record in store.records(kernel):
            if layer == SHIPPED and record.unmeasured is not None:
                yield record


def lookup_of(store, device):
    environment = Environment(
        device.name, device.arch, current_digests(), {}, device.num_units
    )
    return Lookup(
        store,
        environment,
        lambda key: spec_of(key).default(key, device),
        space_check=space_check(device),
    )


def test_every_gpu_has_a_table_of_each_kernel_with_all_common_keys(store):
    assert set(NAMED) <= set(DEVICES)
    found = {(r.gpu, r.key) for r in predictions(store)}
    wanted = {(gpu, key) for gpu in DEVICES for k in KERNELS for key in common_keys(k)}
    assert found == wanted, REMEDY


def test_no_entry_is_stale(store, sweeps):
    digests = current_digests()
    prints = {k: fingerprint(s for s in sweeps if s.kernel == k) for k in KERNELS}
    stale = {
        f"{record.gpu} {record.key}": reason
        for record in predictions(store)
        if (reason := why_stale(record, DEVICES[record.gpu], digests, prints))
    }
    assert not stale, f"{len(stale)} entries, as {next(iter(stale.items()))}; {REMEDY}"


def test_entries_say_that_nobody_measured_them_and_on_what_they_rest(store, sweeps):
    swept = {sweep.kernel for sweep in sweeps}
    for record in predictions(store):
        told = record.unmeasured
        assert (record.time_us, record.verified, record.measured) == (None, False, None)
        basis = "sweeps" if record.key.kernel in swept else "resources"
        assert told["basis"] == basis
        assert bool(told["fitted_on"]) == (basis == "sweeps")
        if basis == "resources":  # no evidence, no place
            assert not told["serves"]
        if told["serves"]:
            assert told["predicted_gain"] >= told["needed_gain"] > 1
        else:
            assert told["reason"]


def test_configs_compile_for_their_gpu_within_its_limits_and_without_spills(
    store, readouts
):
    count = 0
    for record in predictions(store):
        device = DEVICES[record.gpu]
        told, default = record.unmeasured, spec_of(record.key).default
        if record.config == default(record.key, device) and not told["serves"]:
            continue  # other tests compile the defaults
        count += 1
        problem = readouts.why_not(record.key, record.config, device)
        assert problem is None, f"{record.gpu} {record.key}: {problem}; {REMEDY}"
    assert count > 100


def test_read_outs_are_of_todays_kernels(store, readouts):
    held = {kernel: part["digest"] for kernel, part in readouts._held.items()}
    digests = current_digests()
    assert held == {kernel: digests[kernel] for kernel in KERNELS}, REMEDY


@pytest.mark.parametrize("gpu", ["nvidia_a100", "amd_instinct_mi300x"])
def test_tables_come_from_the_model_of_these_sweeps(store, model, readouts, gpu):
    key = next(key for key in common_keys("decode") if key.to_dict()["num_seqs"] == 8)
    digest = current_digests()["decode"]
    fresh = predicted_record(model, key, DEVICES[gpu], readouts, digest)
    (held,) = (r for r in predictions(store) if (r.gpu, r.key) == (gpu, key))
    assert held.config == fresh.config, REMEDY
    assert held.unmeasured["serves"] == fresh.unmeasured["serves"]
    assert held.unmeasured["predicted_gain"] == pytest.approx(
        fresh.unmeasured["predicted_gain"], abs=0.011
    )


def test_the_h200_serves_what_it_always_served(store):
    device = DeviceInfo("nvidia_h200", "sm90", 132, ARCH_LIMITS["sm90"])
    lookup = lookup_of(store, device)
    for kernel in KERNELS:
        for key in common_keys(kernel):
            choice = lookup.choose(key)
            assert choice.grade == "default"
            assert choice.config == spec_of(key).default(key, device)


@pytest.mark.parametrize("gpu", sorted(DEVICES))
def test_a_gpu_under_its_drivers_name_is_served_by_its_units(store, gpu):
    device = DEVICES[gpu]
    named = replace(device, name=f"{gpu}-as-drivers-say")
    lookup = lookup_of(store, named)
    half = lookup_of(store, replace(named, num_units=3))
    for record in predictions(store):
        if record.gpu != gpu:
            continue
        choice = lookup.choose(record.key)
        if record.unmeasured["serves"]:
            assert (choice.grade, choice.config) == ("unmeasured", record.config)
        else:
            assert choice.grade == "default"
        assert half.choose(record.key).grade == "default"


def test_tables_are_read_quickly_and_a_lookup_costs_nothing_then():
    assert sum(p.stat().st_size for p in shipped_folder().rglob("*.json")) < 2 << 20
    assert Path(kernels.__path__[0]) in shipped_folder().parents
    device = DEVICES["nvidia_a100"]
    key = next(common_keys("decode"))
    with log_lines() as lines:
        lookup = lookup_of(RecordStore.open(None), device)
        lookup.choose(key)
    assert lines == []
    best = min(_timed(lookup, key) for _ in range(20))
    assert best < 2e-6


def _timed(lookup, key):
    started = time.perf_counter()
    for _ in range(1000):
        lookup.choose(key)
    return (time.perf_counter() - started) / 1000
