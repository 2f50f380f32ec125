"""Seconds: marks on a clock, and what a dense step takes.

Used by `generate.py` and the measurements.
"""

import statistics
import time

import torch

from exact import seconds
from sfi import Engine, RowStep


class Clock:
    """Seconds from its making to each mark, the device's queued work included."""

    def __init__(self, device: torch.device):
        self.device, self.began, self.at = device, time.perf_counter(), {}

    def mark(self, name: str) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.at[name] = time.perf_counter() - self.began
        return self.at[name]


def dense_step(engine: Engine, lengths: list[int]):
    """A dense step that reads the first lengths[b] tokens of row b and changes no row: to time it."""
    for b in range(len(engine.rows)):
        engine.check_room(b, 1)
    plans = [
        RowStep("dense", engine.cache.cap, n, row.length + 1)
        for n, row in zip(lengths, engine.rows, strict=True)
    ]
    engine.run(0, [[0]] * len(plans), plans)


def dense_seconds(engine: Engine, lengths: list[int]) -> float:
    """Median seconds of a dense step at the given lengths: of five, or of as many as a second holds."""
    dense_step(engine, lengths)
    times = []
    while len(times) < 5 and sum(times) < 1:
        times.append(seconds(lambda: dense_step(engine, lengths), engine.model.device))
    return statistics.median(times)
