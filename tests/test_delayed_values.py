# SPDX-License-Identifier: Apache-2.0
"""Prefill with each tile's values multiplied a step late gives the very same result."""

from dataclasses import replace

import pytest
import torch
from kernel_cases import Case, Tiles, bits, call, check_inputs, make_inputs

SEQS = ((70, 300), (9, 9), (40, 103), (33, 160))
FEATURES = {
    "plain": {},
    "packed": {"heads": (4, 1), "tiles": Tiles(32, 32, pack=4)},
    "window": {"window": 90},
    "softcap": {"softcap": 5.0},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "block size 16": {"block_size": 16},
    "head size 96": {"head_size": 96},
    "new tokens": {"seqs": ((70, 70), (150, 150), (9, 9)), "new_tokens_given": True},
}


def make(device, load="descriptor", delay=True, **fields):
    case = Case(
        3, fields.pop("seqs", SEQS),
        **{"heads": (2, 1), "block_size": 32, "tiles": Tiles(32, 32)} | fields,
    )  # fmt: skip
    inputs = make_inputs(case, device)
    prefill = inputs.config.prefill.replace(
        LOAD=load,
        REFERENCE="diagonal",
        DELAY_PV=delay,
        num_warps=4 if device.type == "cpu" else 2,
    )
    inputs.config = replace(inputs.config, prefill=prefill)
    return case, inputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("feature", FEATURES)
def test_features_match_the_oracle(feature, dtype, device):
    load = "new" if feature == "new tokens" else "descriptor"
    case, inputs = make(device, load, dtype=dtype, **FEATURES[feature])
    check_inputs(inputs, case)


@pytest.mark.parametrize("load", ["pointer", "descriptor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_bits_are_those_of_the_plain_loop(dtype, load, device):
    results = [
        call(make(device, load, delay, dtype=dtype)[1]) for delay in (False, True)
    ]
    num_tokens = sum(query_len for query_len, _ in SEQS)
    plain, delayed = (bits(result[:num_tokens]) for result in results)
    assert torch.equal(plain, delayed)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38])
def test_values_of_the_first_tile_that_are_not_finite(value, device):
    """The loop multiplies them by zeros before it does by probabilities."""
    case, inputs = make(device, seqs=((70, 300),))
    inputs.value_cache[inputs.blocks[0][0], 3, 0, 5] = value
    out = call(inputs)[: case.num_tokens].float()
    rest = torch.arange(case.head_size) != 5
    assert torch.isfinite(out[..., rest]).all()
    if value == float("inf"):
        assert torch.isposinf(out[..., 5]).all()
    elif value == 3e38:
        assert (out[..., 5] > 1e30).all()
    else:
        assert out[..., 5].isnan().all()


def test_scores_far_above_the_reference(device):
    case, inputs = make(device, seqs=((150, 250),))
    inputs.query[: case.num_tokens] = 1.0
    for block in inputs.blocks[0][:2]:
        inputs.key_cache[block] = 30.0
    check_inputs(inputs, case)


@pytest.mark.parametrize("value", [2, 1, 0, None, "True"])
def test_another_parameter_than_a_bool_is_refused(value, device):
    _, inputs = make(device)
    prefill = inputs.config.prefill.replace(DELAY_PV=value)
    inputs.config = replace(inputs.config, prefill=prefill)
    with pytest.raises(ValueError, match="prefill DELAY_PV must be False or True"):
        call(inputs)
