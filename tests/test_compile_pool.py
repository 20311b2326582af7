# SPDX-License-Identifier: Apache-2.0
"""A candidate costs its worker at most, and workers end with whoever needs them."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_compiler import ABORTS, BABBLES, GOOD, GREEDY, HANGS, LARGE, REFUSED
from tuning_keys import decode_key, norm_key

from portable_backend.device import DeviceInfo
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup import compile_pool
from portable_backend.warmup.compile_pool import (
    CompilePool,
    binary_of,
    resident_mib,
)
from portable_backend.warmup.kernel_specs import spec_of
from portable_backend.warmup.records import TuningKey

SM90 = DeviceInfo.for_arch("sm90", 132)
FAKE = Path(__file__).with_name("fake_compiler.py")
KEY = decode_key()
BASE = spec_of(KEY).default(KEY, SM90)


def candidate(kind, **changes):
    return BASE.replace(BLOCK_N=kind, **changes)


def fake_pool(tmp_path, workers=1, **options):
    command = (sys.executable, "-P", str(FAKE), str(tmp_path / "log"))
    return CompilePool(SM90, workers=workers, command=command, **options)


def logged(tmp_path):
    log = tmp_path / "log"
    return log.read_text().split("\n")[:-1] if log.exists() else []


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


BAD = [
    (ABORTS, "the compiler ended with signal SIGABRT: LLVM ERROR: out of luck"),
    (HANGS, "no answer within 4 s"),
    (GREEDY, "MiB of memory, the limit is 200"),
    (REFUSED, "CompilationError: no such tile"),
    (BABBLES, "no JSON object: 'warning: not JSON"),
    (LARGE, "wants 1048576 bytes of shared memory, a block has 232448"),
]


def test_bad_candidates_fail_alone_and_in_one_line(tmp_path):
    configs = [candidate(GOOD)]
    for kind, _ in BAD:
        configs += [candidate(kind), candidate(GOOD, num_warps=kind)]
    with fake_pool(tmp_path, limit_s=4, memory_mib=200) as pool:
        results = list(pool.wait(KEY, configs))
    assert [r.config for r in results] == configs
    assert all(r.key == KEY for r in results)
    good, bad = results[::2], results[1::2]
    assert all(r.failure is None and r.readout.registers == 64 for r in good)
    for result, (kind, message) in zip(bad, BAD, strict=True):
        assert message in result.failure, result
        assert "\n" not in result.failure
        assert (result.readout is None) == (kind != LARGE)
    pids = [int(line.split()[1]) for line in logged(tmp_path) if "pid" in line]
    assert len(pids) > 4
    assert not any(map(alive, pids))


def test_results_come_in_order_while_others_are_compiled(tmp_path):
    configs = [candidate(GOOD, num_warps=n) for n in range(1, 9)]
    with fake_pool(tmp_path, workers=2) as pool:
        pool.submit(KEY, configs)
        first = next(pool.wait(KEY, configs[3:4]))
        assert first.config == configs[3]
        assert [r.config for r in pool.wait(KEY, configs[::-1])] == configs[::-1]


def test_waiting_ends_in_time_and_what_is_compiled_by_then_is_told(tmp_path):
    good, hangs = candidate(GOOD), candidate(HANGS)
    with fake_pool(tmp_path, workers=2) as pool:
        assert [r.config for r in pool.wait(KEY, [good])] == [good]
        began = time.monotonic()
        found = list(pool.wait(KEY, [good, hangs, good], began + 0.3))
        assert [r.config for r in found] == [good]
        assert 0.3 <= time.monotonic() - began < 2


def test_what_is_known_is_not_compiled_again(tmp_path):
    config = candidate(GOOD)
    others = [config.replace(CTAS_PER_UNIT=n) for n in (1, 2, 8)]
    with fake_pool(tmp_path) as pool:
        pool.submit(KEY, [config, config])
        for key in (KEY, decode_key(num_seqs=1, seq_len=64)):
            results = list(pool.wait(key, others))
            assert [r.config for r in results] == others
            assert all(r.key == key and r.failure is None for r in results)
        list(pool.wait(decode_key(query_len=8), [config]))
    assert logged(tmp_path)[1:] == [str(GOOD)] * 2


def test_a_worker_is_replaced_before_its_memory_fills(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_pool, "_MAX_COMPILED", 3)
    configs = [candidate(GOOD, num_warps=n) for n in range(7)]
    with fake_pool(tmp_path) as pool:
        assert all(r.failure is None for r in pool.wait(KEY, configs))
    assert sum("pid" in line for line in logged(tmp_path)) == 3


def test_submitting_does_not_wait(tmp_path):
    start = time.monotonic()
    with fake_pool(tmp_path) as pool:
        pool.submit(KEY, [candidate(HANGS)])
        pool.submit(KEY, (candidate(GOOD, num_warps=n) for n in range(50)))
        assert wait_until(lambda: (tmp_path / "log").exists())
    assert time.monotonic() - start < 15  # closing does not wait for them either


def test_closing_wakes_whoever_waits_and_leaves_no_process(tmp_path):
    pool = fake_pool(tmp_path)
    seen = []

    def consume():
        try:
            seen.extend(pool.wait(KEY, [candidate(HANGS)]))
        except RuntimeError as error:
            seen.append(str(error))

    consumer = threading.Thread(target=consume)
    consumer.start()
    assert wait_until(lambda: "pid" in str(logged(tmp_path)[2:]))
    pids = [int(line.split()[1]) for line in logged(tmp_path) if "pid" in line]
    assert all(map(alive, pids))
    pool.close()
    consumer.join(10)
    assert seen == ["the compile pool was closed meanwhile"]
    assert wait_until(lambda: not any(map(alive, pids)))
    pool.close()  # twice does no harm
    with pytest.raises(RuntimeError, match="is closed"):
        pool.submit(KEY, [candidate(GOOD)])


def test_a_worker_that_does_not_start_fails_the_candidate(tmp_path):
    for command, message in (
        ((str(tmp_path / "missing"),), "No such file"),
        ((sys.executable, "-c", "raise SystemExit('no torch')"), "no torch"),
    ):
        with CompilePool(SM90, workers=1, command=command) as pool:
            (result,) = pool.wait(KEY, [candidate(GOOD)])
        assert result.readout is None
        assert message in result.failure


def test_the_interpreter_has_nothing_to_compile():
    device = DeviceInfo.for_arch("interpreter")
    with CompilePool(device, workers=4) as pool:
        (result,) = pool.wait(norm_key(), [KernelConfig.of(ROWS=1, num_warps=1)])
    assert (result.readout, result.failure) == (None, None)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"workers": 0}, "workers"),
        ({"workers": 1, "limit_s": 0}, "limit_s"),
        ({"workers": 1, "memory_mib": 0}, "memory_mib"),
    ],
)
def test_a_pool_needs_positive_numbers(options, name):
    with pytest.raises(ValueError, match=f"{name} must be"):
        CompilePool(SM90, **options)


def test_an_unknown_kernel_is_refused_at_once(tmp_path):
    with fake_pool(tmp_path) as pool, pytest.raises(ValueError, match="kernel must be"):
        pool.submit(type(KEY).of("softmax", dtype="float16"), [])


def test_only_what_is_compiled_tells_binaries_apart():
    assert binary_of(KEY, BASE) == binary_of(KEY, BASE.replace(CTAS_PER_UNIT=8))
    assert binary_of(KEY, BASE) != binary_of(KEY, BASE.replace(CTAS_PER_UNIT=0))
    assert binary_of(KEY, BASE) != binary_of(KEY, BASE.replace(num_warps=8))
    assert binary_of(KEY, BASE) != binary_of(decode_key(head_size=64), BASE)
    assert binary_of(KEY, BASE) == binary_of(decode_key(num_seqs=1), BASE)
    assert binary_of(KEY, BASE) != binary_of(decode_key(num_seqs=4096), BASE)


def test_memory_of_a_process_includes_what_it_started():
    hold = "import time; x = bytearray(b'1' * (80 << 20)); print(1, flush=True); "
    hold += "time.sleep(60)"
    shell = f'{sys.executable} -c "{hold}"; true'
    process = subprocess.Popen(
        ["sh", "-c", shell], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        process.stdout.readline()
        assert 80 <= resident_mib(process.pid) < 400
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert resident_mib(process.pid) == 0


def test_workers_turn_to_another_device(tmp_path):
    config = candidate(GOOD)
    with fake_pool(tmp_path) as pool:
        for arch in ("sm90", "gfx942", "gfx942", "sm90"):
            pool.retarget(DeviceInfo.for_arch(arch, 132))
            (result,) = pool.wait(KEY, [config])
            assert result.failure is None
        pool.submit(KEY, [candidate(HANGS)])
        with pytest.raises(RuntimeError, match="wait for what was submitted"):
            pool.retarget(SM90)
    _, *rest = logged(tmp_path)
    assert rest[:6] == ["16", "for gfx942", "16", "16", "for sm90", "16"]


def test_limits_are_those_of_the_device_in_turn(tmp_path):
    with fake_pool(tmp_path) as pool:
        failures = []
        for arch in ("sm90", "gfx942"):
            pool.retarget(DeviceInfo.for_arch(arch))
            (result,) = pool.wait(KEY, [candidate(LARGE)])
            failures.append(result.failure)
    assert [failure.split()[-1] for failure in failures] == ["232448", "65536"]


# ------------------------------------------------------------------- the real worker


def test_a_real_worker_reads_out_parts_for_either_vendor(fresh_cache_dir):
    key = TuningKey.from_dict(
        "decode", decode_key().to_dict() | {"head_size": 32, "num_kv_heads": 2}
    )
    with CompilePool(SM90, workers=1, parts=True) as pool:
        for arch in ("sm90", "gfx942"):
            device = DeviceInfo.for_arch(arch, 132)
            pool.retarget(device)
            (result,) = pool.wait(key, [spec_of(key).default(key, device)])
            assert result.failure is None
            assert {name for name, _ in result.others} >= {"plan", "merge"}
            assert all(readout.registers for _, readout in result.others)
            is_amd = result.readout.scalar_registers is not None
            assert is_amd == (arch == "gfx942")


def test_a_real_worker_compiles_and_reports_what_does_not(fresh_cache_dir):
    key = norm_key(5, 512)
    good = spec_of(key).default(key, SM90)
    bad = [good.replace(ROWS=3), good.replace(num_warps=3)]
    with CompilePool(SM90, workers=1) as pool:
        results = list(pool.wait(key, [bad[0], good, bad[1], good]))
    assert [r.failure is None for r in results] == [False, True, False, True]
    assert "ROWS must be a power of two" in results[0].failure
    assert "num_warps" in results[2].failure
    assert results[1].readout.registers > 0
    assert results[1].readout.programs_per_unit > 0
    assert list(fresh_cache_dir.glob("triton/*/_rms_norm_kernel.cubin"))


PARENT = """
import sys, time
from tuning_keys import write_key
from portable_backend.device import DeviceInfo
from portable_backend.warmup.compile_pool import CompilePool
from portable_backend.warmup.kernel_specs import spec_of

