# SPDX-License-Identifier: Apache-2.0
"""The spaces of all kernels: what they hold beside the frozen sets, and why."""

import itertools
import pickle
import random
from dataclasses import replace

import pytest
import torch

from portable_backend.device import ARCH_LIMITS, DeviceInfo
from portable_backend.kernels import kv_cache_space, rms_norm_space
from portable_backend.kernels.attention_space import (
    DECODE_SPACE,
    MERGE_SPACE,
    PREFILL_SPACE,
    AttentionShape,
)
from portable_backend.kernels.config import KernelConfig
from portable_backend.kernels.kv_cache_space import KVCacheProblem
from portable_backend.kernels.plan import StepKind, default_config
from portable_backend.kernels.rms_norm_space import RMSNormProblem

LLAMA = AttentionShape(
    num_queries_per_kv=4, head_size=128, element_size=2, block_size=16
)
ATTENTION = (
    LLAMA,
    replace(LLAMA, block_size=64),
    replace(LLAMA, num_queries_per_kv=3, head_size=80),
    replace(LLAMA, head_size=256),
    replace(LLAMA, head_size=256, element_size=4),
)
# Short and long rows, few and many, in either type, to the extremes.
RMS_NORM = tuple(
    RMSNormProblem(row_size, num_rows, element_size)
    for row_size in (8, 128, 576, 4096, 65536)
    for num_rows in (1, 4096, 4097, 2**20)
    for element_size in (2, 4)
)
KV_CACHE = tuple(KVCacheProblem(n) for n in (1, 2**16, 2**18, 2**18 + 1, 2**22))
SPACES = {
    "prefill": (PREFILL_SPACE, ATTENTION),
    "decode": (DECODE_SPACE, ATTENTION),
    "merge": (MERGE_SPACE, ATTENTION[:1]),
    "rms_norm": (rms_norm_space.SPACE, RMS_NORM),
    "kv_cache": (kv_cache_space.SPACE, KV_CACHE),
}
DEVICES = [DeviceInfo.for_arch(arch) for arch in ARCH_LIMITS]
GPUS = [device for device in DEVICES if device.platform != "interpreter"]
CONSTRAINTS = [(k, c.name) for k, (s, _) in SPACES.items() for c in s.constraints]
DTYPES = {2: torch.bfloat16, 4: torch.float32}


@pytest.mark.parametrize("space", [PREFILL_SPACE, DECODE_SPACE])
def test_llama_has_many_configs_on_hopper(space):
    assert space.count(LLAMA, DeviceInfo.for_arch("sm90", 132)) >= 450


