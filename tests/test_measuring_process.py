# SPDX-License-Identifier: Apache-2.0
"""Bad configs cost a child process at most: each is rejected, with its reason."""

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import planted_workloads
import pytest
from planted_workloads import behaving, make_key

from portable_backend.warmup import measuring_child
from portable_backend.warmup.measuring_pipe import Child, MeasuringError
from portable_backend.warmup.measuring_process import MeasuringProcess
from portable_backend.warmup.search import Budget, Proposal, search

TESTS = str(Path(__file__).parent)
GOOD = behaving("good")
KEY = make_key()
# (behaviour, invalid, part of the reason)
REJECTED = [
    ("wrong", "correctness", "error"),
    ("wrong in one element", "correctness", "1 of"),
    ("writes nothing", "correctness", "error inf"),
    ("works once", "correctness", "timing inputs: relative error nan"),
    ("keeps its first result", "correctness", "error"),
    ("keeps results by shape", "correctness", "error"),
    ("timing shape only", "correctness", "error inf"),
    ("reads past the row", "correctness", "error inf"),
    ("writes past the rows", "correctness", "around the rows"),
    ("changes its input", "correctness", "x, normal inputs"),
    ("device memory hog", "over-limit", "1 TiB"),
    ("shared memory", "resources", "shared memory"),
    ("unheard of", "runtime", "no behaviour unheard of"),
]
KILLED = [
    ("hang", "timeout", "no answer within"),
    ("hang in C", "timeout", "no answer within"),
    ("segfault", "runtime", "SIGSEGV"),
    ("abort", "runtime", "SIGABRT"),
    ("exit", "runtime", "exit code 0"),
    ("uncaught", "runtime", "SystemError: no handler expects this"),
]


def process(make: str = "make", **options) -> MeasuringProcess:
    path = os.pathsep.join(filter(None, [TESTS, os.environ.get("PYTHONPATH")]))
    env = {"PYTHONPATH": path, "TRITON_INTERPRET": "1"} | options.pop("env", {})
    usual = {"device": "cpu", "limit_s": 3.0}
    make = f"planted_workloads:{make}"
    return MeasuringProcess(make=make, env=env, **usual | options)


@pytest.fixture(scope="module")
def measuring():
    with process() as shared:
        yield shared


def trials(measuring, *behaviours, key=KEY, rounds=2, incumbent=None):
    proposals = [Proposal(behaving(name), rounds) for name in behaviours]
    found = list(measuring.measure(key, proposals, incumbent))
    assert [Proposal(t.config, t.rounds) for t in found] == proposals
    return found


def pid_of(measuring) -> int:
    assert measuring._child is not None
    return measuring._child._process.pid


def test_a_process_that_was_begun_is_the_one_that_measures():
    with process() as measuring:
        measuring.begin()
        begun = pid_of(measuring)
        measuring.begin()
        assert not measuring._child.ready
        (good,) = trials(measuring, "good")
        assert good.invalid is None, good.reason
        assert pid_of(measuring) == begun
    with pytest.raises(ProcessLookupError):
        os.kill(begun, 0)


def test_a_workload_is_made_meanwhile_once_and_no_reply_is_taken_for_another(
    monkeypatch,
):
    asked = []
    send = Child.send
    monkeypatch.setattr(
        Child,
        "send",
        lambda child, request: (asked.append(request["do"]), send(child, request))[1],
    )
    other = make_key(num_rows=7)
    with process() as measuring:
        measuring.begin(KEY)  # before the child is even up
        assert measuring.roof_us(KEY) == 3.5
        (good,) = trials(measuring, "good")
        assert good.invalid is None and asked == ["prepare", "trial"]
        measuring.begin(KEY)
        assert len(asked) == 2
        # Begun for another key than the one that comes.
        measuring.begin(other)
        (wrong, good) = trials(measuring, "wrong", "good")
        assert (wrong.invalid, good.invalid) == ("correctness", None)
        assert asked[2:] == ["prepare", "prepare", "trial", "prepare", "trial"]
        (good,) = trials(measuring, "good", key=other)
        assert good.invalid is None


