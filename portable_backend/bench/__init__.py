# SPDX-License-Identifier: Apache-2.0
"""Our kernels against torch's, vLLM's and FlashAttention-3, in one run on this GPU.

`python -P -m portable_backend.bench --help`. Correctness comes first: the time of a
wrong kernel does not count, and the exit code is then 1.
"""
