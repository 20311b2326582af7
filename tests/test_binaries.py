# SPDX-License-Identifier: Apache-2.0
"""Random steps ask for no binary that is not listed."""

import pytest
from stub_suites import check_suite


@pytest.mark.vllm
@pytest.mark.long
def test_steps_against_the_list_of_binaries():
    pytest.importorskip("vllm", reason="needs the back end, and so vLLM")
    check_suite("stub_binaries")