@pytest.mark.parametrize("has_answered", [False, True])
def test_a_process_that_dies_meanwhile_is_no_candidates_fault(has_answered):
    with process() as measuring:
        (good,) = trials(measuring, "good")
        assert good.invalid is None
        measuring.begin(make_key(row_size=80))
        child = measuring._child
        if has_answered:
            assert select.select([child._replies], [], [], 60)[0]
        os.kill(pid_of(measuring), signal.SIGKILL)
        child._process.wait(60)
        (good,) = trials(measuring, "good")
        assert good.invalid is None, good.reason


def test_what_cannot_be_made_meanwhile_is_a_failure_of_its_own_key():
    with process("make_nothing") as measuring:
        measuring.begin(KEY)
        assert "900 GiB" in measuring.why_not(KEY)
        assert "900 GiB" in measuring.why_not(KEY)
        measuring.begin(KEY)  # given up after two tries
        assert measuring._begun is None


@pytest.mark.parametrize(("behaviour", "invalid", "reason"), REJECTED)
def test_bad_configs_are_rejected_and_the_process_lives(
    behaviour, invalid, reason, measuring
):
    bad, good = trials(measuring, behaviour, "good")
    assert (bad.invalid, bad.time_us) == (invalid, None)
    assert reason in bad.reason
    before = pid_of(measuring)
    (again,) = trials(measuring, "good")
    assert good.invalid is None
    assert again.invalid is None
    assert pid_of(measuring) == before


@pytest.mark.long
@pytest.mark.parametrize(("behaviour", "invalid", "reason"), KILLED)
def test_a_process_that_is_lost_is_replaced(behaviour, invalid, reason, measuring):
    trials(measuring, "good")
    before = pid_of(measuring)
    bad, good = trials(measuring, behaviour, "good")
    assert (bad.invalid, bad.time_us) == (invalid, None)
    assert reason in bad.reason
    assert good.invalid is None, good.reason
    assert pid_of(measuring) != before
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)


@pytest.mark.long
def test_a_config_that_eats_memory_is_stopped_at_the_limit():
    # Some machines take seconds to hand out a gigabyte.
    with process(limit_s=60.0, host_memory_mib=1200) as measuring:
        bad, good = trials(measuring, "host memory hog", "good")
        assert bad.invalid == "over-limit"
        assert bad.reason.endswith("MiB of host memory, 1200 allowed")
        assert good.invalid is None, good.reason


def test_inputs_are_made_anew_after_what_may_have_spoiled_them(device):
    """The child is this process, so it runs where the kernels of this one do."""
    made = []
    source, out = os.pipe()
    options = {"device": str(device), "limit_s": 60, "turn_us": 1000}
    options |= {"make": "math:sqrt", "device_memory_share": 1.0}
    child = measuring_child._Child(options, out)

    def make(key, device):
        made.append(key)
        return planted_workloads.make(key, device)

    child.make = make
    request = {"do": "trial", "kernel": KEY.kernel, "fields": KEY.to_dict()}
    request |= {"rounds": 1, "seed": 1, "incumbent": None, "incumbent_us": None}
    for behaviour, times in (
        ("good", 1),
        ("shared memory", 1),
        ("good", 1),
        ("wrong", 1),
        ("good", 2),
    ):
        child.serve({**request, "config": {"BEHAVIOUR": behaviour}})
        assert len(made) == times, behaviour
    os.close(out)
    with open(source) as replies:
        kinds = [set(json.loads(line)) for line in replies]
    assert [kind for kind in kinds if "stage" not in kind] == [
        {"result"},
        {"failed", "reason", "ends"},
        {"result"},
        {"failed", "reason", "ends"},
        {"result"},
    ]


