# SPDX-License-Identifier: Apache-2.0
"""What docs/tuning.md shows is what happens."""

import doctest
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs" / "tuning.md"


def test_examples_print_what_they_say():
    failed, tried = doctest.testfile(str(DOCS), module_relative=False)
    assert tried > 10
    assert failed == 0
