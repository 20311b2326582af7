# SPDX-License-Identifier: Apache-2.0
"""What workers compile is what launches look for."""

import pytest
from stub_suites import check_suite


@pytest.mark.long
def test_compilation_ahead_of_launches():
    check_suite("stub_compilation")
