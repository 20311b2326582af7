# SPDX-License-Identifier: Apache-2.0
"""What tensor_parallel_check concludes from logs, records and times; needs no GPU."""

import json
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# As end_to_end.py has it.
LEAST_AGREEMENT = 0.75
LEAST_TUNE_RATIO = 1.7
KERNELS = ("plan", "decode", "prefill", "kv_cache_write")
_TUNED = re.compile(r"tuned (\d+) of (\d+) keys in ([\d.]+) s of \d+ \(([^)]*)\)")
_FUSED = re.compile(r"fuse_allreduce_rms\W+(True|False)")
RANKS_WARNING = "tensor-parallel ranks may run different configs"


@dataclass
class Row:
    """One row of the table.

    Attributes:
        part: that it belongs to.
        name: of what was tried.
        passed: None where nothing is asked, as of a time that is only noted.
        summary: for people.
        seconds: that it took, or an engine's start.
        details: what the summary is made from.
    """

    part: str
    name: str
    passed: bool | None
    summary: str
    seconds: float | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass
class Answer:
    """What came of one engine.

    Attributes:
        failed: why its process did not end well; None: it did.
        log: its output.
        result: of tensor_parallel_engine.py; empty where it failed.
    """

    failed: str | None
    log: str
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def problem(self) -> str | None:
        """The failure with the log's last line."""
        if self.failed is None:
            return None
        last = "".join(self.log.strip().splitlines()[-1:])
        return f"{self.failed}: {last[:150]}"


@dataclass(frozen=True)
class Tuning:
    """What one process says of its tuning: seconds, and how many keys by state."""

    seconds: float
    keys: int
    states: Mapping[str, int]

    @property
    def written(self) -> int:
        """Keys that it measured and recorded."""
        return self.states.get("tuned", 0) + self.states.get("default", 0)


def choices_of(answer: Answer) -> list[str]:
    """The hash of all configs of each rank that has told it, in their order."""
    return [told["choices"] for told in answer.result.get("choices") or []]


def tuning_of(log: str) -> Tuning | None:
    """What the log says of tuning, all builders' together; None: nothing."""
    found = _TUNED.findall(log)
    if not found:
        return None
    states: Counter[str] = Counter()
    for *_, text in found:
        for part in filter(None, text.split(", ")):
            count, _, state = part.partition(" ")
            states[state] += int(count)
    seconds = sum(float(took) for _, _, took, _ in found)
    return Tuning(seconds, sum(int(keys) for _, keys, _, _ in found), states)


def fusion_of(log: str) -> str:
    """Whether vLLM fused all-reduce and RMSNorm: "on", "off", or "not told"."""
    found = _FUSED.search(log)
    return "not told" if found is None else "on" if found[1] == "True" else "off"


def judge_launches(answer: Answer, num_ranks: int) -> str | None:
    """What is wrong with the launches that each rank has counted; None: nothing."""
    counted = answer.result.get("launch_counts") or []
    if len(counted) != num_ranks:
        return f"{len(counted)} of {num_ranks} ranks counted launches"
    missing = sorted({k for counts in counted for k in KERNELS if not counts.get(k)})
    return f"never launched: {', '.join(missing)}" if missing else None


def judge_tokens(
    name: str, ours: Answer, other: Answer, compared: dict[str, Any] | None
) -> Row:
    """Greedy tokens of two engines; `compared` is same_tokens.compare's result."""
    problem = ours.problem or other.problem
    if problem is not None or compared is None:
        return Row("tokens", name, False, problem or "not compared")
    summary = ", ".join(f"{state} {compared[state]}" for state in STATES_OF_TOKENS)
    passed = compared["bad"] == 0 and compared["same"] > 0
    return Row("tokens", name, passed, summary, details=compared)


STATES_OF_TOKENS = ("same", "near_tie", "bad")


