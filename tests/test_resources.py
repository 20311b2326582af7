# SPDX-License-Identifier: Apache-2.0
"""The resource model: known occupancies, sane directions, nothing good pruned."""

import math
import random

import pytest
from tuning_keys import decode_key, norm_key, prefill_key, write_key

from portable_backend.device import ARCH_LIMITS, ArchLimits, DeviceInfo
from portable_backend.warmup.kernel_specs import spec_of
from portable_backend.warmup.resources import (
    UNIT_LIMITS,
    Readout,
    estimate_us,
    estimates_us,
    over_limit,
    programs_per_unit,
    prune,
)

H200 = DeviceInfo.for_arch("sm90", 132)
MI300X = DeviceInfo.for_arch("gfx942", 304)
READOUT = Readout(49152, 128, 0, 4, 1.0, num_warps=4)

# From the vendors' occupancy tables.
OCCUPANCIES = [
    ("sm90", {"num_warps": 4, "registers": 128}, 4),
    ("sm90", {"num_warps": 4, "registers": 255}, 2),
    ("sm90", {"num_warps": 8, "registers": 168}, 1),
    ("sm90", {"num_warps": 4, "registers": 32}, 16),
    ("sm90", {"num_warps": 1, "registers": 16}, 32),  # no more programs than that
    ("sm90", {"num_warps": 4, "shared_bytes": 113 * 1024}, 2),
    ("sm90", {"num_warps": 4, "shared_bytes": 114 * 1024}, 1),  # 1 KiB is reserved
    ("sm90", {"num_warps": 4, "shared_bytes": 228 * 1024}, 0),
    ("sm90", {"num_warps": 33}, 0),
    ("sm86", {"num_warps": 8, "registers": 40}, 6),
    ("sm100", {"num_warps": 4, "registers": 64, "tensor_columns": 256}, 2),
    ("gfx90a", {"num_warps": 4, "registers": 128}, 4),
    ("gfx942", {"num_warps": 4, "registers": 64}, 8),
    ("gfx942", {"num_warps": 4, "registers": 257}, 1),
    ("gfx942", {"num_warps": 4, "registers": 64, "shared_bytes": 32 * 1024}, 2),
    ("gfx942", {"num_warps": 17}, 0),  # of 64 lanes
    ("gfx1100", {"num_warps": 8, "registers": 96}, 8),
    ("gfx1100", {"num_warps": 8, "registers": 256}, 2),
]


@pytest.mark.parametrize(("arch", "taken", "expected"), OCCUPANCIES)
def test_occupancies_are_those_of_the_vendors_tables(arch, taken, expected):
    assert programs_per_unit(DeviceInfo.for_arch(arch), **taken) == expected


def test_every_architecture_that_we_know_has_its_numbers():
    assert set(UNIT_LIMITS) == set(ARCH_LIMITS) - {"interpreter"}


def test_an_unknown_architecture_counts_as_a_small_one():
    limits = ArchLimits("cuda", 32, 99 << 10, 100 << 10)
    device = DeviceInfo("nvidia_next", "sm999", 100, limits)
    assert programs_per_unit(device, num_warps=4, registers=64) == 8
    key = decode_key()
    assert 0 < estimate_us(key, spec_of(key).default(key, device), device) < math.inf


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shared_bytes": 65_792}, "wants 65792 bytes of shared memory, a block has"),
        ({"num_warps": 32}, "wants 32 warps of 64 lanes"),
        ({"tensor_columns": 576}, "wants 576 columns of tensor memory"),
        ({"programs_per_unit": 0}, "wants 128 registers for 4 warps"),
    ],
)
def test_what_does_not_fit_is_said(changes, said):
    fits = {"shared_bytes": 65_536, "registers": 128, "spills": 0, "seconds": 1.0}
    fits |= {"programs_per_unit": 1, "num_warps": 4}
    assert over_limit(Readout(**fits), MI300X) is None
    assert said in over_limit(Readout(**fits | changes), MI300X)


