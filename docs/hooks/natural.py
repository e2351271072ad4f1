"""The benchmark's tasks and results as pages of the site, from what the package and results/benchmark/ hold."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from bcfl.benchmark.described import results_tables, tasks_page
from bcfl.benchmark.ledger import kept
from bcfl.benchmark.page import page

KEPT = Path(__file__).parents[2] / "results" / "benchmark"
HERE = "<!-- tables -->"  # where natural.md has its results


def on_files(files: Files, config: Any) -> Files:
    records = list(kept(KEPT).values())
    files.append(File.generated(config, "natural-tasks.md", content=tasks_page()))
    if records:
        files.append(File.generated(config, "leaderboard.html", content=page(records)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    records = list(kept(KEPT).values()) if page.file.src_uri == "natural.md" else []
    found = "All pictures and intervals: [the leaderboard](leaderboard.html).\n\n" + results_tables(records)
    return markdown.replace(HERE, found if records else "No results are kept in `results/benchmark/` yet.")
