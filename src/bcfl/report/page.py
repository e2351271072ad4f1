"""The report: one HTML file with everything in it, made for reading rather than for searching."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bcfl.likelihood.measures import TITLES
from bcfl.report import captions, charts
from bcfl.report.drawing import client_graph
from bcfl.report.reading import Group, Run, group_runs, understood
from bcfl.report.tables import Measure, cells, leading, said_beside, shown_measures, written
from bcfl.runs.settings import as_kept, parse_config
from bcfl.runs.sites import Sites, per_site

MOST_CELLS = 500_000  # numbers in all heat maps of a page together: about two megabytes
MOST_DETAILED = 16  # runs whose associations are shown one by one
PARTS = (
    ("who", "Who belongs where", ("graph", "association", "trellis", "certainty")),
    ("good", "Can it be trusted", ("calibration", "client_measure")),
    ("cost", "What it is made of", ("labels", "work")),
)
WIDE = ("trellis", "certainty")
HEADLINES = {
    **dict.fromkeys(
        ("auc", "rmse", "deviance", "concordance", "mean_iou", "perplexity"), "over the clients' own test examples"
    ),
    "accuracy": "of the clients' own test examples are right",
    "macro_f1": "macro F1: rare classes count as much",
    "ari": "agreement with the true groups (1 is perfect)",
    "ece": "calibration error: 0 is honest",
    "false_switches": "of the clients at rest leave their group in a round",
    "rounds_until_found": "rounds until a client that changed group is found (median)",
}


MOST_SITES = 200  # rows of a table that anybody reads


@dataclass(frozen=True)
class Figure:
    """A chart or the client graph, with its title and the sentence that says what to see."""

    name: str  # with the number of its run, if it is of one
    shape: str  # without
    caption: str
    content: Any  # a chart, or the client graph's nodes and edges

    @property
    def title(self) -> str:
        return captions.TITLES[self.shape]

    @property
    def wide(self) -> bool:
        return self.shape in WIDE

    @property
    def rounds(self) -> list[int]:
        """Those that a slider moves through; none without one."""
        return self.content[0].rounds if self.shape == "association" else []


def report(runs: Sequence[Run]) -> str:
    """The page of these runs; runs that differ only in their seed are shown together."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    groups = group_runs(runs)
    detailed = [group.representative for group in groups][:MOST_DETAILED]
    learning = _learning(groups)
    details = [_details(run, index, MOST_CELLS // len(detailed)) for index, run in enumerate(detailed)]
    figures = {figure.name: figure.content for figure in [*learning, *(one for run in details for one in run)]}
    loader = PackageLoader("bcfl.report", ".")
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    choices = [f"{group.label}, seed {run.seed}" for group, run in zip(groups, detailed, strict=False)]
    return pages.get_template("page.html").render(
        captions=captions,
        groups=groups,
        table=_table(groups),
        tiles=_tiles(groups),
        learning=learning,
        choices=choices if len(runs) > 1 else [],
        left_out=len(groups) > MOST_DETAILED,
        most_detailed=MOST_DETAILED,
        first=max(range(len(detailed)), key=lambda i: detailed[i].last("accuracy") or 0),  # the one to look at
        details=[_in_parts(figures) for figures in details],
        sites=[_sites(run) for run in detailed],
        repeat=[_how_to_repeat(run) for run in detailed],
        data=_embedded(figures),
    )


def _embedded(figures: dict[str, Any]) -> str:
    """JSON in which no text can be taken for a tag, or for the start of a comment."""
    plain = json.dumps(figures, separators=(",", ":"), allow_nan=False, default=_as_object)
    return plain.replace("<", "\\u003c")


def _as_object(part: Any) -> dict[str, Any]:
    """A part of a chart without what is not set."""
    return {key: value for key, value in vars(part).items() if value is not None and value != ""}


def _learning(groups: Sequence[Group]) -> list[Figure]:
    """What the runs are compared by, round by round."""
    begun = [group for group in groups if group.counted]
    measured = {
        key for key in ("accuracy", "ari") for group in begun for run in group.runs if run.last(key) is not None
    }
    found = {}
    if "accuracy" in measured:
        found["accuracy"] = charts.by_round(begun, "accuracy", "accuracy")
    leads = {leading(run) for group in begun for run in group.runs} - {"accuracy"}
    if len(leads) == 1 and any(run.last(name := next(iter(leads))) is not None for g in begun for run in g.runs):
        found["lead"] = charts.by_round(begun, name, TITLES[name])
    if not found:
        return []
    if "accuracy" in measured and not leads:
        found["macro_f1"] = charts.by_round(begun, "macro_f1", "macro F1")
    if "ari" in measured:
        found["agreement"] = charts.by_round(begun, "ari", "adjusted Rand index")
    if len(begun) > 1 and "accuracy" in found:
        found["accuracy_by_work"] = charts.by_work(begun, "accuracy", "accuracy")
    band = captions.BAND if any(len(group.counted) > 1 for group in begun) else ""
    return [Figure(name, name, captions.CURVES[name] + band, chart) for name, chart in found.items()]


def _details(run: Run, number: int, most_cells: int) -> list[Figure]:
    """What one run has to show."""
    if not run.rounds:
        return []
    shown = charts.shown_rounds(run, most_cells)
    figures = [
        Figure(f"{name}-{number}", name, captions.caption(name, run), chart)
        for name, chart in charts.of_run(run, shown).items()
    ]
    return [_graph(run, number), *figures] if run.clusters_clients else figures


def _graph(run: Run, number: int) -> Figure:
    laid = client_graph(run)
    strength = charts.rounded(laid.strength)
    content = {
        "client": [run.name_of(client) for client in laid.client.tolist()],
        "colour": laid.colour_of.tolist(),
        "place": charts.rounded(laid.place),
        "edge": [[a, b, p] for (a, b), p in zip(laid.edges.tolist(), strength, strict=True)],
    }
    return Figure(f"graph-{number}", "graph", captions.graph(run, laid), content)


def _sites(run: Run) -> list[list[str]]:
    """A table of the clients, its titles first: none where they have no names, or there are too many to read."""
    names = run.manifest.get("names")
    if names is None or len(names) > MOST_SITES or not run.associations:
        return []
    assignment = torch.from_numpy(run.associations[-1].assignment[0])
    last: dict[str, Any] = next((record for record in reversed(run.rounds) if "client_examples" in record), {})
    rows = run.manifest.get("num_train")
    sites = Sites(tuple(names), None if rows is None else tuple(rows))
    return per_site(sites, assignment, torch.from_numpy(run.marginals[-1]), last).rows


def _in_parts(figures: Sequence[Figure]) -> list[tuple[str, str, list[Figure]]]:
    parts = [(name, title, [one for one in figures if one.shape in wanted]) for name, title, wanted in PARTS]
    return [part for part in parts if part[2]]


def _tiles(groups: Sequence[Group]) -> list[tuple[str, str, str]]:
    """The few numbers that matter of a single method: mean, deviation over seeds, and what it is."""
    if len(groups) > 1 or not groups[0].counted:
        return []
    (group,), measures = groups, shown_measures(groups)
    several = len(group.counted) > 1
    return [
        (f"{cell[0]:.3f}", f" ± {cell[1]:.3f}" if several else "", HEADLINES[measure.key])
        for measure, cell in zip(measures, cells(group, measures), strict=True)
        if measure.key in HEADLINES and cell
    ]


def _table(groups: Sequence[Group]) -> dict[str, Any] | None:
    """The numbers of several methods, a row each, the best of each column marked."""
    if len(groups) == 1 or not any(group.counted for group in groups):
        return None
    measures = shown_measures(groups)
    if len({run.config["experiment"]["rounds"] for group in groups for run in group.runs}) == 1:
        measures = [measure for measure in measures if measure.key != "rounds"]  # said once, above
    rows = [cells(group, measures) for group in groups]
    best = [_best(measure, [row[column] for row in rows]) for column, measure in enumerate(measures)]
    return {
        "titles": [measure.title for measure in measures],
        "rows": [
            (group.label, [_cell(*one, len(group.counted)) for one in zip(row, measures, best, strict=True)],
             len(group.counted))
            for group, row in zip(groups, rows, strict=True)
        ],
        "said": said_beside(groups),
    }  # fmt: skip


def _best(measure: Measure, column: Sequence[tuple[float, float] | None]) -> float | None:
    if measure.form != ".3f":  # a cost
        return None
    return (min if measure.lower_is_better else max)(cell[0] for cell in column if cell)


def _cell(cell: tuple[float, float] | None, measure: Measure, best: float | None, seeds: int) -> tuple[str, bool]:
    return written(cell, measure, seeds), cell is not None and cell[0] == best


def _how_to_repeat(run: Run) -> dict[str, Any]:
    """The settings as a TOML file, what the run was made with, and whose data it needs."""
    factories = [run.config[section]["factory"] for section in ("data", "model")]
    versions = [f"{name} {version}" for name, version in run.environment.items() if name != "before"]
    return {
        "label": f"{run.method}, seed {run.seed}",
        "federated": "sha256" not in run.manifest,
        "from_python": any(factory is not None for factory in factories),
        "toml": to_toml(run.config),
        "made_with": ", ".join(versions) + (" (begun with others)" if "before" in run.environment else ""),
        "split": (run.manifest.get("sha256") or "")[:16],
    }


def to_toml(config: dict[str, dict[str, Any]]) -> str:
    """The settings as TOML, which has no word for what is not set (None): it is left out, or "none" where leaving it
    out would mean a default."""
    config = {section: dict(values) for section, values in as_kept(config).items()}
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
