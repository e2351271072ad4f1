"""Starts a run of the app on the SuperLink of this machine, shows its log, and ends as the run does.

`python3 -m bcfl.deploy.launch APP [options of flwr run]`, with FLWR_HOME set; run.sh does it.
"""

import json
import subprocess
import sys
import time
from typing import Any

from bcfl.deploy.ready import CONNECTION, program


def flwr(*arguments: str) -> dict[str, Any]:
    """What one of Flower's commands answers; raises RuntimeError if it fails, which its exit code need not tell."""
    command = [program("flwr"), *arguments, "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    start, end = done.stdout.find("{"), done.stdout.rfind("}")
    answer: dict[str, Any] = json.loads(done.stdout[start : end + 1]) if start >= 0 else {}
    if done.returncode or not answer.get("success", True):
        lines = (answer.get("error-message") or done.stdout + done.stderr).strip().splitlines() or ["it said nothing"]
        raise RuntimeError(f"flwr {arguments[0]} failed: {lines[-1]}")
    return answer


def launch(app: str, *options: str) -> str:
    """How the run has ended: completed, failed or stopped."""
    run = str(flwr("run", app, CONNECTION, *options)["run-id"])
    subprocess.run([program("flwr"), "log", run, CONNECTION, "--stream"], check=False)
    while True:
        state, _, how = str(flwr("list", "--run-id", run, CONNECTION)["runs"][0]["status"]).partition(":")
        if state == "finished":
            return how
        time.sleep(1)


def main() -> int:
    try:
        how = launch(*sys.argv[1:])
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("the run goes on, but its log is no longer shown", file=sys.stderr)
        return 130
    if how != "completed":
        print(f"the run has {how}: the log above says why; ./run.sh goes on with it", file=sys.stderr)
    return 0 if how == "completed" else 1


if __name__ == "__main__":
    sys.exit(main())
