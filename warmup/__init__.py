# SPDX-License-Identifier: Apache-2.0
"""Tuning and start-up: which kernel configuration serves which shape."""