KEYS = [
    prefill_key(4, 2048),
    prefill_key(1, 128),
    prefill_key(1, 2048, 8192),
    prefill_key(8, 16, 4096, block_size=16),
    prefill_key(1, 1024, dtype="float32", head_size=64),
    prefill_key(1, 1000, head_size=256, num_queries_per_kv=8, sliding_window=1024),
    decode_key(),
    decode_key(1, 1, 128),
    decode_key(1, 4, 16384, block_size=16),
    decode_key(256, 1, 1024),
    decode_key(8, 8, 1024, num_queries_per_kv=16, num_kv_heads=1),
    norm_key(1),
    norm_key(16384, 8192, 0),
    norm_key(4096, 128, 0),
    write_key(1),
    write_key(16384),
]


@pytest.mark.parametrize(
    "key",
    KEYS,
    ids=str,
)
def test_defaults_and_their_neighbours_are_never_pruned(key):
    space = spec_of(key).bound(key, H200)
    default = spec_of(key).default(key, H200)
    kept, dropped = prune(key, space.configs, H200, keep=1)
    twins = {p.config for p in dropped if p.reason.startswith("runs as")}
    assert default in kept
    assert set(space.neighbours(default)) <= {*kept, *twins}
    assert len(kept) + len(dropped) == len(space)
    assert not set(kept) & {pruned.config for pruned in dropped}
    times = [estimate_us(key, config, H200) for config in kept]
    assert times == sorted(times)


@pytest.mark.parametrize("key", [KEYS[0], KEYS[2], KEYS[3], KEYS[8]], ids=str)
def test_hopeless_configs_are_pruned_with_a_reason(key):
    space = spec_of(key).bound(key, H200)
    kept, dropped = prune(key, space.configs, H200, keep=32)
    assert len(dropped) >= 20
    assert len(kept) >= 32
    estimated = [p for p in dropped if not p.reason.startswith("runs as")]
    assert len(estimated) >= 20
    assert all("x of the best" in pruned.reason for pruned in estimated)
    # Of a few thousand candidates, what is dropped last is worth no look.
    worst = max(space.configs, key=lambda config: estimate_us(key, config, H200))
    assert worst in {pruned.config for pruned in dropped}


def test_what_runs_as_another_config_is_pruned():
    """Cached keys are no new tokens, and decode fetches no window by descriptor."""
    cached, window = KEYS[2], decode_key(sliding_window=512)
    for key, block_n, load, instead in (
        (cached, 64, "new", "descriptor"),
        (cached, 128, "new", "pointer"),  # tiles of more than a block
        (window, 64, "descriptor", "pointer"),
    ):
        default = spec_of(key).default(key, H200).replace(BLOCK_N=block_n)
        plain, same = (default.replace(LOAD=name) for name in (instead, load))
        kept, dropped = prune(key, [same, plain], H200, keep=2)
        assert kept == [plain]
        assert dropped[0].reason == f"runs as LOAD={instead} here"
        assert prune(key, [same], H200, keep=2)[0] == [same]
    fresh = spec_of(KEYS[0]).default(KEYS[0], H200)
    both = [fresh.replace(LOAD=name) for name in ("pointer", "new")]
    assert len(prune(KEYS[0], both, H200, keep=2)[0]) == 2


def test_keep_holds_back_what_only_the_model_dislikes():
    key = KEYS[0]
    configs = spec_of(key).bound(key, H200).configs
    everything, nothing = prune(key, configs, H200, keep=len(configs))
    assert nothing == []
    assert sorted(map(str, everything)) == sorted(map(str, configs))
    fewer, _ = prune(key, configs, H200, keep=0, slack=1.5)
    most, _ = prune(key, configs, H200, keep=0, slack=4)
    assert 0 < len(fewer) < len(most) < len(configs)
    assert most[: len(fewer)] == fewer


def test_readouts_decide_where_there_are_any():
    key = KEYS[0]
    default = spec_of(key).default(key, H200)
    names = ("fine", "spilling", "crowded", "large")
    # These differ in what the model does not look at.
    configs = [
        default.replace(QUERY=query, launch_pdl=early)
        for query in ("shared", "registers")
        for early in (None, True)
    ]
    readouts = {
        configs[0]: READOUT,
        configs[1]: Readout(49152, 255, 120, 2, 1.0, num_warps=4),
        configs[2]: Readout(200 << 10, 255, 0, 1, 1.0, num_warps=1),
        configs[3]: Readout(300 << 10, 128, 0, 0, 1.0, num_warps=4),
    }
    kept, dropped = prune(key, configs, H200, keep=1, slack=1.2, readouts=readouts)
    reasons = dict(zip(names[1:], (p.reason for p in dropped), strict=True))
    assert kept == configs[:1]
    assert reasons["spilling"] == "spills 120 registers"
    assert reasons["crowded"].endswith("1 programs fit a unit where others have 4")
    assert "bytes of shared memory" in reasons["large"]
    # However many are to be kept, one that cannot be launched is not among them.
    kept, dropped = prune(key, configs, H200, keep=4, readouts=readouts)
    assert [pruned.config for pruned in dropped] == configs[3:]


