# SPDX-License-Identifier: Apache-2.0
"""Tensors that look alike share launches; whatever differs is noticed."""

import pytest
import torch

from portable_backend.kernels import AttentionOptions, _layer


@pytest.fixture(params=["torch's", "ours"], autouse=True)
def look_of(request, monkeypatch):
    if request.param == "ours":
        monkeypatch.setattr(_layer, "_tensor_guards", lambda: None)
    elif _layer._tensor_guards() is None:
        pytest.skip("this torch has no such guards")


def rows(**changes):
    options = {"dtype": torch.bfloat16, **changes}
    shape = options.pop("shape", (5, 4, 64))
    return torch.zeros(shape, **options)


OTHERS = {
    "more tokens": rows(shape=(6, 4, 64)),
    "dtype": rows(dtype=torch.float16),
    "strides": rows(shape=(5, 8, 64))[:, ::2],
    "axes": rows(shape=(5, 256)),
    "device": rows(device="meta"),
}


def test_other_memory_looks_the_same():
    look = _layer.look_of(rows(), rows())
    assert look.check(rows(), rows())


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_each_difference_is_seen(other, place):
    tensors = [rows(), rows()]
    look = _layer.look_of(*tensors)
    tensors[place] = other
    assert not look.check(*tensors)


def test_nothing_is_unusual_of_aligned_tensors():
    layer = _layer.AttentionLayer(rows(), rows(), AttentionOptions(scale=1.0))
    assert _layer.unusual(layer, 0, (rows(), rows())) == ()


def test_an_unaligned_tensor_is_unusual():
    layer = _layer.AttentionLayer(rows(), rows(), AttentionOptions(scale=1.0))
    odd = rows(shape=(5 * 4 * 64 + 1,))[1:].view(5, 4, 64)
    query = rows()
    found = _layer.unusual(layer, odd.data_ptr() | query.data_ptr(), (query, odd))
    assert found == (0, 1, 0, 0)


def test_sinks_and_slopes_count_too():
    found, slopes = [], rows(shape=(4,))
    for sinks in (rows(shape=(4,)), rows(shape=(4,), dtype=torch.float32), None):
        options = AttentionOptions(scale=1.0, sinks=sinks, alibi_slopes=slopes)
        layer = _layer.AttentionLayer(rows(), rows(), options)
        found.append(_layer.unusual(layer, 0, (rows(), rows())))
    assert len(set(found)) == 3
