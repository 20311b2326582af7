# SPDX-License-Identifier: Apache-2.0
"""What the benchmark is made of: results and tables, stopwatches, shapes and inputs."""

import dataclasses
import json
import math
import types

import pytest

from portable_backend.bench.markdown import format_report
from portable_backend.bench.results import Report, Result, Row, geometric_means

# ----------------------------------------------------------------- results and tables


def result(time_us=None, **values):
    return Result(time_us=time_us, p20_us=time_us, p80_us=time_us, **values)


@pytest.fixture
def report():
    """Made by hand: a copy at 4000 GB/s, one win, one loss, one wrong kernel."""

    def row(name, group, ours, fa3, **values):
        results = {"fa3": fa3, "portable": ours}
        fields = {"heads": "32/8", "block_size": 64}
        return Row("attention", name, group, fields, results=results, **values)

    rows = [
        Row("copy", "copy", "roof", num_bytes=4e9, results={"torch": result(1000.0)}),
        Row("matmul", "matmul", "roof", flops=8e11, results={"torch": result(1000.0)}),
        row("decode 1x2", "decode", result(10.0, error=2e-3), result(20.0),
            num_bytes=2e7),
        row("decode 3x4", "decode", result(10.0), result(5.0), baseline="decode 1x2"),
        row("prefill 5x6", "prefill", result(100.0), result(80.0), flops=4e10),
        row("prefill 7x8", "prefill", result(error=0.1, wrong=True), result(9.0)),
        row("prefill 9x9", "prefill", result(7.0), result(reason="no | such kernel")),
    ]  # fmt: skip
    return Report(
        {"gpu": "Made Up 1", "commit": "abc1234"},
        rows,
        {"vllm": "not installed"},
        {"norm tokens=1": "no time left"},
    )


def cells(markdown, first):
    """The cells of the table line that begins with `first`."""
    lines = [line for line in markdown.splitlines() if line.startswith(f"| {first} |")]
    assert len(lines) == 1, lines
    return [cell.strip() for cell in lines[0].strip("|").split(" | ")]


def test_markdown_shows_times_ratios_and_rates(report):
    markdown = format_report(report)
    columns = ["work", "heads", "block size", "ours, us", "FA3, us", "FA3 / ours"]
    columns += ["error", "rate", "of roof", "ours / plain"]
    assert f"| {' | '.join(columns)} |" in markdown
    assert cells(markdown, "decode 1x2") == [
        "decode 1x2", "32/8", "64", "10.0", "20.0", "2.00", "2e-03", "2000 GB/s",
        "50%", "",
    ]  # fmt: skip
    assert cells(markdown, "prefill 5x6")[-3:] == ["400 TF/s", "50%", ""]
    assert cells(markdown, "gpu") == ["gpu", "Made Up 1"]
    assert cells(markdown, "measured copy") == ["measured copy", "4000 GB/s"]


def test_markdown_marks_losses_and_compares_with_the_plain_shape(report):
    markdown = format_report(report)
    assert cells(markdown, "decode 3x4")[5:] == ["**0.50**", "", "", "", "1.00"]
    slower = markdown.split("## Where ours is slower (2)")[1]
    assert slower.index(
        "- 0.50 to FA3: attention decode 3x4 heads=32/8"
    ) < slower.index("- 0.80 to FA3: attention prefill 5x6")


def test_markdown_averages_ratios_by_group(report):
    markdown = format_report(report)
    # sqrt(2 * 0.5), and the one prefill that has both times.
    assert cells(markdown, "attention: decode") == ["attention: decode", "2", "1.00"]
    expected = ["attention: prefill", "1", "**0.80**"]
    assert cells(markdown, "attention: prefill") == expected
    means = geometric_means(report.rows)
    assert means["attention: decode"]["fa3"] == (pytest.approx(1.0), 2)


def test_a_wrong_result_has_neither_time_nor_ratio(report):
    markdown = format_report(report)
    wrong = cells(markdown, "prefill 7x8")
    assert wrong[3:6] == ["WRONG, error 1.0e-01", "9.0", ""]
    assert "## FAILED (1)\n\n- ours, attention prefill 7x8" in markdown
    assert report.failed


def test_a_failure_of_another_kernel_is_shown_and_is_not_ours(report):
    markdown = format_report(report)
    assert r"no \| such kernel" in markdown
    report.rows = [row for row in report.rows if row.name != "prefill 7x8"]
    assert not report.failed


def test_markdown_lists_what_is_missing(report):
    markdown = format_report(report)
    assert "## Could not take part\n\n- vllm: not installed" in markdown
    assert "## Left out\n\n- norm tokens=1: no time left" in markdown


def test_json_holds_numbers_only_where_there_are_some(report):
    report.rows[3].results["portable"].judge(math.nan, 5e-3)
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    decode = data["rows"][2]
    assert decode["results"]["portable"]["gbps"] == pytest.approx(2000)
    assert decode["roof_share"] == pytest.approx(0.5)
    not_finite = data["rows"][3]
    assert not_finite["results"]["portable"]["error"] is None
    assert not_finite["results"]["portable"]["wrong"]
    assert not_finite["failed"]


