"""The page of results as a page of the site: RESULTS.md and the data that it links to, which lie above docs/."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]


def on_files(files: Files, config: Any) -> Files:
    text = (ROOT / "RESULTS.md").read_text().replace("](docs/", "](").replace("[results/](results/)", "`results/`")
    files.append(File.generated(config, "results.md", content=text))
    for path in sorted((ROOT / "results").rglob("*.*")):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files
