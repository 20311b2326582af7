# SPDX-License-Identifier: Apache-2.0
"""The config spaces of attention: never empty, and right whatever is drawn."""

import random
from dataclasses import replace

import pytest
import torch
from kernel_cases import Case, call, check_inputs, make_inputs

from portable_backend.device import ARCH_LIMITS, DeviceInfo
from portable_backend.kernels.attention_space import (
    AttentionProblem,
    decode_configs,
    merge_configs,
    prefill_configs,
)
from portable_backend.kernels.config import AttentionConfig
from portable_backend.kernels.plan import default_config

CASE = Case(
    7,
    ((200, 200), (1, 333), (33, 33), (4, 77), (9, 9), (64, 64), (8, 1000)),
    heads=(8, 2),
    head_size=128,
    block_size=64,
    new_tokens_given=True,
)
PLAIN = replace(CASE, seqs=((150, 400), *CASE.seqs), new_tokens_given=False)
SPACES = {
    "prefill": prefill_configs,
    "decode": decode_configs,
    "merge": merge_configs,
}


def problem_of(case, device):
    return AttentionProblem(
        num_queries_per_kv=case.heads[0] // case.heads[1],
        head_size=case.head_size,
        element_size=case.dtype.itemsize,
        block_size=case.block_size,
        device=device,
    )


def draw(kernel, case, device, count, skip=0):
    """`count` full configs that differ from the default in one kernel."""
    info = DeviceInfo.detect(device)
    base = default_config(
        num_queries_per_kv=case.heads[0] // case.heads[1],
        head_size=case.head_size,
        dtype=case.dtype,
        block_size=case.block_size,
        device=info,
    )
    if base.decode["CTAS_PER_UNIT"] == 0:
        # The interpreter's default never cuts a request; the merge must have work.
        base = AttentionConfig(
            base.prefill,
            base.decode.replace(CTAS_PER_UNIT=64, BLOCK_N=32),
            base.merge,
        )
    space = list(SPACES[kernel](problem_of(case, info)))
    order = random.Random(11).sample(space, len(space))
    picked = order[skip : skip + count]
    return [AttentionConfig(**(vars(base) | {kernel: config})) for config in picked]


def check_drawn(kernel, device, count, skip=0):
    cases = [PLAIN, replace(PLAIN, block_size=16, head_size=80, window=50, sinks=True)]
    for case in cases:
        for config in draw(kernel, case, device, count // 2, skip // 2):
            given = case
            if config.prefill["LOAD"] == "new":
                given = replace(case, seqs=CASE.seqs, new_tokens_given=True)
            inputs = make_inputs(given, device)
            inputs.config = config
            check_inputs(inputs, (given, config))


@pytest.mark.parametrize("kernel", SPACES)
def test_any_drawn_config_is_right(kernel, device):
    check_drawn(kernel, device, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("skip", range(0, 40, 4))
@pytest.mark.parametrize("kernel", SPACES)
def test_forty_drawn_configs_are_right(kernel, skip, device):
    check_drawn(kernel, device, 4, skip)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 50}, {"softcap": 20.0, "alibi": True, "sinks": True}],
    ids=str,
)
def test_new_tokens_are_read_where_nothing_is_cached(block_size, options, device):
    case = replace(CASE, block_size=block_size, **options)
    inputs = make_inputs(case, device)
    config = default_config(
        num_queries_per_kv=4,
        head_size=128,
        dtype=case.dtype,
        block_size=block_size,
        device=DeviceInfo.detect(device),
    )
    inputs.config = replace(config, prefill=config.prefill.replace(LOAD="new"))
    check_inputs(inputs, case)


@pytest.mark.parametrize("seqs", [((40, 40), (20, 0)), ((40, 40), (20, 10))])
def test_new_tokens_of_a_request_shorter_than_its_query(seqs, device):
    """Padded requests and dummy runs: the last seq_len of its tokens have keys."""
    case = replace(CASE, seqs=seqs, block_size=16)
    inputs = make_inputs(case, device)
    inputs.batch = replace(inputs.batch, no_context=True)
    config = draw("merge", case, device, 1)[0]
    inputs.config = replace(config, prefill=config.prefill.replace(LOAD="new"))
    check_inputs(inputs, case)


def test_garbage_behind_the_last_new_token_is_not_seen(device):
    case = replace(CASE, seqs=(*CASE.seqs, (100, 100)), block_size=16, spare_rows=70)
    inputs = make_inputs(case, device)
    inputs.key[case.num_tokens :] = float("nan")
    inputs.value[case.num_tokens :] = float("nan")
    config = draw("merge", case, device, 1)[0]
    inputs.config = replace(config, prefill=config.prefill.replace(LOAD="new"))
    check_inputs(inputs, case)


def test_a_broken_promise_of_no_context_gives_nan(device):
    case = replace(CASE, seqs=((100, 300),))
    inputs = make_inputs(case, device)
    inputs.batch = replace(inputs.batch, no_context=True)
    config = default_config(
        num_queries_per_kv=4,
        head_size=128,
        dtype=case.dtype,
        block_size=64,
        device=DeviceInfo.detect(device),
    )
    inputs.config = replace(config, prefill=config.prefill.replace(LOAD="new"))
    assert torch.isnan(call(inputs)[:100]).all()


@pytest.mark.parametrize("name", ["key", "value"])
def test_too_few_new_tokens_are_refused(name, device):
    inputs = make_inputs(CASE, device)
    config = draw("prefill", CASE, device, 1)[0]
    inputs.config = replace(config, prefill=config.prefill.replace(LOAD="new"))
    short = getattr(inputs, name)[:-1]
    with pytest.raises(ValueError, match=f"{name}.*tokens"):
        call(inputs, **{name: short})


@pytest.mark.parametrize("arch", sorted(ARCH_LIMITS))
@pytest.mark.parametrize("head_size", [32, 80, 128, 256])
@pytest.mark.parametrize("element_size", [2, 4])
def test_no_space_is_empty(arch, head_size, element_size):
    info = DeviceInfo.for_arch(arch, 100)
    problem = AttentionProblem(4, head_size, element_size, 16, info)
    for kernel, space in SPACES.items():
        configs = list(space(problem))
        assert configs, f"{kernel} has no config on {arch}"
        assert len(configs) == len(set(configs))