@pytest.mark.parametrize(("options", "name"), [({"keep": -1}, "keep")])
def test_prune_refuses_nonsense(options, name):
    with pytest.raises(ValueError, match=name):
        prune(KEYS[0], [], H200, **options)
    with pytest.raises(ValueError, match="slack"):
        prune(KEYS[0], [], H200, keep=1, slack=0.5)
    assert prune(KEYS[0], [], H200, keep=1) == ([], [])


# ------------------------------------------------ what more of something does to a time


def default_time(key, device=H200, readout=None, **changes):
    config = spec_of(key).default(key, H200).replace(**changes)
    return estimate_us(key, config, device, readout)


@pytest.mark.parametrize("make", [prefill_key, decode_key], ids=["prefill", "decode"])
def test_more_requests_take_longer(make):
    times = [default_time(make(num_seqs=n)) for n in (1, 4, 32, 256)]
    assert times == sorted(times)
    assert times[-1] > 4 * times[0]


def test_more_of_anything_takes_longer():
    for make, sizes in (
        (lambda n: prefill_key(query_len=n), (64, 512, 4096)),
        (lambda n: prefill_key(context_len=n), (1024, 8192, 65536)),
        (lambda n: decode_key(seq_len=n), (512, 4096, 32768)),
        (lambda n: norm_key(n), (64, 1024, 65536)),
        (lambda n: write_key(n), (64, 1024, 65536)),
    ):
        times = [default_time(make(n)) for n in sizes]
        assert times == sorted(set(times))


def test_a_window_shortens_a_long_context():
    long = decode_key(seq_len=32768)
    assert default_time(decode_key(seq_len=32768, sliding_window=1024)) < (
        default_time(long) / 4
    )


@pytest.mark.parametrize("key", [KEYS[0], KEYS[6]], ids=str)
def test_spills_and_low_occupancy_cost(key):
    spilling = [
        default_time(key, readout=Readout(49152, 255, n, 4, 1.0)) for n in (0, 32, 200)
    ]
    assert spilling == sorted(set(spilling))
    holding = [
        default_time(key, readout=Readout(49152, 128, 0, n, 1.0)) for n in (1, 2, 4)
    ]
    assert holding == sorted(holding, reverse=True)
    assert holding[0] > holding[-1]
    assert default_time(key, readout=Readout(49152, 128, 0, 0, 1.0)) == math.inf


def test_rows_of_short_prompts_that_nobody_asked_for_cost():
    """A tile of 128 rows for 16 tokens of 4 heads is half empty."""
    key = prefill_key(8, 16, 4096)
    base = {"PACK": 4, "num_stages": 2, "num_warps": 4, "LOAD": "descriptor"}
    full = default_time(key, BLOCK_M=64, **base)
    assert default_time(key, BLOCK_M=128, **base) > full


def test_more_units_are_faster():
    for key in (KEYS[0], KEYS[2], KEYS[6], KEYS[12]):
        small = DeviceInfo.for_arch("sm90", 66)
        assert default_time(key, H200) < default_time(key, small)


@pytest.mark.parametrize(
    "key",
    [
        prefill_key(),
        prefill_key(context_len=512, num_seqs=4),
        decode_key(),
        decode_key(sliding_window=1024),
        norm_key(num_rows=8192),
        write_key(),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", [H200, MI300X])
def test_many_estimates_at_once_are_those_of_each(key, device):
    """They are made once for configs that agree in all that the model reads."""
    configs = spec_of(key).bound(key, device).sample(300, random.Random(0))
    each = [estimate_us(key, config, device) for config in configs]
    assert estimates_us(key, configs, device) == each
    readout = READOUT
    found = estimates_us(key, configs, device, {configs[0]: readout})
    known = estimate_us(key, configs[0], device, readout)
    assert found == [known, *each[1:]]
