# SPDX-License-Identifier: Apache-2.0
"""Configs that an engine has chosen serve calls that name none; see stub_served.py."""

from stub_suites import check_suite


def test_calls_launch_what_was_chosen():
    check_suite("stub_served")