def test_a_wrong_result_in_place_is_rejected(measuring):
    """The fused form overwrites its inputs; here nothing adds the residual."""
    (bad,) = trials(measuring, "good", key=make_key(fused_add=1))
    assert bad.invalid == "correctness"


def test_a_slow_config_gets_a_time_but_few_rounds(measuring):
    slow, good = trials(measuring, "slow", "good", rounds=50)
    assert slow.rounds == 50
    assert slow.time_us > 10 * good.time_us
    assert slow.timing_s < 0.5, "50 rounds of 20 ms were not given up"


def test_times_are_on_the_incumbents_scale(measuring):
    key = make_key(num_rows=19)
    (first,) = trials(measuring, "good", key=key)
    (again,) = trials(measuring, "good", key=key)
    (slow,) = trials(measuring, "slow", key=key)
    assert again.time_us == first.time_us
    (beside,) = trials(measuring, "good", key=key, incumbent=behaving("slow"))
    assert beside.time_us < slow.time_us / 10


def test_the_winner_is_confirmed_beside_the_default(measuring):
    slow = measuring.confirm(KEY, behaving("slow"), seed=3)
    assert slow.wrong is None
    assert slow.time_us > 5 * slow.default_us
    assert not slow.is_better
    half = measuring.confirm(make_key(dtype="float16"), behaving("kernel"), seed=4)
    assert half.wrong is None
    assert 0 < half.error_ratio < 4
    assert 0 < half.noise < math.inf


@pytest.mark.parametrize("behaviour", ["wrong", "timing shape only", "works once"])
def test_a_wrong_winner_is_not_confirmed(behaviour, measuring):
    result = measuring.confirm(KEY, behaving(behaviour), seed=5)
    assert result.wrong is not None
    assert result.time_us == math.inf
    assert not result.is_better


@pytest.mark.long
def test_a_winner_that_hangs_is_not_confirmed():
    with process(limit_s=0.5) as measuring:
        result = measuring.confirm(KEY, behaving("hang"), seed=0)
        assert result.wrong.startswith("timeout: no answer within 2 s")
        assert measuring.confirm(KEY, GOOD, seed=0).wrong is None


@pytest.mark.long
@pytest.mark.parametrize("behaviour", ["hang", "segfault", "unheard of"])
def test_a_bad_default_costs_no_candidate(behaviour):
    env = {"PLANTED_DEFAULT": behaviour}
    with process("make_bad_default", limit_s=2.0, env=env) as measuring:
        good, bad, wrong = trials(measuring, "good", behaviour, "wrong")
        assert good.invalid is None, good.reason
        assert bad.invalid in ("timeout", "runtime")
        assert wrong.invalid == "correctness"
        result = measuring.confirm(KEY, GOOD, seed=1)
        assert result.wrong is None
        assert result.default_us == math.inf
        assert result.time_us < math.inf


@pytest.mark.long
def test_inputs_that_do_not_fit_are_over_the_limit():
    with process("make_nothing") as measuring:
        assert measuring.roof_us(KEY) is None
        for trial in trials(measuring, "good", "wrong"):
            assert (trial.invalid, trial.reason) == (
                "over-limit",
                "MemoryError: inputs need 900 GiB",
            )
        assert "900 GiB" in measuring.confirm(KEY, GOOD, seed=0).wrong


@pytest.mark.long
def test_a_workload_that_is_never_ready_costs_two_waits():
    with process("make_never", prepare_limit_s=1.5) as measuring:
        found = trials(measuring, "good", "wrong", "slow", "hang")
        for trial in found:
            assert trial.invalid == "timeout"
            assert trial.reason == "no answer within 1.5 s"
        assert all(trial.seconds < 0.1 for trial in found[2:])


def test_what_is_known_of_the_device_comes_from_the_child(measuring):
    assert measuring.device_info().name == "interpreter"
    assert measuring.roof_us(KEY) == 3.5


