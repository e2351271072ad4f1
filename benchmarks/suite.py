"""All figures in one run: a table beside the last committed one, benchmarks/results.json and the page's tables."""

import argparse
import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import core
import footprint
import operators
import rounds
import torch
from measure import show

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results.json"
PAGE = ROOT / "docs/benchmarks.md"


PARTS = {"core": core.rows, "rounds": rounds.rows, "footprint": footprint.rows}
SCRIPTS = {"peers": ["peers/race.py"], "million": ["million.py", "bcfl-g"]}  # with pages or figures of their own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[*PARTS, *SCRIPTS], help="one part; the others' figures stay as they were")
    only = parser.parse_args().only
    if only in SCRIPTS:
        script, *arguments = SCRIPTS[only]
        raise SystemExit(subprocess.run([sys.executable, ROOT / "benchmarks" / script, *arguments]).returncode)
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": [], "shares": {}}
    figures = []
    for name in [only] if only else PARTS:
        print(f"measuring {name} …", flush=True)
        figures += PARTS[name]()
    shares = kept["shares"] if only else operators.shares()
    show(figures, kept["rows"])
    measured = {figure["name"] for figure in figures}
    others = [figure for figure in kept["rows"] if only and figure["name"] not in measured]
    record = {"machine": machine(), "rows": [*figures, *others], "shares": shares}
    RESULTS.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(page(PAGE.read_text(), record))


def machine() -> dict[str, Any]:
    """What the figures were measured on; they are ratios, but not every ratio is the same everywhere."""
    model = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    return {
        "processor": model[1] if model else platform.processor(),
        "cores": torch.get_num_threads(),
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def page(text: str, record: dict[str, Any]) -> str:
    """The page with its tables written anew, each between its two marks."""
    for name, lines in {"figures": figure_table(record), "shares": share_table(record["shares"])}.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        _, mark, after = rest.partition(end)
        if not mark:
            raise ValueError(f"{PAGE.name} must hold {begin} and {end}")
        text = "\n".join([before + begin, *lines, end + after])
    return text


def figure_table(record: dict[str, Any]) -> list[str]:
    on = record["machine"]
    lines = ["| what | measured | target | | |", "|---|---|---|---|---|"]
    for figure in record["rows"]:
        target = f"≤ {figure['target']:.3g} {figure['unit']}"
        lines.append(
            f"| {figure['name']} | {figure['value']:.2f} | {target} | {figure['verdict']} | {figure['note']} |"
        )
    where = f"{on['cores']} cores of {on['processor']} ({on['capability']}), torch {on['torch']}"
    return [*lines, "", f"Measured in one run on {where}."]


def share_table(shares: dict[str, dict[str, float]]) -> list[str]:
    kinds = [*operators.KINDS, operators.REST]
    lines = ["| net, task | " + " | ".join(kinds) + " |", "|---|" + "---|" * len(kinds)]
    for name, of_kind in shares.items():
        cells = (f"{100 * of_kind.get(kind, 0):.0f} %" for kind in kinds)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    main()
