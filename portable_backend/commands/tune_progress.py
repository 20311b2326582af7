# SPDX-License-Identifier: Apache-2.0
"""Progress of `tune`: bars on a terminal where rich is installed, else lines."""

import contextlib
from collections.abc import Callable, Iterator
from typing import IO, Any

from portable_backend.warmup.records import TuningKey
from portable_backend.warmup.tuning_report import Event

OnEvent = Callable[[Event], None]


@contextlib.contextmanager
def make_progress(units: int, trials: int | None, stream: IO[str]) -> Iterator[OnEvent]:
    """Give a function that shows events.

    Args:
        units: how many there are.
        trials: of each; None: unknown.
        stream: where to, usually stderr.
    """
    if stream.isatty():
        with contextlib.suppress(ImportError):
            import rich.progress  # noqa: F401  only whether it is there

            with _bars(units, trials, stream) as on_event:
                yield on_event
            return
    yield _lines(units, stream)


def _lines(units: int, stream: IO[str]) -> OnEvent:
    finished = 0

    def show(event: Event) -> None:
        nonlocal finished
        if event.kind == "note":
            print(f"{event.key}: {event.note}", file=stream, flush=True)
        elif event.kind == "finished":
            finished += 1
            text = f"[{finished}/{units}] {event.key}: {_result(event)}"
            print(text, file=stream, flush=True)

    return show


@contextlib.contextmanager
def _bars(units: int, trials: int | None, stream: IO[str]) -> Iterator[OnEvent]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[state]}", markup=False),
        TimeElapsedColumn(),
    )
    progress = Progress(*columns, console=Console(file=stream), transient=True)
    with progress:
        overall = progress.add_task(f"{units} units", total=units, state="")
        running: dict[TuningKey, Any] = {}

        def show(event: Event) -> None:
            key = event.key
            if event.kind == "started":
                if key not in running:  # a lost worker's unit begins twice
                    name = f"{event.worker}  {key}" if event.worker else str(key)
                    running[key] = progress.add_task(name, total=trials, state="")
            elif event.kind == "trial" and key in running:
                done = event.counts.timed + event.counts.rejected.total()
                progress.update(running[key], completed=done, state=_state(event))
            elif event.kind == "note":
                progress.console.print(f"{key}: {event.note}", markup=False)
            elif event.kind == "finished":
                if key in running:
                    progress.remove_task(running.pop(key))
                progress.console.print(f"{key}: {_result(event)}", markup=False)
                progress.advance(overall)

        yield show


def _state(event: Event) -> str:
    counts = event.counts
    best = "" if event.best_us is None else f", best {event.best_us:.4g} us"
    rejected = counts.rejected.total()
    return f"{counts.timed} timed, {rejected} rejected{best}"


def _result(event: Event) -> str:
    outcome = event.outcome
    if outcome is None:
        return ""
    text = outcome.state
    if outcome.gain is not None:
        text += f", {outcome.gain:.2f} times as fast as the default"
    if outcome.counts.considered:
        text += f", {_state(event)} of {outcome.counts.considered}"
    return f"{text}: {outcome.reason}" if outcome.reason else text
