# SPDX-License-Identifier: Apache-2.0
"""A worker of `GpuCrew`: reads units from stdin, writes what it has to say to a pipe.

    python -P -m portable_backend.warmup.spread_worker DESCRIPTOR

Both speak JSON, a line each. The first line says how to tune. When stdin ends, so does
the worker, from whatever it is doing.
"""

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from portable_backend.warmup.store import RecordStore
from portable_backend.warmup.tools import Recipe
from portable_backend.warmup.tuner import BREAKDOWNS, Tuner
from portable_backend.warmup.tuning_options import TuneOptions
from portable_backend.warmup.tuning_report import Event, Outcome, Task, format_message


def main() -> int:
    # Ctrl-C reaches the whole group; the one that started this worker decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _interrupt)
    answers = int(sys.argv[1])
    # Held open by a child of this worker, it would hide this worker's end.
    os.set_inheritable(answers, False)
    lines: queue.Queue[dict[str, Any]] = queue.Queue()
    try:
        threading.Thread(target=_read, args=(lines,), daemon=True).start()
        _work(answers, lines)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        return 1
    return 0


def _work(answers: int, lines: "queue.Queue[dict[str, Any]]") -> None:
    setup = lines.get()

    def say(message: Event | Outcome) -> None:
        data = format_message(message) + b"\n"
        while data:
            data = data[os.write(answers, data) :]

    def on_event(event: Event) -> None:
        if event.kind != "finished":  # the outcome says so
            say(event)

    cache_dir = Path(setup["cache_dir"])
    store = RecordStore.open(cache_dir, map(Path, setup["cache_layers"]))
    recipe, options = Recipe(**setup["recipe"]), TuneOptions(**setup["options"])
    with Tuner(recipe, store, options, log_root=cache_dir, on_event=on_event) as tuner:
        while True:
            data = lines.get()
            outcome = _tune(tuner, data)
            say(outcome)
            if outcome.state == "interrupted":
                return


def _tune(tuner: Tuner, data: dict[str, Any]) -> Outcome:
    """Tune a unit; the start of this process counts for its first one."""
    task, seconds = Task.from_dict(data), data["seconds"]
    upcoming = Task.from_dict(data["upcoming"]).key if data["upcoming"] else None
    if seconds is None:
        return tuner.tune_unit(task, upcoming=upcoming)
    with contextlib.suppress(*BREAKDOWNS):  # which the unit meets itself
        _ = tuner.tools
    spent = time.monotonic() - data["sent"]
    if spent >= seconds:
        reason = "no time was left"
        return Outcome(task.key, "unreached", reason, seconds=spent)
    outcome = tuner.tune_unit(task, seconds - spent, upcoming=upcoming)
    return replace(outcome, seconds=outcome.seconds + spent)


def _read(lines: "queue.Queue[dict[str, Any]]") -> None:
    for line in sys.stdin.buffer:
        lines.put(json.loads(line))
    os.kill(os.getpid(), signal.SIGTERM)


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