@pytest.mark.parametrize(
    ("errors", "wrong"),
    [
        ((1e-3,), False),
        ((1e-3, 6e-3), True),
        ((6e-3, 1e-3), True),
        ((math.nan, 1e-3), True),
        ((1e-3, math.nan), True),
        ((None,), False),
    ],
)
def test_the_worst_of_several_errors_counts_and_nan_is_the_worst(errors, wrong):
    judged = Result()
    for error in errors:
        judged.judge(error, 5e-3)
    assert judged.wrong == wrong


# ---------------------------------------------------------------------------- timing


class FakeGpu:
    """A clock in place of a GPU: graphs that take a known time, events that read it."""

    def __init__(self, monkeypatch, spans_us):
        from portable_backend.bench import timing

        self.now_us, self.replayed = 0.0, []
        self.spans_us = spans_us
        monkeypatch.setattr(timing, "_event", lambda: FakeEvent(self))
        monkeypatch.setattr(timing, "capture", self.capture)
        monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda: None)

    def capture(self, calls):
        return FakeGraph(self, calls[0]()), 10


class FakeGraph:
    def __init__(self, gpu, name):
        self.gpu, self.name = gpu, name

    def replay(self):
        self.gpu.replayed.append(self.name)
        self.gpu.now_us += self.gpu.spans_us[self.name][
            self.gpu.replayed.count(self.name) % 3
        ]


class FakeEvent:
    def __init__(self, gpu):
        self.gpu = gpu

    def record(self):
        self.at_us = self.gpu.now_us

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return (end.at_us - self.at_us) / 1e3


def run_race(verify=lambda: 0.0, recheck=None):
    import torch

    from portable_backend.bench.timing import Contestant, race

    def fails():
        raise NotImplementedError("not this shape\nand more")

    makers = {
        "a": lambda: Contestant([lambda: "a"], lambda: 0.0),
        "b": lambda: Contestant([lambda: "b"], verify, recheck=recheck),
        "c": fails,
    }
    return race(makers, device=torch.device("cuda"), rounds=3, limit=0.1)


def test_replays_take_turns_and_the_median_counts(monkeypatch):
    from portable_backend.bench import timing

    monkeypatch.setattr(timing, "TURN_US", 1000.0)
    gpu = FakeGpu(monkeypatch, {"a": [600, 500, 550], "b": [500, 500, 500]})
    results = run_race()
    # Two replays of each, to upload it and to see how many fill a turn; then each round
    # starts with the next one.
    assert gpu.replayed == [*"aabb", *"aabb", *"bbaa", *"aabb"]
    assert results["a"].calls == 10
    assert results["a"].time_us == 55.0
    assert results["b"].time_us == 50.0


def test_the_slow_are_timed_among_themselves(monkeypatch):
    from portable_backend.bench import timing

    monkeypatch.setattr(timing, "TURN_US", 1000.0)
    gpu = FakeGpu(monkeypatch, {"a": [500, 500, 500], "b": [2500, 2500, 2500]})
    results = run_race()
    assert gpu.replayed == [*"aabb", *"aaaaaa", *"bbb"]
    assert results["b"].time_us == 250.0


def test_a_kernel_that_fails_leaves_the_others_their_times(monkeypatch):
    FakeGpu(monkeypatch, {"a": [500] * 3, "b": [500] * 3})
    results = run_race()
    assert results["c"] == Result(reason="NotImplementedError: not this shape")
    assert results["a"].time_us


def test_a_wrong_kernel_is_never_timed(monkeypatch):
    gpu = FakeGpu(monkeypatch, {"a": [500] * 3, "b": [500] * 3})
    assert run_race(verify=lambda: 0.2)["b"] == Result(error=0.2, wrong=True)
    assert "b" not in gpu.replayed


def test_a_graph_that_goes_wrong_when_replayed_loses_its_time(monkeypatch):
    FakeGpu(monkeypatch, {"a": [500] * 3, "b": [500] * 3})
    wrong = run_race(recheck=lambda: math.nan)["b"]
    assert wrong.wrong
    assert wrong.time_us is wrong.p20_us is wrong.p80_us is None


def test_the_hosts_time_is_the_time_of_the_calls_alone(monkeypatch):
    import torch

    from portable_backend.bench import timing

    gpu, calls = FakeGpu(monkeypatch, {}), []

    def call():
        gpu.now_us += 3.0
        calls.append(gpu.now_us)

    def wait():
        gpu.now_us += 1000.0

    monkeypatch.setattr(timing.torch.cuda, "synchronize", wait)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: gpu.now_us / 1e6)
    results = timing.race_on_host(
        {"a": lambda: call}, device=torch.device("cuda"), rounds=4, calls=50
    )
    assert results["a"].time_us == pytest.approx(3.0)
    assert len(calls) == 3 + 4 * 50


