# SPDX-License-Identifier: Apache-2.0
"""Cases of the gate that serve several checks: never stale, never all of them old."""

import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from test_gate import CHUNK, DECODE, TWISTS, _right, _rows, _twist

from portable_backend.warmup import attention_workload, check_cases
from portable_backend.warmup.attention_workload import AttentionWorkload
from portable_backend.warmup.check_cases import KeptCases, fingerprint, kept_limit
from portable_backend.warmup.workloads import make_workload

CPU = torch.device("cpu")
SLOTS = 5


@dataclass
class Case:
    number: int

    def __post_init__(self):
        self.tensors = [torch.full((100,), float(self.number))]  # 400 bytes


class Drawn:
    """Draws cases and counts them."""

    def __init__(self):
        self.slots = []

    def __call__(self, slot):
        self.slots.append(slot)
        return Case(len(self.slots))


def numbers(kept, draw):
    return [case.number for case, _ in kept.take(draw)]


def test_each_check_has_one_new_case_and_none_is_kept_for_long():
    kept, draw = KeptCases(SLOTS, 1 << 20), Drawn()
    checks = [numbers(kept, draw) for _ in range(12)]
    assert checks[0] == [1, 2, 3, 4, 5]
    assert draw.slots == [0, 1, 2, 3, 4, *(i % SLOTS for i in range(1, 12))]
    for before, after in itertools.pairwise(checks):
        assert len(set(after) - set(before)) == 1
    assert all(sum(n in check for check in checks) <= SLOTS for n in range(1, 17))
    assert [new for _, new in kept.take(draw)].count(True) == 1


def test_what_is_drawn_ahead_leaves_the_first_check_one_case_to_draw():
    kept, draw = KeptCases(SLOTS, 1 << 20), Drawn()
    kept.fill(draw)
    assert draw.slots == [1, 2, 3, 4]
    assert [new for _, new in kept.take(draw)] == [True, *[False] * 4]
    assert draw.slots[4:] == [0]


@pytest.mark.parametrize(("limit", "kept_cases"), [(399, 0), (400, 1), (1300, 3)])
def test_what_does_not_fit_is_drawn_for_each_check(limit, kept_cases):
    kept, draw = KeptCases(SLOTS, limit), Drawn()
    for _ in range(7):
        before = len(draw.slots)
        assert len(numbers(kept, draw)) == SLOTS
        assert kept.num_bytes == 400 * kept_cases <= limit
        drawn = len(draw.slots) - before
        assert drawn >= SLOTS - kept_cases
    assert drawn <= SLOTS - kept_cases + 1


def test_a_case_that_has_changed_is_drawn_anew():
    kept, draw = KeptCases(SLOTS, 1 << 20), Drawn()
    cases = [case for case, _ in kept.take(draw)]
    cases[3].tensors[0][7] = float("nan")
    found = list(kept.take(draw))
    assert [new for _, new in found] == [False, True, False, True, False]
    assert not any(case.tensors[0].isnan().any() for case, _ in found)
    assert fingerprint([torch.tensor([0.0])]) != fingerprint([torch.tensor([-0.0])])


def test_memory_is_a_share_of_what_this_process_may_still_have(monkeypatch):
    gib = 1 << 30
    # (free, fraction, allocated, reserved, what is left of it)
    for free, fraction, allocated, reserved, spare in (
        (100, 0.9, 10, 10, 100),  # of an idle GPU of 140
        (100, 0.5, 10, 10, 60),
        (20, 0.1, 4, 6, 10),  # beside an engine
        (1, 0.9, 20, 30, 11),  # what torch has cached counts as free
        (3, 0.01, 2, 2, 0),
    ):
        fake = {
            "mem_get_info": (free * gib, 140 * gib),
            "get_per_process_memory_fraction": fraction,
            "memory_allocated": allocated * gib,
            "memory_reserved": reserved * gib,
        }
        for name, value in fake.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
        gpu = SimpleNamespace(type="cuda")
        assert check_cases.spare_bytes(gpu) == pytest.approx(spare * gib, abs=gib / 2)
        assert kept_limit(gpu) <= 0.1 * (spare + 0.5) * gib
    assert kept_limit(CPU) == 64 << 20


