"""Tells Flower's commands where the SuperLink on this machine is, and waits until it answers.

`python3 -m bcfl.deploy.ready --port 9092`, with FLWR_HOME set; the scripts of the server do it.
"""

import argparse
import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from bcfl.files import write_atomically

CONNECTION = "bcfl"  # what the SuperLink is called in Flower's own configuration
START_SECONDS = 60.0  # within which the SuperLink must answer


def program(name: str) -> str:
    """A program of this Python's environment, or else whatever the search path has."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else name


def link_answers(port: int, certificates: Path | None) -> bool:
    """Whether a SuperLink answers on this port of loopback, with a certificate of our own authority if there is one."""
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if certificates is not None:
        handlers.append(urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=certificates / "ca.crt")))
    scheme = "http" if certificates is None else "https"
    try:
        with urllib.request.build_opener(*handlers).open(f"{scheme}://127.0.0.1:{port}/health", timeout=2):
            return True
    except (OSError, urllib.error.URLError):
        return False


def point_flwr_to(port: int, certificates: Path | None, home: Path) -> None:
    """Flower's own commands find the SuperLink, wherever its folder has been moved since the last time."""
    security = "insecure = true"
    if certificates is not None:
        security = f"root-certificates = {json.dumps(str((certificates / 'ca.crt').resolve()), ensure_ascii=False)}"
    home.mkdir(exist_ok=True)
    where = f'[superlink.{CONNECTION}]\naddress = "127.0.0.1:{port}"\n{security}\n'
    write_atomically(home / "config.toml", f'[superlink]\ndefault = "{CONNECTION}"\n\n{where}'.encode())


def main() -> int:
    parser = argparse.ArgumentParser(description="Wait until the SuperLink on this machine answers.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--certificates", type=Path, help="folder of ca.crt, if it speaks TLS")
    options = parser.parse_args()
    point_flwr_to(options.port, options.certificates, Path(os.environ["FLWR_HOME"]))
    end = time.monotonic() + START_SECONDS
    while not link_answers(options.port, options.certificates):
        if time.monotonic() > end:
            print(f"no SuperLink answers on port {options.port} of this machine: start it first", file=sys.stderr)
            return 1
        time.sleep(0.2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