@pytest.mark.parametrize(
    ("eager_us", "graph_us", "num_layers", "count"),
    [
        (2000.0, None, 1, 1),  # longer than a span
        (300.0, None, 1, 3),
        (40.0, 8 * 10.0, 1, 100),  # the eager call was the host's time
        (40.0, 8 * 0.5, 1, 200),  # as many as a graph may hold
        (40.0, 8 * 10.0, 7, 105),  # every layer equally often
    ],
)
def test_a_span_holds_about_a_millisecond_of_calls(
    eager_us, graph_us, num_layers, count, monkeypatch
):
    from portable_backend.bench import timing

    graph = types.SimpleNamespace(replay=lambda: None)
    calls = [lambda: None] * num_layers
    elapsed = {calls[0]: eager_us, graph.replay: graph_us}
    monkeypatch.setattr(timing, "_graph_of", lambda calls, count: graph)
    monkeypatch.setattr(timing, "_elapsed_us", elapsed.__getitem__)
    assert timing.capture(calls) == (graph, count)


# ---------------------------------------------------------------- shapes and inputs


def visible_pairs(shape):
    """(query, key) pairs and keys reached, one by one."""
    pairs, keys = 0, 0
    for query_len, seq_len in zip(shape.query_lens, shape.seq_lens, strict=True):
        reached = set()
        for position in range(seq_len - query_len, seq_len):
            first = max(0, position + 1 - (shape.sliding_window or seq_len))
            pairs += position + 1 - first
            reached |= set(range(first, position + 1))
        keys += len(reached)
    return pairs, keys


@pytest.mark.parametrize("window", [None, 1, 7, 20, 26, 27, 100])
def test_work_is_what_the_masks_leave(window):
    from portable_backend.bench.shapes import AttentionShape

    shape = AttentionShape(
        "", "", (1, 7, 20), (1, 26, 20), (4, 2), 32, sliding_window=window
    )
    pairs, keys = visible_pairs(shape)
    assert shape.flops == 4 * 4 * 32 * pairs
    assert shape.num_bytes == 2 * 32 * (2 * 2 * keys + 2 * 4 * 28)


def test_labels_are_distinct_within_a_suite():
    from portable_backend.bench import shapes

    for make in (
        shapes.attention_shapes,
        lambda: shapes.geometry_shapes(every=True),
        shapes.feature_shapes,
    ):
        found = [(shape.name, *shape.fields.values()) for shape in make()]
        assert len(found) == len(set(found))


def test_every_feature_has_its_plain_shape_in_the_list():
    from portable_backend.bench.shapes import feature_shapes

    shapes = feature_shapes()
    plain = {shape.name for shape in shapes if shape.baseline is None}
    featured = [shape.baseline for shape in shapes if shape.baseline is not None]
    assert len(featured) == 11
    assert set(featured) <= plain


@pytest.fixture
def mixed_inputs():
    import torch

    from portable_backend.bench.inputs import make_inputs
    from portable_backend.bench.shapes import attention_shapes

    shape = attention_shapes(tiny=True)[1]
    shape = dataclasses.replace(shape, sliding_window=9, sinks=True)
    return make_inputs(shape, torch.device("cpu"), layout="packed", num_layers=2)


def test_the_oracle_may_be_taken_in_parts(monkeypatch, mixed_inputs):
    import torch

    from portable_backend.bench import inputs
    from portable_backend.kernels.reference import paged_attention_reference

    batch = mixed_inputs.batch(lengths_on_host=False)
    mixed_inputs.fill_unused(math.nan)
    caches, options = mixed_inputs.caches[0], mixed_inputs.options
    whole = paged_attention_reference(mixed_inputs.query, *caches, batch, options)
    monkeypatch.setattr(inputs, "_ORACLE_SCORES", 500)
    torch.testing.assert_close(inputs.oracle(mixed_inputs), whole)


def test_unused_slots_are_all_that_no_token_owns(mixed_inputs):
    shape, cache = mixed_inputs.shape, mixed_inputs.caches[0][0]
    for value_or_key in mixed_inputs.caches[0]:
        assert not value_or_key.isnan().any()
    mixed_inputs.fill_unused(math.nan)
    slots = cache.shape[0] * cache.shape[1]
    assert slots - len(mixed_inputs.unused) == sum(shape.seq_lens)
    poisoned = cache.isnan().all(-1).all(-1)
    assert int(poisoned.sum()) == len(mixed_inputs.unused)
    # What the step's tokens bring is what the cache holds for them.
    assert mixed_inputs.key.shape == (shape.num_tokens, *cache.shape[2:])
    last = shape.seq_lens[-1] - 1
    block = mixed_inputs.block_table[-1, last // shape.block_size]
    expected = cache[block, last % shape.block_size]
    assert bool((mixed_inputs.key[-1] == expected).all())
    # Layers are in memory of their own and hold the same, spare blocks aside.
    assert not bool(mixed_inputs.caches[1][0].isnan().any())
