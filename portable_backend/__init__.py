# SPDX-License-Identifier: Apache-2.0
"""A portable attention back end for vLLM, written in Triton."""

__version__ = "0.1.0"
