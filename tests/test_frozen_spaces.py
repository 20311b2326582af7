# SPDX-License-Identifier: Apache-2.0
"""The spaces of all kernels hold what config_spaces.json says they do, and no more.

A space that is meant to change changes that file too: run this file as a script.
"""

import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch

from portable_backend.device import DeviceInfo
from portable_backend.kernels import kv_cache, rms_norm_space
from portable_backend.kernels.attention_space import (
    AttentionProblem,
    decode_configs,
    merge_configs,
    prefill_configs,
)

FROZEN = Path(__file__).with_name("config_spaces.json")
ARCHS = (
    "sm80",
    "sm86",
    "sm90",
    "sm100",
    "sm120",
    "gfx90a",
    "gfx942",
    "gfx950",
    "gfx1100",
    "gfx1201",
    "interpreter",
)
# (query heads per KV head, head size, bytes per element, block size)
ATTENTION = (
    (4, 128, 2, 16),
    (4, 128, 2, 64),
    (8, 64, 2, 32),
    (1, 256, 2, 128),
    (3, 80, 2, 16),
    (4, 128, 4, 16),
    (2, 256, 4, 64),
    (6, 32, 4, 64),
)
# (row size, rows, bytes per element)
RMS_NORM = (
    (128, 2**20, 2),
    (576, 1, 2),
    (576, 4096, 2),
    (2880, 2**17, 2),
    (4096, 100, 2),
    (4096, 2**16, 4),
    (16, 2**20, 2),
    (65536, 256, 4),
    (100, 600, 4),
)
# (vectors,): on both sides of every step
KV_CACHE = ((1,), (2**16,), (2**18,), (2**18 + 1,), (2**22,))


def attention(space_of):
    return lambda device, *sizes: space_of(AttentionProblem(*sizes, device))


def rms_norm_configs(device, row_size, num_rows, element_size):
    return rms_norm_space.candidate_configs(
        row_size=row_size,
        num_rows=num_rows,
        dtype={2: torch.bfloat16, 4: torch.float32}[element_size],
        device=device,
    )


def kv_cache_configs(device, num_vectors):
    return kv_cache.candidate_configs(num_vectors=num_vectors, device=device)


SPACES = {
    "prefill": (attention(prefill_configs), ATTENTION),
    "decode": (attention(decode_configs), ATTENTION),
    "merge": (attention(merge_configs), ATTENTION[:1]),
    "rms_norm": (rms_norm_configs, RMS_NORM),
    "kv_cache": (kv_cache_configs, KV_CACHE),
}
PROBLEMS = [(name, sizes) for name, (_, found) in SPACES.items() for sizes in found]


def summary(configs):
    """How many, and a digest that does not depend on their order."""
    lines = sorted(json.dumps(c.to_dict(), sort_keys=True) for c in configs)
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return f"{len(lines)} {digest[:16]}"


def summaries(kernel, sizes):
    """The summary on each architecture."""
    configs_for = SPACES[kernel][0]
    return {a: summary(configs_for(DeviceInfo.for_arch(a), *sizes)) for a in ARCHS}


@pytest.mark.parametrize(("kernel", "sizes"), PROBLEMS)
def test_spaces_hold_the_configs_they_always_held(kernel, sizes):
    frozen = json.loads(FROZEN.read_text())[kernel][" ".join(map(str, sizes))]
    assert summaries(kernel, sizes) == frozen


def main():
    """Freeze the spaces as they are now."""
    found = {name: {} for name in SPACES}
    for name, sizes in PROBLEMS:
        found[name][" ".join(map(str, sizes))] = summaries(name, sizes)
    FROZEN.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
