"""Time and memory as ratios measured in one run, so that a figure means the same on every machine."""

import argparse
import json
import multiprocessing
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def row(name: str, value: float, target: float, unit: str, note: str = "") -> Row:
    """One figure that is fine when it does not exceed its target."""
    verdict = "ok" if value <= target else "short"
    return {"name": name, "value": value, "target": target, "unit": unit, "verdict": verdict, "note": note}


def best_seconds(*operations: Callable[[], object], repeats: int) -> list[float]:
    """The shortest time of each operation; they take turns, so that a busy spell of the machine meets all alike."""
    best = [float("inf")] * len(operations)
    for _ in range(repeats):
        for i, operation in enumerate(operations):
            start = time.perf_counter()
            result = operation()
            best[i] = min(best[i], time.perf_counter() - start)
            del result  # freeing is not part of the operation, and must not overlap with the next
    return best


def peak_bytes(prepare: Callable[[], Callable[[], object]]) -> int:
    """The most memory that `prepare()()` holds at any moment beyond what `prepare` left, its result included.

    The operating system counts: Linux keeps the high-water mark of resident memory and resets it on request, so
    nothing is missed between samples and no allocator is trusted to report itself. A fresh process per
    measurement, because memory that an earlier one freed but did not return would be used again unseen.
    """
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_peak_bytes_here, (prepare,))


def _peak_bytes_here(prepare: Callable[[], Callable[[], object]]) -> int:
    operation = prepare()
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark to the present size
    before = _status_bytes("VmRSS")
    result = operation()
    peak = _status_bytes("VmHWM")
    del result
    return peak - before


def _status_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {field}: memory can be measured on Linux only")
    return int(found[1]) * 1024


def main(rows: Callable[[], list[Row]], description: str) -> None:
    """Prints the table; with --json also writes the rows to a file."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    measured = rows()
    show(measured)
    if arguments.json:
        arguments.json.write_text(json.dumps(measured, indent=2, ensure_ascii=False) + "\n")


def show(rows: Sequence[Row]) -> None:
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        figure = f"{row['value']:6.2f}  target ≤ {row['target']:g} {row['unit']}"
        print(f"{row['name']:<{width}}  {figure}  {row['verdict']}")
        if row["note"]:
            print(f"{'':<{width}}  {row['note']}")
