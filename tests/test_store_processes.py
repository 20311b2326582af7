# SPDX-License-Identifier: Apache-2.0
"""Many processes at one layer, and processes that die while they write."""

import mmap
import multiprocessing
import os
import random
import shutil
import signal
import struct
import time
from pathlib import Path

import pytest
from record_fakes import GPU, log_lines, make_key, make_record

from portable_backend.warmup import layers
from portable_backend.warmup.layers import WritableLayer
from portable_backend.warmup.store import RecordStore

WRITERS = 8
READERS = 2
FORK = multiprocessing.get_context("fork")


def _open(folder) -> RecordStore:
    return RecordStore.open(folder, shipped=Path(folder) / "none")


def _write_many(folder, writer, entries):
    with _open(folder) as store:
        for n in range(entries):
            assert store.put(make_record(make_key(n, num_seqs=writer)))
            if n == entries // 2:
                assert store.compact()


def _read_until(folder, done, reads):
    """Records never vanish and are never torn, whatever is written meanwhile."""
    seen = set()
    while not done.is_set():
        with log_lines() as lines:
            (held,) = WritableLayer("reader", folder).load("decode")
        found = {record.key for record in held.records}
        assert not held.problems and not lines, (held.problems, lines)
        assert seen <= found
        seen = found
        reads.value += 1
        time.sleep(0.2)


@pytest.mark.parametrize("entries", [200, pytest.param(1000, marks=pytest.mark.long)])
def test_eight_processes_write_records_and_none_is_lost(entries, tmp_path, monkeypatch):
    monkeypatch.setattr(layers, "LOCK_TIMEOUT_S", 300.0)  # however busy the disk is
    WritableLayer("", tmp_path).append(make_record(make_key(0, num_seqs=0)))
    done = FORK.Event()
    counts = [FORK.Value("i", 0) for _ in range(READERS)]
    readers = [
        FORK.Process(target=_read_until, args=(tmp_path, done, n)) for n in counts
    ]
    writers = [
        FORK.Process(target=_write_many, args=(tmp_path, n, entries))
        for n in range(WRITERS)
    ]
    for process in readers + writers:
        process.start()
    for process in writers:
        process.join()
    done.set()
    for process in readers:
        process.join()
    assert [process.exitcode for process in readers + writers] == [0] * 10
    assert all(count.value > 3 for count in counts), "readers ran beside the writers"
    with log_lines() as lines:
        found = {record.key for _, record in _open(tmp_path).records("decode")}
    assert not lines
    assert found == {
        make_key(n, num_seqs=writer)
        for writer in range(WRITERS)
        for n in range(entries)
    }


def _write_until_killed(folder, run, acknowledged):
    layer = WritableLayer("", folder)
    for n in range(1_000_000):
        assert layer.append(make_record(make_key(n, num_seqs=run)))
        acknowledged[:8] = struct.pack("q", n + 1)
        if n % 5 == 4:
            assert layer.compact("decode", GPU)


def _kill_after(folder, run, delay_s):
    """Run a writer, kill it, and return how many records it had acknowledged."""
    acknowledged = mmap.mmap(-1, 8)
    child = os.fork()
    if child == 0:
        try:
            _write_until_killed(folder, run, acknowledged)
        finally:
            os._exit(1)
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL, "it ran until it was killed"
    return struct.unpack("q", acknowledged[:8])[0]


@pytest.mark.parametrize("kills", [40, pytest.param(200, marks=pytest.mark.long)])
def test_a_writer_killed_at_any_moment_loses_at_most_the_record_in_flight(
    kills, tmp_path
):
    rng = random.Random(0)
    folder, expected, total, longest_s = tmp_path / "cache", {}, 0, 0.06
    for run in range(kills):
        if run % 20 == 0:  # keeps the files, and so this test, small
            shutil.rmtree(folder, ignore_errors=True)
            expected = {}
        expected[run] = _kill_after(folder, run, rng.uniform(0, longest_s))
        if not expected[run]:  # a busy machine, where writers take longer to begin
            longest_s = min(1.0, 1.2 * longest_s)
        total += expected[run]
        found = {n: set() for n in expected}
        for file in WritableLayer("", folder).load("decode"):
            # A tail may be torn; whole lines and the table may not be.
            assert all("torn" in problem for problem in file.problems), file.problems
            for record in file.records:
                key = record.key.to_dict()
                found[key["num_seqs"]].add(key["seq_len"])
        for n, count in expected.items():
            # The one in flight may have been written before the kill.
            assert found[n] in (set(range(count)), set(range(count + 1))), n
            expected[n] = len(found[n])
    assert total > kills, "most writers had begun when they were killed"
