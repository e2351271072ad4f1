"""The texts that `bcfl deploy init` writes for people and for systemd."""

# A SuperNode ends when its SuperLink has forgotten it: systemd starts it again.
UNIT = """\
# For /etc/systemd/system; expects this folder in /opt/bcfl/{folder} and bcfl in /opt/bcfl/venv.
[Unit]
Description=bcfl {what}
After=network-online.target{after}
Wants=network-online.target

[Service]
ExecStart=/opt/bcfl/{folder}/{script}
WorkingDirectory=/opt/bcfl/{folder}
ReadWritePaths=/opt/bcfl/{folder}
User=bcfl
Environment=PATH=/opt/bcfl/venv/bin:/usr/bin:/bin
UMask=0077
NoNewPrivileges=yes
PrivateTmp=yes
PrivateDevices=yes
ProtectSystem=strict
ProtectHome=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes
RestrictSUIDSGID=yes
Restart=always
RestartSec=5

[Install]
WantedBy=multi-user.target
"""

README = """\
# A federation of {num_clients} clients

Written by `bcfl deploy init`. The server is `{host}`; clients reach it on port {port}.

| folder | goes to | holds |
|---|---|---|
| `server/` | the server | certificate and private key of the server, the clients' public keys |
| `app/` | the server, beside `server/` | the settings of the run: `app/pyproject.toml` |
| `client-0/` … `client-{last}/` | one client each | the certificate authority, this client's private key |
| `ca.key` | nowhere: keep it offline | signs further server certificates |

A private key belongs to one machine only: move it, do not copy it, over a channel you trust.

## On every machine
    python3 -m venv venv && . venv/bin/activate
    pip install --constraint constraints.txt '.[flower]'    # in a copy of bcfl's repository

The same version everywhere. No machine needs a way out to the internet afterwards.

## On the server
    cd server
    ./start.sh                                    # leave it running, or install the units (below)
    ./gate.sh                                     # likewise: the door for clients of other machines
    for key in nodes/*.pub; do ./register.sh "$key"; done

Open port {port} for the clients, and nothing else. The SuperLink itself listens on loopback only, because whoever
reaches its control interface may start runs, that is, code on every client. The gate lets only the interface for nodes
through.

## On each client
    client-0/start.sh                             # leave it running, or install the unit

Where its data come from: a function of your own on that machine, without arguments, that returns `(x, y)` or
`(x, y, x_test, y_test)`. Put `mydata.py` beside `start.sh` and add `data-factory="mydata:load"` to its --node-config.
Without one, the named data set of the settings is cut into clients and this client takes its part: a trial run.

## Start a run, on the server
    ./run.sh

Results are in `server/run/`, as of any bcfl run (`bcfl resume` is for simulated runs only). If the run stops, because
the server was switched off or too few clients answered, start it again in the same way: it goes on from its last round.
For a new run with other settings change `app/pyproject.toml`, and `deploy.out` with it.

## As services
Put the folders into /opt/bcfl, install bcfl into /opt/bcfl/venv, make a user `bcfl` that owns them, and

    cp server/*.service /etc/systemd/system/      # on a client: client-0/bcfl-client.service
    systemctl daemon-reload && systemctl enable --now bcfl-server bcfl-gate
"""