def judge_ranks(
    name: str, answer: Answer, num_ranks: int, bad_prompts: int | None
) -> Row:
    """Whether all ranks of an engine run the same configs, and it answers right.

    Args:
        name: of the start.
        answer: its engine.
        num_ranks: tensor-parallel size.
        bad_prompts: that differ from the reference; None: not compared.
    """
    told = answer.result.get("choices") or []
    start_s = answer.result.get("start_s")
    details: dict[str, Any] = {"choices": told, "start_s": start_s}
    tuning = tuning_of(answer.log)
    if tuning is not None:
        details["tuning"] = vars(tuning)
    problems = [answer.problem] if answer.problem else []
    if len(told) != num_ranks and not answer.failed:
        problems.append(f"{len(told)} of {num_ranks} ranks told their choices")
    if len(set(choices_of(answer))) > 1:
        problems.append("ranks run different configs")
    if len({json.dumps(rank["grades"], sort_keys=True) for rank in told}) > 1:
        problems.append("ranks tell different grades")
    if any(rank["tune_s"] for rank in told[1:]):
        problems.append("not the first rank alone has tuned")
    if RANKS_WARNING in answer.log:
        problems.append("a rank has waited in vain for the first one's choices")
    if bad_prompts:
        problems.append(f"{bad_prompts} prompts answered differently")
    if answer.failed is None and (wrong := judge_launches(answer, num_ranks)):
        problems.append(wrong)
    summary = ""
    if told:
        ranks = ", ".join(f"rank {n} {c}" for n, c in enumerate(choices_of(answer)))
        summary = f"{ranks} ({grades_in_words(told[0]['grades'])})"
    if tuning is not None:
        summary += f"; tuned {tuning.written} of {tuning.keys} in {tuning.seconds:g} s"
    summary = "; ".join(filter(None, [*problems, summary]))
    return Row("ranks", name, not problems, summary, start_s, details)


def grades_in_words(grades: Mapping[str, Mapping[str, int]]) -> str:
    """As in "decode exact 2, default 1; prefill default 2"."""
    return "; ".join(
        f"{kernel} " + ", ".join(f"{grade} {n}" for grade, n in counts.items())
        for kernel, counts in grades.items()
    )


def judge_starts(answers: Mapping[str, Answer]) -> Row:
    """Whether tuned records reach the later starts: all three run the same configs.

    Args:
        answers: of the starts "startup", "warm" and "first rank only".
    """
    choices = {name: sorted(set(choices_of(a))) for name, a in answers.items()}
    tuning = tuning_of(answers["startup"].log) if "startup" in answers else None
    written = 0 if tuning is None else tuning.written
    held = {text for found in choices.values() for text in found}
    passed = len(held) == 1 and all(choices.values()) and written > 0
    summary = ", ".join(f"{name} {'/'.join(c) or '?'}" for name, c in choices.items())
    if not written:
        summary += "; the start that tunes has recorded nothing"
    return Row("ranks", "same records", passed, summary, details={"choices": choices})


def judge_shared(
    answers: Sequence[Answer], records: Sequence[str], problems: Sequence[str]
) -> Row:
    """Whether engines that tuned into one cache lost nothing and did nothing twice.

    Args:
        answers: of the engines.
        records: the key of each record in the cache, losers of a conflict included.
        problems: of the cache's files.
    """
    wrong = [answer.problem for answer in answers if answer.problem]
    tunings = [tuning_of(answer.log) for answer in answers]
    wrong += [
        f"engine {n} has not told what it tuned"
        for n, tuning in enumerate(tunings)
        if tuning is None
    ]
    told = [tuning for tuning in tunings if tuning is not None]
    written = sum(tuning.written for tuning in told)
    counts = Counter(records)
    twice = sorted(key for key, count in counts.items() if count > 1)
    if twice:
        wrong.append(f"{len(twice)} keys were tuned twice: {twice[0]}")
    # A unit that is cut off after its record was written is not told.
    if written > len(records):
        wrong.append(f"{written} records were told, {len(records)} are there")
    if any(tuning.written == 0 for tuning in told):
        wrong.append("one has recorded nothing: they did not tune at the same time")
    if failed := sum(tuning.states.get("failed", 0) for tuning in told):
        wrong.append(f"{failed} keys failed")
    wrong += problems
    parts = [
        f"engine {n}: " + ", ".join(f"{c} {s}" for s, c in tuning.states.items())
        for n, tuning in enumerate(told)
    ]
    parts.append(f"{len(counts)} keys in the cache, {len(twice)} twice")
    starts = [answer.result.get("start_s") for answer in answers]
    details = {
        "tuning": [vars(tuning) for tuning in told],
        "keys": sorted(counts),
        "twice": twice,
        "start_s": starts,
    }
    seconds = max((s for s in starts if s is not None), default=None)
    summary = "; ".join([*wrong, *parts])
    return Row("shared", "one cache", not wrong, summary, seconds, details)


def tuned_units(text: str) -> dict[str, Any]:
    """What `portable-backend tune --json` printed, among other lines.

    Returns:
        "seconds" overall; "units": by key, its state, config and time.

    Raises:
        ValueError: it is not that.
    """
    try:
        begin = re.search(r"^\{$", text, re.M)
        result, _ = json.JSONDecoder().raw_decode(text[begin.start() if begin else 0 :])
        units = {
            json.dumps([unit["kernel"], unit["key"]], sort_keys=True): {
                name: unit[name] for name in ("state", "config", "time_us", "seconds")
            }
            for unit in result["units"]
        }
        return {"seconds": float(result["seconds"]), "units": units}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"no result of tune --json: {error!r}") from None


