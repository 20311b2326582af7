# SPDX-License-Identifier: Apache-2.0
"""Grades on /metrics, which another process than the engine's shows."""

import subprocess
import sys

import pytest

from portable_backend import metrics

prometheus = pytest.importorskip("prometheus_client")
GRADES = {"decode": {"exact": 2, "nearest": 7}, "prefill": {"default": 2}}


def publish(folder):
    """In a process of its own, as engines are; what it printed."""
    code = f"from portable_backend.metrics import publish_grades as f; f({GRADES})"
    variables = {metrics.VARIABLE: str(folder)} if folder else {}
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import os; os.environ |= {variables}; {code}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_servers_process_shows_the_engines_grades(tmp_path):
    from prometheus_client import multiprocess

    for _ in range(2):  # ranks say the same, and count once
        publish(tmp_path)
    registry = prometheus.CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    text = prometheus.generate_latest(registry).decode()
    assert 'portable_backend_tuning_keys{grade="nearest",kernel="decode"} 7.0' in text
    assert 'portable_backend_tuning_keys{grade="default",kernel="prefill"} 2.0' in text


def test_without_the_folder_nothing_is_counted(monkeypatch):
    monkeypatch.delenv(metrics.VARIABLE, raising=False)
    monkeypatch.setattr(metrics, "_gauge", None)  # would raise
    metrics.publish_grades(GRADES)


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path):
    assert "grades are not on /metrics" in publish(tmp_path / "none")