@pytest.mark.long
def test_a_child_that_cannot_start_is_no_invalid_trial():
    with (
        process("no_such_function") as measuring,
        pytest.raises(MeasuringError, match="no_such_function"),
    ):
        trials(measuring, "good")
    with pytest.raises(ValueError, match="limit_s must be above 0"):
        process(limit_s=0)
    with pytest.raises(ValueError, match="seed must be 0 or more"):
        process().confirm(KEY, GOOD, seed=-1)


def test_a_search_leaves_off_where_it_likes(measuring):
    """Proposals that nobody asks for are not run, and nothing is in flight after."""

    class Both:
        rounds = 2

        def __init__(self):
            self.told = []
            self.asked = False

        def ask(self, n=1):
            names = () if self.asked else ("good", "hang")
            self.asked = True
            return [Proposal(behaving(name), 2) for name in names]

        def tell(self, trial):
            self.told.append(trial)

        def best(self):
            return next((t for t in self.told if t.invalid is None), None)

    before = pid_of(measuring)
    result = search(
        Both(),
        lambda proposals: measuring.measure(KEY, proposals),
        Budget(),
        batch=2,
        stop=lambda best: best.time_us > 0,
    )
    assert result.stopped == "condition"
    assert len(result.trials) == 1
    assert trials(measuring, "good")[0].invalid is None
    assert pid_of(measuring) == before


@pytest.mark.long
def test_an_interrupt_ends_the_child(measuring):
    trials(measuring, "good")
    before = pid_of(measuring)

    def interrupt(*args):
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            trials(measuring, "hang")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)
    assert trials(measuring, "good")[0].invalid is None


_PARENT = """
import sys
from test_measuring_process import pid_of, process, trials
measuring = process(limit_s=100.0)
trials(measuring, "good")
print(pid_of(measuring), flush=True)
trials(measuring, sys.argv[1])
"""


@pytest.mark.long
def test_a_parent_that_is_killed_leaves_no_child():
    path = os.pathsep.join(filter(None, [TESTS, os.environ.get("PYTHONPATH")]))
    parent = subprocess.Popen(
        [sys.executable, "-P", "-c", _PARENT, "hang"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(child, 0)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    state = Path(f"/proc/{child}/stat")
    # Where nobody collects orphans it stays as a zombie.
    assert not state.exists() or state.read_text().split()[2] == "Z"


@pytest.mark.gpu
def test_an_illegal_access_costs_the_context(measuring):
    with process(device="cuda:0", env={"TRITON_INTERPRET": "0"}) as on_gpu:
        trials(on_gpu, "good")
        before = pid_of(on_gpu)
        bad, good = trials(on_gpu, "illegal access", "good")
        assert bad.invalid == "runtime"
        assert "illegal" in bad.reason
        assert good.invalid is None, good.reason
        assert pid_of(on_gpu) != before


@pytest.mark.long
def test_every_round_is_told_and_timed_unless_a_config_may_be_given_up(measuring):
    (slow,) = trials(measuring, "slow", rounds=4, incumbent=GOOD)
    assert len(slow.times_us) == 1 and 0 < slow.timing_s < slow.seconds
    with process(gives_up=False) as thorough:
        (slow,) = trials(thorough, "slow", rounds=4, incumbent=GOOD)
        (good,) = trials(thorough, "good", rounds=4, incumbent=GOOD)
        assert len(slow.times_us) == len(good.times_us) == 4
        assert min(slow.times_us) <= slow.time_us <= max(slow.times_us)
        assert good.time_us == pytest.approx(sum(sorted(good.times_us)[1:3]) / 2)
        # Another process may go on with the scale of this one.
        thorough.recall(KEY, GOOD, 7.0)
        (good,) = trials(thorough, "good", rounds=3, incumbent=GOOD)
        assert good.time_us == pytest.approx(7.0)