@pytest.fixture
def planted(monkeypatch, device):
    """A workload with as many cases as on a GPU; what it runs; the lengths drawn.

    What is planted is made of torch's own operations, which run where the kernels do.
    """
    monkeypatch.setitem(attention_workload._CASES, "cpu", SLOTS)
    drawn = []
    make_inputs = attention_workload.make_inputs

    def make(shape, *args, **options):
        drawn.append(shape.seq_lens)
        return make_inputs(shape, *args, **options)

    run = SimpleNamespace(call=None, drawn=drawn)
    monkeypatch.setattr(attention_workload, "make_inputs", make)

    def attention(*given, out, key, value):
        run.call(*given, out=out)

    monkeypatch.setattr(attention_workload, "paged_attention", attention)
    # What is planted needs no plan, which the interpreter takes long to make.
    empty = SimpleNamespace(
        partial=torch.empty(0),
        lse=torch.empty(0),
        plan=lambda batch, num_tokens: batch,
    )
    monkeypatch.setattr(AttentionWorkload, "_planner", lambda *_, **__: empty)

    # Threads that wait for each other's CPU take most of the time otherwise.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def plant(key):
        run.workload = make_workload(key, device)
        run.call = right
        drawn.clear()
        return run

    yield plant
    torch.set_num_threads(threads)


def right(*given, out):
    _twist("right", *given, out=out)


def check(run, seed, *, reuse=True, call=None):
    run.call = call or right
    return run.workload.check(run.workload.default, seed, reuse=reuse).wrong


@pytest.mark.parametrize(
    ("name", "key"), [twist for twist in TWISTS if twist[1] in (DECODE, CHUNK)]
)
def test_what_is_wrong_is_rejected_on_kept_cases_as_well(name, key, planted):
    """And what is right passes after it: it has had none of the inputs themselves."""
    run = planted(key)
    assert check(run, 0) is check(run, 1) is None

    def bad(*given, out):
        _twist(name, *given, out=out)

    assert check(run, 2, call=bad)
    assert check(run, 3) is None
    assert check(run, 4, call=bad)


def test_later_checks_draw_one_case_and_a_confirmation_all(planted):
    run = planted(DECODE)
    counts = []
    for seed, reuse in ((0, True), (1, True), (2, True), (-1, False), (3, True)):
        before = len(run.drawn)
        assert check(run, seed, reuse=reuse) is None
        counts.append(len(run.drawn) - before)
    assert counts == [5, 1, 1, 5, 1]


def seen_as(query, keys, values, step, options):
    """What tells inputs of a case from any others."""
    rows = _rows(step)
    return query[rows].sum().item(), values.nan_to_num().abs().sum().item()


def test_what_is_right_on_known_inputs_only_is_rejected(planted):
    """One that has been told of all inputs before its own check."""
    run = planted(DECODE)
    known = set()

    def learns(*given, out):
        known.add(seen_as(*given))
        right(*given, out=out)

    def recalls(*given, out):
        if seen_as(*given) in known:
            right(*given, out=out)

    for seed in range(0, 12, 2):
        assert check(run, seed, call=learns) is None
        wrong = check(run, seed + 1, call=recalls)
        assert wrong is not None and "error inf" in wrong
    assert check(run, 11, call=learns) is None
    assert check(run, 11, reuse=False, call=recalls) is not None


@pytest.mark.parametrize("reuse", [True, False])
def test_results_kept_by_lengths_are_rejected(reuse, planted):
    """At once, and by what an earlier check left."""
    run = planted(DECODE)
    results = {}

    def keeps(query, keys, values, step, options, *, out):
        lengths = tuple(step.seq_lens.tolist())
        rows = _rows(step)
        if lengths not in results:
            given = query, keys, values, step, options
            results[lengths] = _right(*given)[rows].to(out.dtype)
        out[rows] = results[lengths]

    assert check(run, 0, reuse=reuse, call=keeps) is not None
    assert check(run, 1, reuse=reuse, call=keeps) is not None
    # Not for what it keeps of this check: the values' signs have changed.
    assert check(run, 2) is None


def test_what_reaches_the_kept_cases_spoils_no_later_check(planted):
    run = planted(DECODE)
    assert check(run, 0) is None

    def strays(*given, out):
        right(*given, out=out)
        for case, *_ in run.workload._cases._kept.values():
            case.inputs.caches[0][1].nan_to_num_(7.0)

    check(run, 1, call=strays)
    before = len(run.drawn)
    assert check(run, 2) is None
    assert len(run.drawn) - before == SLOTS


def test_configs_get_the_layout_that_was_drawn(planted):
    run = planted(DECODE)
    strides = set()

    def looks(query, keys, values, step, options, *, out):
        strides.add((keys.stride(), values.stride()))
        assert keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
        right(query, keys, values, step, options, out=out)

    assert check(run, 0, call=looks) is None
    keys, values = run.workload.inputs.caches[0]
    assert strides == {(keys.stride(), values.stride())}
