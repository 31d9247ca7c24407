"""Progress with rate and time left: a bar on a terminal, a line every ten seconds elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_EVERY = 10.0  # seconds


class Bar:
    """Call `advance(n)` as work is done; `note` is a short live text such as the loss."""

    def __init__(self, label: str, total: float, unit: str, draw):
        self.label, self.total, self.unit = label, total, unit
        self.done, self.note, self._draw, self._start = 0.0, "", draw, time.monotonic()

    def advance(self, amount: float = 1, note: str | None = None) -> None:
        self.done += amount
        self.note = self.note if note is None else note
        self._draw(self)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    @property
    def rate(self) -> float:
        return self.done / max(self.seconds, 1e-9)

    def line(self) -> str:
        left = (self.total - self.done) / self.rate if self.done else float("inf")
        eta = f"{int(left // 60)}:{int(left % 60):02d} left" if left < 360_000 else "time left unknown"
        text = f"{self.label}: {self.done:,.0f}/{self.total:,.0f} {self.unit}, {self.rate:,.1f} {self.unit}/s, {eta}"
        return f"{text}  {self.note}" if self.note else text


@contextmanager
def bar(label: str, total: float, unit: str) -> Iterator[Bar]:
    """`with bar("capture", tokens, "tokens") as b: b.advance(512)`. Writes to standard error."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = [
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(), TimeRemainingColumn(),
        ]  # fmt: skip
        with Progress(*columns, console=console) as live:
            task = live.add_task(label, total=total, text="")

            def draw(b: Bar) -> None:
                text = f"{b.done:,.0f}/{total:,.0f} {unit} {b.rate:,.1f}/s {b.note}"
                live.update(task, completed=b.done, text=text)

            yield Bar(label, total, unit, draw)
        return

    last = time.monotonic()

    def draw(b: Bar) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_EVERY:
            last = time.monotonic()
            print(b.line(), file=sys.stderr, flush=True)

    b = Bar(label, total, unit, draw)
    yield b
    if b.seconds > 2:
        print(b.line(), file=sys.stderr, flush=True)