@pytest.mark.parametrize(
    ("arch", "queries_per_kv", "head_size", "element_size", "values"),
    [
        ("sm90", 8, 128, 2, {"BLOCK_N": 128, "num_stages": 4, "num_warps": 4}),
        ("sm100", 8, 128, 2, {"BLOCK_N": 128, "num_stages": 4, "num_warps": 4}),
        ("sm90", 8, 256, 2, {"BLOCK_N": 64, "num_stages": 4, "num_warps": 4}),
        ("sm100", 16, 256, 2, {"BLOCK_N": 64, "num_stages": 4, "num_warps": 4}),
        ("sm120", 16, 256, 4, {"BLOCK_N": 16, "num_stages": 2, "num_warps": 2}),
    ],
)
def test_a_decode_config_has_room_for_the_longest_decodes_rows(
    arch, queries_per_kv, head_size, element_size, values
):
    """Each of these took more than a block has with 8 tokens a request."""
    device = DeviceInfo.for_arch(arch)
    config = KernelConfig.of(
        **values,
        CTAS_PER_UNIT=2,
        LOAD="pointer",
        MERGE="kernel",
        MIN_CHUNK=1,
        matrix_instr_nonkdim=16,
        launch_pdl=None,
    )
    shape = AttentionShape(queries_per_kv, head_size, element_size, 64)
    (why,) = DECODE_SPACE.why_not(config, shape, device)
    assert "shared_memory" in str(why)
    alone = replace(shape, num_queries_per_kv=1)
    assert DECODE_SPACE.why_not(config, alone, device) == []
    with_drafts = replace(alone, longest_decode=64)
    assert DECODE_SPACE.why_not(config, with_drafts, device)


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.arch)
@pytest.mark.parametrize("head_size", [32, 64, 80, 96, 128, 256])
def test_every_attention_default_is_in_its_space(head_size, device):
    """The interpreter's only save steps of Python; nobody tunes them."""
    for queries_per_kv, element_size, block_size in itertools.product(
        (1, 3, 4, 8), DTYPES, (16, 64)
    ):
        shape = AttentionShape(queries_per_kv, head_size, element_size, block_size)
        for kind in StepKind.within(256):
            config = default_config(
                num_queries_per_kv=queries_per_kv,
                num_kv_heads=8,
                head_size=head_size,
                dtype=DTYPES[element_size],
                block_size=block_size,
                device=device,
                kind=kind,
            )
            assert PREFILL_SPACE.why_not(config.prefill, shape, device) == []
            assert DECODE_SPACE.why_not(config.decode, shape, device) == []
            assert MERGE_SPACE.why_not(config.merge, shape, device) == []


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.arch)
def test_every_default_of_the_small_kernels_is_in_its_space(device):
    for problem in RMS_NORM:
        config = rms_norm_space.default_config(
            row_size=problem.row_size,
            num_rows=problem.num_rows,
            dtype=DTYPES[problem.element_size],
            device=device,
        )
        assert rms_norm_space.SPACE.why_not(config, problem, device) == []
    for given in KV_CACHE:
        # So many units that two programs each do not remain.
        for units in (device.num_units, 4096):
            many = replace(device, num_units=units)
            config = kv_cache_space.default_config(
                num_vectors=given.num_vectors, device=many
            )
            assert kv_cache_space.SPACE.why_not(config, given, many) == []


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.arch)
@pytest.mark.parametrize("kernel", SPACES)
def test_whatever_is_drawn_or_bred_is_a_member(kernel, device):
    space, problems = SPACES[kernel]
    rng = random.Random(f"{kernel} {device.arch}")
    for problem in rng.sample(list(problems), max(1, len(problems) // 3)):
        members = set(space.configs(problem, device))
        assert space.count(problem, device) == len(members)
        sample = space.sample(4, rng, problem, device)
        assert len(set(sample)) == len(sample) == min(4, len(members))
        for config in sample:
            assert space.why_not(config, problem, device) == []
            other = rng.choice(sample)
            bred = [
                config,
                space.mutate(config, rng, problem, device),
                space.crossover(config, other, rng, problem, device),
                *space.neighbours(config, problem, device),
            ]
            assert members.issuperset(bred)


@pytest.mark.parametrize(("kernel", "name"), CONSTRAINTS)
def test_no_constraint_is_idle(kernel, name):
    """Without it, some space would be larger; with it, why_not names it there."""
    space, problems = SPACES[kernel]
    others = tuple(c for c in space.constraints if c.name != name)
    without = replace(space, constraints=others)
    small = DeviceInfo.for_arch("sm86", 16)
    for problem, device in itertools.product(problems, [*DEVICES, small]):
        if without.count(problem, device) > space.count(problem, device):
            dropped = set(without.configs(problem, device))
            dropped -= set(space.configs(problem, device))
            for config in sorted(dropped, key=str)[:10]:
                (reason,) = space.why_not(config, problem, device)
                assert reason.startswith(f"{name}: ")
            return
    pytest.fail(f"{name} drops nothing that others keep")


@pytest.mark.parametrize("arch", ["sm80", "gfx90a", "gfx1100"])
@pytest.mark.parametrize("kernel", SPACES)
def test_at_most_forty_configs_have_every_pair_of_values(kernel, arch):
    space, (problem, *_) = SPACES[kernel]
    device = DeviceInfo.for_arch(arch)
    members = list(space.configs(problem, device))
    cover = space.cover(2, random.Random(0), problem, device)
    assert len(cover) <= 40
    for pair in itertools.combinations(members[0], 2):
        have, wanted = (
            {tuple(config[name] for name in pair) for config in configs}
            for configs in (cover, members)
        )
        assert have == wanted


@pytest.mark.parametrize("kernel", SPACES)
def test_every_parameter_and_bound_is_explained(kernel):
    space, _ = SPACES[kernel]
    assert all(parameter.about for parameter in space.parameters)
    assert all(derived.reason for derived in space.derived)
    assert all(constraint.reason for constraint in space.constraints)


@pytest.mark.parametrize("kernel", SPACES)
def test_spaces_reach_other_processes(kernel):
    space, problems = SPACES[kernel]
    copy = pickle.loads(pickle.dumps(space))
    assert copy == space
    for device in GPUS[:1]:
        assert copy.count(problems[0], device) == space.count(problems[0], device)


def test_a_config_for_another_gpu_is_refused_with_all_reasons():
    hopper, mi300x = DeviceInfo.for_arch("sm90"), DeviceInfo.for_arch("gfx942")
    config = KernelConfig.of(
        BLOCK_M=128,
        BLOCK_N=16,
        PACK=2,
        LOAD="descriptor",
        REFERENCE="diagonal",
        QUERY="registers",
        DELAY_PV=True,
        num_warps=8,
        num_stages=3,
        maxnreg=128,
        matrix_instr_nonkdim=16,
        launch_pdl=True,
    )
    assert PREFILL_SPACE.contains(config, LLAMA, hopper)
    reasons = PREFILL_SPACE.why_not(config, LLAMA, mi300x)
    assert [reason.split(":")[0] for reason in reasons] == [
        "num_stages is 3, not one of 1, 2",
        "waves_per_eu is missing",
        "descriptor_exists",
        "cap_exists",
        "queries_may_stay",
        "delay_pays",
        "early_launch",
    ]
