# SPDX-License-Identifier: Apache-2.0
"""Stored records run once more; the interpreter stands in for a GPU."""

import re

import pytest
from record_fakes import DIGEST, TOOLCHAIN

from portable_backend.device import ARCH_LIMITS, DeviceInfo
from portable_backend.errors import UnsupportedError
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.kernel_specs import KERNEL_SPECS
from portable_backend.warmup.layers import WritableLayer
from portable_backend.warmup.measuring_process import Confirmation, MeasuringProcess
from portable_backend.warmup.records import TuningKey, TuningRecord
from portable_backend.warmup.upkeep import verify
from portable_backend.warmup.verifier import Verifier

INTERPRETER = DeviceInfo("interpreter", "interpreter", 1, ARCH_LIMITS["interpreter"])
KEY = TuningKey.of("rms_norm", dtype="float32", row_size=64, fused_add=1, num_rows=9)
CONFIG = KERNEL_SPECS["rms_norm"].default(KEY, INTERPRETER)


def make_record(**fields) -> TuningRecord:
    usual = {
        "key": KEY,
        "config": CONFIG,
        "gpu": "interpreter",
        "arch": "interpreter",
        "time_us": 1.0,
        "kernel_digest": DIGEST,
        "toolchain": TOOLCHAIN,
    }
    return TuningRecord(**usual | fields)


class FakeProcess:
    def __init__(self, **fields):
        usual = {"time_us": 3.0, "default_us": 4.0, "noise": 0.1, "error_ratio": 1.5}
        self.result = Confirmation(**usual | fields)
        self.closed = False

    def device_info(self):
        return INTERPRETER

    def confirm(self, key, config, seed):
        return self.result

    def close(self):
        self.closed = True


def test_a_record_is_measured_checked_and_rewritten(tmp_path):
    layer = WritableLayer("user", tmp_path)
    record = make_record()
    layer.append(record)
    env = {"TRITON_INTERPRET": "1"}
    process = MeasuringProcess(device="cpu", limit_s=60.0, confirm_rounds=2, env=env)
    with Verifier(process) as verifier:
        (verdict,) = verify(layer, [record], verifier)
    assert verdict.problem is None
    after = verdict.after
    assert after is not None
    assert after.verified
    assert after.time_us > 10, "the interpreter is no GPU"
    assert after.default_us is not None
    assert after.error_ratio is not None
    (stored,) = layer.load_file("rms_norm", "interpreter").records
    assert stored == after


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (make_record(config=KernelConfig.of(ROWS=3)), "not in today's space: .*ROWS"),
        (make_record(key=TuningKey.of("softmax", n=1)), "kernel must be one of"),
        (make_record(key=TuningKey.of("rms_norm", n=1)), "fields of a rms_norm key"),
    ],
)
def test_what_cannot_run_is_a_problem_of_the_record(record, problem):
    with Verifier(FakeProcess()) as verifier:
        result = verifier(record)
    assert result.time_us is None
    assert result.problem is not None
    assert re.match(problem, result.problem)


def test_a_wrong_result_is_a_problem_and_an_unknown_default_is_none():
    wrong = Verifier(FakeProcess(wrong="timeout: no answer"))(make_record())
    assert wrong.problem == "timeout: no answer"
    alone = Verifier(FakeProcess(default_us=float("inf")))(make_record())
    assert (alone.time_us, alone.default_us) == (3.0, None)
    assert (alone.error_ratio, alone.problem) == (1.5, None)


def test_another_gpus_record_is_not_touched():
    process = FakeProcess()
    with (
        pytest.raises(UnsupportedError, match="nvidia_h200 cannot be verified"),
        Verifier(process) as verifier,
    ):
        verifier(make_record(gpu="nvidia_h200"))
    assert process.closed
