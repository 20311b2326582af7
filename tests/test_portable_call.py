# SPDX-License-Identifier: Apache-2.0
"""The benchmark's door to our kernels tells them what an engine would."""

import importlib.util
from pathlib import Path
from unittest import mock

import pytest
import torch
from kernel_cases import Case, assert_close, make_inputs, references

SCRIPT = Path(__file__).parents[1] / "scripts" / "portable_call.py"


@pytest.mark.parametrize(
    ("seqs", "no_context"),
    [
        (((40, 40), (12, 12)), True),
        (((40, 40), (1, 33), (3, 20)), True),
        (((40, 50), (12, 12)), False),
        (((1, 33), (4, 4)), False),
    ],
)
def test_results_and_what_the_kernels_are_told(seqs, no_context, device):
    spec = importlib.util.spec_from_file_location("portable_call", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    inputs = make_inputs(Case(1, seqs, heads=(4, 2)), device)
    batch, told = inputs.batch, {}

    def attend(*arguments, **named):
        told.update(named, batch=arguments[3])
        return paged_attention(*arguments, **named)

    paged_attention = module.paged_attention
    x = {
        "q": inputs.query, "k": inputs.key_cache, "v": inputs.value_cache,
        "cu": batch.query_start_loc, "sl": batch.seq_lens, "bt": batch.block_table,
        "mq": batch.max_query_len, "mk": batch.max_seq_len,
        "scale": inputs.options.scale,
    }  # fmt: skip
    with mock.patch.object(module, "paged_attention", attend):
        out = module.make_call(x, torch.full_like(inputs.query, float("nan")))()
    assert_close(out, *references(inputs), seqs)
    assert told["batch"].no_context == no_context
    assert (told["key"] is not None) == no_context
    if no_context:
        starts = batch.query_start_loc.tolist()
        for i, (query_len, seq_len) in enumerate(seqs):
            for j in range(query_len):
                position = seq_len - query_len + j
                block = int(batch.block_table[i, position // inputs.key_cache.shape[1]])
                slot = position % inputs.key_cache.shape[1]
                for name in ("key", "value"):
                    cached = getattr(inputs, f"{name}_cache")[block, slot]
                    assert torch.equal(told[name][starts[i] + j], cached)
