"""The report: one HTML file with everything in it, made for reading rather than for searching."""

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np

from bcfl.report import plots, require
from bcfl.report.layout import Columns, client_graph, columns, marks
from bcfl.report.reading import Group, Run, group_runs, understood, unfinished_runs
from bcfl.report.tables import cells, said_beside, shown_measures, written
from bcfl.runs.settings import parse_config

MOST_CELLS = 500_000  # numbers in all heat maps of a page together: about two megabytes
MOST_NAMED = 5  # unfinished runs that are told by name
MOST_DETAILED = 16  # runs whose associations are shown one by one
# The browser itself then refuses whatever would go to the network.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


@dataclass(frozen=True)
class Panel:
    """One figure with its title and the sentence that says what to see."""

    name: str
    title: str
    caption: str
    figure: Any  # Plotly data and layout, or the client graph's nodes and edges
    kind: str = "plot"  # plot, heat (with a slider over rounds) or graph
    wide: bool = False


def report(runs: Sequence[Run]) -> str:
    """The page of these runs; runs that differ only in their seed are shown together."""
    require("plotly")
    from plotly.offline import get_plotlyjs

    groups = group_runs(runs)
    detailed = [group.representative for group in groups][:MOST_DETAILED]
    first = max(range(len(detailed)), key=lambda i: detailed[i].last("accuracy") or 0)  # the one to look at
    overview = _overview_panels(groups)
    details = [_run_panels(run, str(i), MOST_CELLS // len(detailed)) for i, run in enumerate(detailed)]
    figures = {panel.name: panel.figure for panel in [*overview, *(p for panels in details for p in panels)]}
    title = _title(groups)
    body = [
        _header(title, groups),
        _headline(groups),
        _section("learning", "How well it learns", "".join(map(_figure, overview))) if overview else "",
        _chooser(groups, detailed, first),
        *(_run_section(i, i == first, panels) for i, panels in enumerate(details)),
        _section("repeat", "How to repeat it", "".join(map(_repeat, detailed)), flow=True),
    ]
    own = files("bcfl.report")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{html.escape(title)} · bcfl report</title><style>{own.joinpath('page.css').read_text()}</style>"
        f"</head><body><main>{''.join(body)}</main><footer>Made by bcfl. This page is complete in itself: it asks "
        f'nothing of any network.</footer><script type="application/json" id="figures">{_embedded(figures)}</script>'
        f"<script>{get_plotlyjs()}</script><script>{own.joinpath('page.js').read_text()}</script></body></html>\n"
    )


def _embedded(figures: dict[str, Any]) -> str:
    """JSON in which no text can be taken for a tag, or for the start of a comment."""
    return json.dumps(figures, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _overview_panels(groups: Sequence[Group]) -> list[Panel]:
    begun = [group for group in groups if group.counted]
    if not any(run.last("accuracy") is not None for group in begun for run in group.runs):
        return []
    several = any(len(group.counted) > 1 for group in begun)
    band = " The line is the mean over the seeds, the band one standard deviation." if several else ""
    panels = [
        Panel("accuracy", "Accuracy by round", "Higher is better: the share of all clients' own test examples that "
              "their models get right." + band, plots.by_round(begun, "accuracy", "accuracy")),
        Panel("macro_f1", "Macro F1 by round", "The same for the F1 score, which counts rare classes as much as common "
              "ones." + band, plots.by_round(begun, "macro_f1", "macro F1")),
    ]  # fmt: skip
    if any(run.last("ari") is not None for group in begun for run in group.runs):
        caption = "At 1 the clusters are exactly the true groups, at 0 no better than chance (adjusted Rand index)."
        figure = plots.by_round(begun, "ari", "adjusted Rand index")
        panels.append(Panel("agreement", "Agreement with the true groups", caption + band, figure))
    if len(begun) > 1:
        panels.append(Panel("accuracy_by_work", "Accuracy for the same work", "Further left is cheaper: a method that "
                      "carries several hypotheses trains more in a round, so this compares at equal training effort.",
                      plots.by_work(begun, "accuracy", "accuracy")))  # fmt: skip
    return panels


def _run_panels(run: Run, suffix: str, most_cells: int) -> list[Panel]:
    """What one run has to show."""
    if not run.rounds:
        return []
    lines = columns(run)
    panels = []
    if run.clusters_clients:
        panels += [_graph_panel(run), _association_panel(run, lines, most_cells)]
        if run.carries_hypotheses or marks(run):
            panels.append(Panel("trellis", "Which story descends from which", _trellis_caption(run), plots.descent(run),
                                wide=True))  # fmt: skip
        panels.append(Panel("certainty", "How sure, and who still moves", _certainty_caption(run),
                            plots.certainty(run), wide=True))  # fmt: skip
    if run.last("calibration") is not None:
        error = f"{run.last('ece'):.3f}"
        panels.append(Panel("calibration", "Calibration", "On the dashed line a model is right as often as it says; "
                      f"below it, it is overconfident. The expected calibration error is {error}.",
                      plots.reliability(run)))  # fmt: skip
        panels.append(Panel("client_accuracy", "Accuracy of each client", _client_caption(run),
                            plots.client_accuracy(run, lines)))  # fmt: skip
    if run.train_labels is not None:
        panels.append(Panel("labels", "What the clients hold", _label_caption(run), plots.labels(run, lines)))
    panels.append(Panel("work", "Work and traffic", _work_caption(run), plots.work(run)))
    return [Panel(f"{p.name}-{suffix}", p.title, p.caption, p.figure, p.kind, p.wide) for p in panels]


def _graph_panel(run: Run) -> Panel:
    graph = client_graph(run)
    colours = "colours are the true groups" if run.group is not None else "colours are the final clusters"
    aside = " Those that change group later keep the colour of their first." if run.drift else ""
    if len(graph.client) < run.num_clients:
        aside += f" {len(graph.client)} of {run.num_clients} clients are drawn."
    if graph.dropped:
        aside += f" Of {len(graph.edges) + graph.dropped:,} edges the strongest {len(graph.edges):,} are drawn."
    data = {
        "client": graph.client.tolist(),
        "colour": graph.colour_of.tolist(),
        "place": plots.rounded(graph.place),
        "edge": [[a, b, p] for (a, b), p in zip(graph.edges.tolist(), plots.rounded(graph.strength), strict=True)],
        "rounds": len(run.rounds),
    }
    caption = (
        f"The thicker a line, the longer two clients shared a cluster over the run; {colours}, so lines between "
        f"colours are doubts or mistakes. Point at a client, or tap it, to see its own lines.{aside}"
    )
    return Panel("graph", "Who belongs together", caption, data, kind="graph")


def _association_panel(run: Run, lines: Columns, most_cells: int) -> Panel:
    figure, rounds, frames = plots.association(run, lines, most_cells)
    who = "the mean of several clients" if lines.thinned else "a client"
    caption = (
        f"Each column is {who}, and the strong colour the cluster it belongs to; shades in between are doubt. Move the "
        "slider to see it settle."
    )
    return Panel("association", "Who is where, round by round", caption,
                 {"figure": figure, "rounds": rounds, "frames": frames}, kind="heat")  # fmt: skip


def _trellis_caption(run: Run) -> str:
    best = run.stories[-1].weight[0]
    text = (
        "Each column is a round and each dot a hypothesis, the larger the heavier; the thick line is the ancestry of "
        f"the final best one (weight {best:.2f}), crosses are stories that were given up."
    )
    return f"{text} Signs above a dot tell what happened then: point at one, or tap it." if marks(run) else text


def _certainty_caption(run: Run) -> str:
    last_move = max((record["round"] for record in run.rounds if record["changes"]), default=0)
    still = f"nobody has moved since round {last_move}" if last_move else "nobody has ever moved"
    if last_move == len(run.rounds):
        still = "clients still move"
    return f"Falling entropy means that the server makes up its mind; at the end {_doubt_left(run)}, and {still}."


def _doubt_left(run: Run) -> str:
    mean = run.entropy[-1].mean()
    if mean < 0.0005:
        return "everybody's place is certain"
    never = int((run.stories[-1].assignment[0] < 0).sum())
    aside = f" ({never} of {run.num_clients} were never placed and may be anywhere)" if never else ""
    return f"{mean:.3f} nats of doubt are left per client{aside}"


def _client_caption(run: Run) -> str:
    known = [value for value in run.last("client_accuracy") if value is not None]
    return (
        f"A fair federation has its clients close to the dashed mean: the worst has {min(known):.3f}, "
        f"the best {max(known):.3f}."
    )


def _label_caption(run: Run) -> str:
    counts = run.train_labels
    assert counts is not None
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    distance = np.abs(share - counts.sum(0) / counts.sum()).sum(1).mean() / 2  # mean total variation
    if distance < 0.15:
        return (
            "All clients hold nearly the same mix of classes. Whether the examples of a class, or what is called by "
            "its name, differ between clients, these numbers cannot tell."
        )
    return (
        f"Clients hold different classes: on average {distance:.0%} of a client's examples would have to be of another "
        "class to match the whole."
    )


def _work_caption(run: Run) -> str:
    sent = run.work("parameters_down").sum() + run.work("parameters_up").sum()
    steps, spent = int(run.work("local_steps").sum()), sum(run.seconds)
    return (
        f"What a round costs; over the run {steps:,} local steps and {_short(sent)} model numbers sent "
        f"(about {_short(sent * 4)}B), in {spent:,.0f} s here."
    )


def _short(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} "


def _title(groups: Sequence[Group]) -> str:
    data = {str(run.manifest.get("dataset", "own data")) for group in groups for run in group.runs}
    what = groups[0].label if len(groups) == 1 else f"{len(groups)} methods"
    return f"{what} on {', '.join(sorted(data))}"


def _header(title: str, groups: Sequence[Group]) -> str:
    runs = [run for group in groups for run in group.runs]
    first = runs[0]
    facts = [f"{first.num_clients} clients"]
    if "partition" in first.manifest:
        facts.append(f"partition {first.manifest['partition']}")
    if first.group is not None:
        facts.append(f"{len(np.unique(first.group))} true groups")
    facts.append(f"{first.config['experiment']['rounds']} rounds")
    facts.append(f"{len(runs)} runs" if len(runs) > 1 else f"seed {first.seed}")
    return (
        f'<header><p class="eyebrow">bcfl report</p><h1>{html.escape(title)}</h1>'
        f'<p class="facts">{html.escape(" · ".join(facts))}</p><p class="lead">{html.escape(_lead(groups))}</p>'
        f"{_unfinished_note(groups)}</header>"
    )


def _unfinished_note(groups: Sequence[Group]) -> str:
    """Which runs are not complete, and whether they count."""
    unfinished = [run for group in groups for run in group.unfinished]
    if not unfinished:
        return ""
    told = [f"{run.path.name}: {len(run.rounds)} of {run.config['experiment']['rounds']} rounds" for run in unfinished]
    more = [f"{len(told) - MOST_NAMED} more"] if len(told) > MOST_NAMED else []
    said = "".join(f" {remark}." for remark in unfinished_runs(groups))
    return f'<p class="note">Not finished yet: {html.escape("; ".join(told[:MOST_NAMED] + more) + "." + said)}</p>'


def _lead(groups: Sequence[Group]) -> str:
    """What happened, in a sentence or two."""
    begun = [group for group in groups if group.counted]
    if not begun:
        return "No round is finished yet; make the report again when there is something to see."
    if len(begun) > 1:
        measure = shown_measures(begun)[0]
        if measure.key != "accuracy":
            return "The methods side by side."
        means = {group.label: (cells(group, [measure])[0] or (0.0, 0.0))[0] for group in begun}
        ranked = sorted(means, key=lambda label: means[label], reverse=True)
        best, worst = (f"{means[label]:.3f}" for label in (ranked[0], ranked[-1]))
        if not all(group.has_complete for group in begun):
            return f"So far {ranked[0]} has the highest mean accuracy, {best}; {ranked[-1]} the lowest, {worst}."
        return f"{ranked[0]} ends with the highest mean accuracy, {best}; {ranked[-1]} with the lowest, {worst}."
    run = begun[0].representative
    if not run.clusters_clients:
        return "There is nothing to associate here: this method has one model for all clients, or one for each."
    final = run.stories[-1].assignment[0]
    placed = final[final >= 0]  # without those that never took part
    who = f"{run.num_clients} clients" if len(placed) == len(final) else f"{len(placed)} of {run.num_clients} clients"
    used = len(np.unique(placed))
    text = f"After {len(run.rounds)} rounds the best hypothesis places {who} in {used} clusters"
    agreement = run.last("ari")
    if agreement is None:
        return text + "."
    found = "exactly the true groups" if agreement > 0.9999 else f"an agreement of {agreement:.2f} with the true groups"
    return f"{text}: {found}.{_drift_told(run)}"


def _drift_told(run: Run) -> str:
    """What became of clients whose true group changed, in a sentence."""
    if run.drift is None:
        return ""
    changed, found, waited = (run.drift[key] for key in ("changed", "found_again", "rounds_until_found"))
    speed = "" if waited is None else f", {waited:g} {'round' if waited == 1 else 'rounds'} after the change (median)"
    return (
        f" {changed} clients changed group in round {run.manifest['drift']['round']}; {found} of them were found with "
        f"their new one{speed}."
    )


HEADLINES = {
    "accuracy": "of the clients' own test examples are right",
    "macro_f1": "macro F1: rare classes count as much",
    "ari": "agreement with the true groups (1 is perfect)",
    "ece": "calibration error: 0 is honest",
    "false_switches": "of the clients at rest leave their group in a round",
    "rounds_until_found": "rounds until a client that changed group is found (median)",
}


def _headline(groups: Sequence[Group]) -> str:
    measures = shown_measures(groups)
    if not any(group.counted for group in groups):
        return ""
    if len(groups) == 1:
        seeds = len(groups[0].counted)
        both = [(m, c) for m, c in zip(measures, cells(groups[0], measures), strict=True) if m.key in HEADLINES and c]
        tiles = [
            f'<div class="tile"><b>{c[0]:.3f}{f"<small> ± {c[1]:.3f}</small>" if seeds > 1 else ""}</b>'
            f"<span>{HEADLINES[m.key]}</span></div>"
            for m, c in both
        ]
        return f'<div class="tiles">{"".join(tiles)}</div>'
    if len({run.config["experiment"]["rounds"] for group in groups for run in group.runs}) == 1:
        measures = [m for m in measures if m.key != "rounds"]  # said once, above
    quality = [m for m in measures if m.form == ".3f"]
    best = {
        m.key: (min if m.lower_is_better else max)(c[0] for g in groups if (c := cells(g, [m])[0])) for m in quality
    }
    head = "".join(f"<th>{html.escape(m.title)}</th>" for m in measures)
    rows = []
    for index, group in enumerate(groups):
        row = cells(group, measures)
        texts = [
            f"<td{' class=best' if c and m.key in best and c[0] == best[m.key] else ''}>"
            f"{written(c, m, len(group.counted))}</td>"
            for c, m in zip(row, measures, strict=True)
        ]
        swatch = f'<i class="swatch" style="background:var({plots.colour(index)})"></i>'
        rows.append(
            f"<tr><th>{swatch}{html.escape(group.label)}</th>{''.join(texts)}<td>{len(group.counted)}</td></tr>"
        )
    said = "".join(f" {html.escape(remark)}." for remark in said_beside(groups))
    return (
        f'<div class="scroll"><table><thead><tr><th>method</th>{head}<th>seeds</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        '<p class="under">Mean ± standard deviation over seeds; the best of each column is bold. Agreement is the '
        f"adjusted Rand index of the assignment with the true groups.{said}</p>"
    )


def _chooser(groups: Sequence[Group], detailed: Sequence[Run], first: int) -> str:
    if len(groups) == 1 and len(groups[0].runs) == 1:
        return ""
    options = "".join(
        f'<option value="{i}"{" selected" if i == first else ""}>{html.escape(group.label)}, seed {run.seed}</option>'
        for i, (group, run) in enumerate(zip(groups, detailed, strict=False))
    )
    left_out = f" The first {MOST_DETAILED} methods are offered." if len(groups) > MOST_DETAILED else ""
    return (
        '<div class="chooser"><label for="run">Look closer at one run</label>'
        f'<select id="run">{options}</select><p class="under">One run stands for each method.{left_out}</p></div>'
    )


def _run_section(index: int, shown: bool, panels: Sequence[Panel]) -> str:
    parts = (
        ("who", "Who belongs where", ("graph", "association", "trellis", "certainty")),
        ("good", "Can it be trusted", ("calibration", "client_accuracy")),
        ("cost", "What it is made of", ("labels", "work")),
    )
    sections = []
    for name, title, wanted in parts:
        own = [panel for panel in panels if panel.name.rsplit("-", 1)[0] in wanted]
        if own:
            sections.append(_section(f"{name}-{index}", title, "".join(map(_figure, own))))
    nothing = "" if panels else '<p class="note">This run has not finished a round yet.</p>'
    return f'<div class="run" data-run="{index}"{"" if shown else " hidden"}>{nothing}{"".join(sections)}</div>'


def _section(name: str, title: str, content: str, flow: bool = False) -> str:
    return (
        f'<section id="{name}"><h2>{html.escape(title)}</h2><div class="{"flow" if flow else "grid"}">{content}</div>'
        "</section>"
    )


def _figure(panel: Panel) -> str:
    caption = html.escape(panel.caption)
    control = ""
    if panel.kind == "heat":
        last = len(panel.figure["rounds"]) - 1
        control = (
            f'<div class="slider"><button type="button" aria-label="play">▶</button>'
            f'<input type="range" min="0" max="{last}" value="{last}" aria-label="round">'
            f"<output>round {panel.figure['rounds'][-1]}</output></div>"
        )
    if panel.kind == "graph":
        control = '<p class="told" aria-live="polite">&nbsp;</p>'
    shape = panel.name.rsplit("-", 1)[0]
    return (
        f'<figure class="{"wide " if panel.wide else ""}f-{shape}"><h3>{html.escape(panel.title)}</h3>'
        f'<div class="{panel.kind}" data-figure="{panel.name}" role="img" aria-label="{caption}"></div>{control}'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _repeat(run: Run) -> str:
    """The settings as a TOML file, the command that uses it, and what the run was made with."""
    own_data = run.config["data"]["factory"] is not None or run.config["model"]["factory"] is not None
    if "sha256" not in run.manifest:
        how = (
            "<p>The clients of this federation kept their data to themselves, so it can only be repeated with them: "
            "with these settings and the same clients, each with its data.</p>"
        )
    elif own_data:
        how = (
            "<p>This run was given its own clients or model from Python. With the same ones, these settings and the "
            "same seed give the same numbers.</p>"
        )
    else:
        how = (
            "<p>Save these settings as <code>settings.toml</code>; the seed is part of them, and the same settings "
            "give the same numbers.</p><pre>bcfl run settings.toml --out again</pre>"
        )
    made_with = ", ".join(f"{name} {version}" for name, version in run.environment.items() if name != "before")
    made_with += " (begun with others)" if "before" in run.environment else ""
    split = run.manifest.get("sha256")
    fingerprint = f" The split of the data has the fingerprint {split[:16]}." if split else ""
    return (
        f"<details><summary>{html.escape(run.method)}, seed {run.seed}</summary>{how}"
        f"<pre>{html.escape(to_toml(run.config))}</pre>"
        f'<p class="under">Made with {html.escape(made_with)}.{html.escape(fingerprint)}</p></details>'
    )


def to_toml(config: dict[str, dict[str, Any]]) -> str:
    """The settings as TOML, which has no word for what is not set (None): it is left out, or "none" where leaving it
    out would mean a default."""
    given = {
        section: {key: value for key, value in values.items() if value is not None}
        for section, values in config.items()
    }
    known = understood(given)
    defaults = parse_config(known).all_settings()
    sections = []
    for section, values in config.items():
        on_by_default = {key for key, value in defaults[section].items() if section in known and value is not None}
        switched_off = {key: "none" for key, value in values.items() if value is None and key in on_by_default}
        rows = [
            f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in (given[section] | switched_off).items()
        ]
        sections.append("\n".join([f"[{section}]", *rows]))
    return "\n\n".join(sections) + "\n"