device, key = DeviceInfo.for_arch("sm90", 132), write_key()
pool = CompilePool(device, workers=1)
(result,) = pool.wait(key, [spec_of(key).default(key, device)])
assert result.failure is None, result
print(pool._workers[0]._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.long
def test_real_workers_end_when_their_parent_is_killed(fresh_cache_dir):
    folders = [str(FAKE.parent), os.environ.get("PYTHONPATH", "")]
    parent = subprocess.Popen(
        [sys.executable, "-P", "-c", PARENT],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        pid = int(parent.stdout.readline())
        assert alive(pid)
        assert os.getpriority(os.PRIO_PROCESS, pid) >= 10
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert wait_until(lambda: not alive(pid))


def test_what_is_compiled_already_can_be_told(tmp_path):
    """For keys that share the binary, too; failures and the unknown are not ready."""
    good, other = candidate(GOOD), candidate(GOOD, num_warps=8)
    refused, unknown = candidate(REFUSED), candidate(GOOD, num_stages=1)
    near = decode_key(seq_len=8192)
    with fake_pool(tmp_path) as pool:
        assert pool.ready(KEY, [good]) == []
        list(pool.wait(KEY, [good, other, refused]))
        assert pool.ready(near, [other, refused, unknown, good]) == [other, good]
        elsewhere = decode_key(head_size=64)
        assert pool.ready(elsewhere, [good, other]) == []


def test_what_is_waited_for_goes_before_what_was_only_submitted(tmp_path):
    later = [candidate(GOOD, num_warps=n) for n in range(1, 21)]
    urgent = [candidate(REFUSED), candidate(LARGE), later[-1]]
    with fake_pool(tmp_path) as pool:
        pool.submit(KEY, later)
        results = list(pool.wait(KEY, urgent))
        assert [r.config for r in results] == urgent
        assert all(r.failure is None for r in pool.wait(KEY, later))
    kinds = [line for line in logged(tmp_path) if "pid" not in line]
    assert len(kinds) == 22
    # The worker may have begun with one of the others.
    assert kinds.index(str(REFUSED)) <= 1
    assert kinds.index(str(LARGE)) == kinds.index(str(REFUSED)) + 1
