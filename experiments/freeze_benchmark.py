"""Write down what the benchmark's data and splits hash to: to be run only when a task is added or meant to change."""

import json
from pathlib import Path

import bcfl.benchmark
from bcfl.benchmark.sources import read
from bcfl.benchmark.splits import checksums
from bcfl.benchmark.tasks import all_tasks

TARGET = Path(bcfl.benchmark.__file__).with_name("splits.json")

if __name__ == "__main__":
    frozen = {name: checksums(task, read(task)) for name, task in all_tasks().items()}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(sums)}" for name, sums in frozen.items())
    TARGET.write_text(f"{{\n{lines}\n}}\n")
