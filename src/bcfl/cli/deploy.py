"""A federation of real processes, here or on several machines."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import bcfl.cli.options as options
from bcfl.cli.options import argument, flag, option, positive, repeated, usable_folder
from bcfl.cli.run import folder_for, show

SECTIONS = "change one setting; sections: data, model, method, training, experiment, deploy"


@dataclass(frozen=True)
class Asked:
    """Which federation is asked for."""

    overrides: Annotated[tuple[str, ...], repeated("--set", options.SETTING, SECTIONS)] = ()
    config: options.ConfigFile = None
    clients: Annotated[
        int | None,
        option("N", "number of clients (default: deploy.num_clients, or 4)", positive),
    ] = None
    seed: options.Seed = None
    insecure: Annotated[bool, flag("--insecure", "no TLS and no keys; refused beyond this machine")] = False

    def settings(self, data_factory: str | None = None) -> tuple[Any, dict[str, Any]]:
        """The run's settings, and the terms of the federation."""
        if importlib.util.find_spec("flwr") is None:
            raise ValueError("bcfl deploy needs Flower: pip install 'bcfl[flower]'")
        from bcfl.deploy.terms import read_settings
        from bcfl.runs.problem import look_here

        look_here()
        return read_settings(self.config, self.overrides, self.clients, self.seed, data_factory)

    def site(
        self, folder: Path, num_clients: int, server: str | None, port: int | None, data_factory: str | None
    ) -> Any:
        """Where that federation's processes will listen."""
        from bcfl.deploy.folder import GATE_PORT, Site

        if server is None and not self.insecure:
            raise ValueError("--server must be given: the server's name or IP address as the clients reach it "
                             "(127.0.0.1 if all of them are on this machine)")  # fmt: skip
        if self.insecure and port is not None:
            raise ValueError("--port is the gate's, and --insecure goes without a gate; leave one of them out")
        host, gate_port = "127.0.0.1" if server is None else server, None if self.insecure else port or GATE_PORT
        return Site(folder, num_clients, host, gate_port=gate_port, insecure=self.insecure, data_factory=data_factory)


def local(*, asked: Asked, out: options.RunOut = None, follow: options.Follow) -> int:
    """Server, clients and a run on this machine, until it is done.

    examples:
      bcfl deploy local --set experiment.rounds=5
      bcfl deploy local settings.toml --clients 6 --out runs/deployed --set deploy.deadline=60
    """
    config, terms = asked.settings()
    from bcfl.deploy.processes import run_local
    from bcfl.deploy.terms import found_elsewhere

    for key, name in found_elsewhere(config).items():
        raise ValueError(f"{key} {name!r}: no such module is on this machine")
    how: dict[str, Any] = {"insecure": asked.insecure, "terms": terms}
    with folder_for(config, out) as path:
        return show(follow, lambda observers: run_local(config, terms["num_clients"], path, observers=observers, **how))


def init(
    *,
    folder: Annotated[Path, argument("DIR", "a new folder", read=usable_folder)],
    asked: Asked,
    server: Annotated[
        str | None,
        option("HOST", "the server's name or IP address as clients reach it; must be given, but with --insecure"),
    ] = None,
    port: Annotated[
        int | None,
        option("N", "the server's port for clients, up to 65535 (default: 9093); not with --insecure", positive),
    ] = None,
    data_factory: Annotated[
        str | None, option("MODULE:FUNCTION", "returns a client's data, on its own machine")
    ] = None,
) -> int:
    """A folder to be taken to several machines.

    It holds settings, certificates, keys and scripts.

    examples:
      bcfl deploy init federation --clients 3 --server fl.example.org --data-factory mydata:load --set model.name=mlp
    """
    config, terms = asked.settings(data_factory)
    from bcfl.console import console_for
    from bcfl.deploy import folder as parts
    from bcfl.deploy.terms import found_elsewhere

    site = asked.site(folder, terms["num_clients"], server, port, data_factory)
    parts.init(site, config, terms)
    console_for().print(f"{folder} holds a federation of {site.num_clients} clients; {folder}/README.md tells what "
                        "goes where", soft_wrap=True)  # fmt: skip
    for key, name in found_elsewhere(config, data_factory).items():
        place = "in client-N/" if key == "--data-factory" else "in server/ and in every client-N/"
        console_for().print(f"{key} {name} is not on this machine: its module must be beside start.sh {place}")
    return 0