def judge_tune(one: dict[str, Any], several: dict[str, Any]) -> Row:
    """Tuning on one GPU against several: the same keys, in how much less time.

    Args:
        one, several: what `tuned_units` gives.
    """
    seconds = one["seconds"], several["seconds"]
    done = [
        {k for k, u in run["units"].items() if u["state"] in ("tuned", "default")}
        for run in (one, several)
    ]
    wrong = []
    if done[0] != done[1]:
        wrong.append(f"other keys: {len(done[0] ^ done[1])} are in one cache only")
    missing = [
        len(run["units"]) - len(d) for run, d in zip((one, several), done, strict=True)
    ]
    if any(missing) or not done[0]:
        wrong.append(f"{missing[0]} and {missing[1]} units were not done")
    ratio = seconds[0] / seconds[1]
    if ratio < LEAST_TUNE_RATIO:
        wrong.append(f"ratio below {LEAST_TUNE_RATIO}")
    both = sorted(done[0] & done[1])
    pairs = [(one["units"][key], several["units"][key]) for key in both]
    same = sum(a["config"] == b["config"] for a, b in pairs)
    times = [a["time_us"] / b["time_us"] for a, b in pairs if b["time_us"]]
    quality = statistics.median(times) if times else float("nan")
    summary = "; ".join(
        [
            *wrong,
            f"{seconds[0]:.0f} s on one, {seconds[1]:.0f} s on all: ratio {ratio:.2f}",
            f"{len(both)} keys in both, {same} with the same config",
            f"median of the records' times, one by all, {quality:.3f}",
        ]
    )
    details = {"one": one, "all": several, "ratio": ratio}
    return Row("tune", "one against all", not wrong, summary, seconds[1], details)


def judge_throughput(
    results: Mapping[str, dict[str, Any]],
    workloads: Sequence[str],
    agreements: Mapping[str, Mapping[str, float]],
) -> list[Row]:
    """A row for each workload, and one for each engine's start.

    Args:
        results: of end_to_end.py, by engine; "portable" is compared with the others.
        workloads: names.
        agreements: by workload and engine, the share of first tokens as the first's.
    """
    rows = []
    good = {name: r for name, r in results.items() if "failed" not in r}
    ours = good.get("portable")
    for name in workloads:
        parts, details, passed = [], {}, ours is not None
        for engine, result in good.items():
            rates = result["times"][name]
            text = f"{engine} {statistics.median(rates):.0f} tok/s"
            if ours is not None and engine != "portable":
                pairs = zip(ours["times"][name], rates, strict=False)
                text += f" ({statistics.median(a / b for a, b in pairs):.2f})"
            share = agreements.get(name, {}).get(engine, 1.0)
            if share < LEAST_AGREEMENT:
                passed = False
                text += f" DISAGREES: {share:.0%} of first tokens the same"
            parts.append(text)
            details[engine] = rates
        if not parts:
            parts = ["no engine has run it"]
        summary = ", ".join(parts)
        rows.append(Row("throughput", name, passed, summary, details=details))
    for engine, result in results.items():
        problem = result.get("failed")
        summary = "started" if problem is None else " / ".join(problem.splitlines())
        row = Row("throughput", engine, problem is None, summary[-300:])
        row.seconds = result.get("start_s")
        rows.append(row)
    return rows


def table(rows: Sequence[Row]) -> str:
    """All rows in Markdown."""
    lines = ["| part | what | | seconds | result |", "|---|---|---|---|---|"]
    for row in rows:
        state = {True: "ok", False: "**FAILED**", None: ""}[row.passed]
        seconds = "" if row.seconds is None else f"{row.seconds:.0f}"
        text = row.summary.replace("|", "/").replace("\n", " ")
        lines.append(f"| {row.part} | {row.name} | {state} | {seconds} | {text} |")
    return "\n".join(lines)


def records_in(folder: Path) -> tuple[list[str], list[str]]:
    """(the key of each record, what is wrong with the files) of a cache's folder."""
    from portable_backend.warmup.layers import Layer
    from portable_backend.warmup.record_files import DAMAGED

    layer, keys = Layer("the cache", folder), []
    problems = [f"{path.name} is there" for path in folder.rglob(f"*{DAMAGED}")]
    for kernel in layer.kernels():
        for file in layer.load(kernel):
            keys += [str(record.key) for record in file.records]
            problems += file.problems
    return keys, problems
