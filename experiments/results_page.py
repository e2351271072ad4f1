"""The page of results: what was measured, beside the paper's numbers, at equal rounds and at equal client work."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import combinations
from statistics import fmean, stdev

from batch_statistics import as_published, pointer
from beyond_page import Predicted, beyond
from measured import (
    ENOUGH_SEEDS,
    MEASURES,
    STATED_ROUNDS,
    STATED_STEPS,
    Draw,
    Paper,
    Printed,
    Problem,
    Record,
    Row,
    by_problem,
    client_work,
    clusters_of,
    holm,
    last_within,
    main_clusters,
    paired_gaps,
    paired_p,
    paper_key,
    paper_numbers,
    rank,
    rows_by_setting,
    rows_of,
    settings_of,
    tested_problems,
    with_clusters,
    work_of,
)
from reasons import Reason, reason_of
from standing import at_a_glance, few_seeds, in_short, shortfall
from tables import show, table

from bcfl.client.trainer import Training
from bcfl.data.partition import parse_specification
from bcfl.methods import make_method, remarks
from bcfl.runs.sweep import text_of, title_of

LEVEL = 0.05
TABLES = {"table1": "Table 1", "table2": "Table 2"}  # as the paper's rows name them; the study of K has its own
TOO_FEW_SEEDS = "fewer than three common seeds, so no order is claimed"
STUDIES = (
    "Tested on a fifth of the clients' training data, which is kept from training (`data.validation = 0.2`); test data "
    "are never looked at. The files are `experiments/defaults-*.toml`. The default is in bold."
)


def page(
    records: Sequence[Record],
    paper_rows: Sequence[Mapping[str, str]],
    reasons: Sequence[Reason],
    preface: str,
    pictures: str = "",
    left: Sequence[str] = (),
    predictive: Predicted = (),
    newcomers: Predicted = (),
    batch_statistics: Predicted = (),
) -> str:
    """The whole page, in Markdown, without its title."""
    paper = paper_numbers(paper_rows)
    tested = [record for record in records if not record["config"]["data"]["validation"]]
    studied = [record for record in records if record["config"]["data"]["validation"]]
    problems = tested_problems(records)
    rows_at = rows_by_setting(problems, paper)
    tables = {title: settings_of(paper_rows, name) for name, title in TABLES.items()}
    introduction, _, how = preface.strip().partition("\n\n")
    lines = [introduction, "", *at_a_glance(tables, paper, rows_at, batch_statistics), *pointer(batch_statistics)]
    lines += [pictures.strip(), ""] if pictures else []
    lines += in_short(paper, rows_at, batch_statistics)
    lines += ["## How it was measured", "", how, ""] if how else []
    known = {name for name, _, _ in paper}
    for problem, own in problems.items():
        if problem[0] not in known and any(record["result"]["method"] == "bcfl-auto" for record in own):
            continue  # made for the question of how many clusters there are, and told there
        clusters = main_clusters(problem, own, paper)
        lines += section(problem, clusters, rows_of(with_clusters(own, clusters)), paper, reasons)
    for problem, own in problems.items():
        lines += sensitivity(problem, own, paper, reasons)
    lines += as_published(batch_statistics, paper)
    lines += [*beyond(tested, paper, predictive, newcomers), *defaults(studied), *left]
    return "\n".join(lines).rstrip() + "\n"


def section(
    problem: Problem, clusters: int | None, rows: list[Row], paper: Paper, reasons: Sequence[Reason]
) -> list[str]:
    """One data set: at equal rounds, where it is below the paper's and why, which order is sure, at equal work."""
    key = paper_key(problem, clusters)
    printed = paper.get(key, {})
    order = list(printed)
    rows = sorted(rows, key=lambda row: (order.index(row.method) if row.method in order else len(order), row.label))
    heading = ", ".join(problem)
    missing = [method for method in printed if method not in {row.method for row in rows}]
    lines = [f"## {heading}" + (f", K = {clusters}" if clusters else ""), "", "At equal rounds:", ""]
    lines += [*equal_rounds(rows, printed), ""]
    lines += [f"{remark}.\n" for remark in remarks(row.method for row in rows)]
    lines += [f"Rows of the paper that have not been run: {', '.join(missing)}.", ""] if missing else []
    lines += below_paper(heading, rows, printed, reasons)
    if printed:
        lines += published_budget(rows, printed, parse_specification(key[1], 0.0, (1, 0)).num_clients)
    return [*lines, *order_of_methods(rows), "", *equal_work(rows)]


def equal_rounds(rows: Sequence[Row], printed: Mapping[str, Mapping[str, Printed]]) -> list[str]:
    """One row a method, beside the paper's where it has any."""
    beside = ["paper"] if printed else []
    columns = ["method", *(title for measure in MEASURES.values() for title in (measure, *beside)), "agreement"]
    columns += ["accuracy, mean of the last 10 rounds", "steps per client and round", "seeds"]
    columns += [f"paper's {title} first reached" for title in MEASURES.values()] if printed else []
    lines = []
    for row in rows:
        theirs, ari, lately = printed.get(row.method, {}), row.finals("ari"), row.lately("accuracy")
        cells = [row.label]
        for key in MEASURES:
            cells += [show(row.finals(key)), *([str(theirs.get(key, ""))] if printed else [])]
        steps = row.spent("local_steps")[-1] / row.runs[0]["result"]["rounds"]
        cells += [show(ari) if ari else "", show(lately) if lately else "", f"{steps:.1f}", str(len(row.runs))]
        cells += [_reached(row, key, theirs.get(key)) for key in MEASURES] if printed else []
        lines.append(cells)
    return table(columns, lines)


def _reached(row: Row, key: str, theirs: Printed | None) -> str:
    if theirs is None:
        return ""
    if not (found := row.rounds_at(key, theirs.value)):
        return "not reached"
    return f"round {found[0]}, {row.spent('local_steps')[found[0]]:,.0f} steps{_kept(row, key, found)}"


def _kept(row: Row, key: str, found: Sequence[int]) -> str:
    """In how many of the rounds that were tested from the first on it is reached, unless in all."""
    tested = [place for place in row.rounds_at(key, 0.0) if place >= found[0]]
    if len(found) == len(tested):
        return ""
    last = "" if found[-1] == tested[-1] else ", not in the last"
    return f", in {len(found)} of the {len(tested)} rounds from there on{last}"


def below_paper(
    problem: str,
    rows: Sequence[Row],
    printed: Mapping[str, Mapping[str, Printed]],
    reasons: Sequence[Reason],
    where: str = "",
) -> list[str]:
    """A sentence for each row that is below the paper's: by how much, whether that is within deviations, and why."""
    sentences = []
    for row in rows:
        parts = []
        for key, title in MEASURES.items():
            theirs, ours = printed.get(row.method, {}).get(key), row.finals(key)
            if theirs is None or not (gap := shortfall(ours, theirs)):
                continue
            spread = f"our own is {stdev(ours):.2f}" if len(ours) > 1 else "one seed here has none"
            if theirs.deviation is None:
                spread = f"the paper gives no standard deviation, {spread}"
            else:
                within = "within" if gap <= theirs.deviation else "more than"
                spread = f"{within} the paper's standard deviation, {spread}"
            parts.append(f"{title} {fmean(ours):.2f} is {gap:.2f} below the paper's {theirs} ({spread})")
        if parts:
            seeds = "1 seed" if len(row.runs) == 1 else f"{len(row.runs)} seeds"
            sentences.append(f"- {row.label}: {'; '.join(parts)}; {seeds}. {reason_of(problem, row, reasons)}")
    return [f"Below the paper's{where}:", "", *sentences, ""] if sentences else []


def published_budget(rows: Sequence[Row], printed: Mapping[str, Mapping[str, Printed]], num_clients: int) -> list[str]:
    """For rows to which the published code gives more local work than the paper states: with how much we reach it.

    `num_clients` are the paper's; where it has copies of clients, ours are fewer.
    """
    sentences = []
    for row in rows:
        hypotheses = re.fullmatch(r"bcfl-mh-(\d+)(-w)?", row.method)
        if hypotheses is None or row.method not in printed:
            continue
        # Its hypotheses are one object that every branch goes on training: M(C+M−1)/C times BCFL-G's steps.
        m = int(hypotheses[1])
        theirs = STATED_STEPS * STATED_ROUNDS * m * (num_clients + m - 1) / num_clients
        parts = []
        for key, title in MEASURES.items():
            number, spent = printed[row.method][key], row.spent("local_steps")
            if not (found := row.rounds_at(key, number.value)):
                parts.append(f"the paper's {title} is not reached with {spent[-1]:,.0f}")
                continue
            parts.append(
                f"the paper's {title} is reached with {spent[found[0]]:,.0f} ({spent[found[0]] / theirs:.0%} of that)"
                f"{_kept(row, key, found)}"
            )
        sentences.append(f"- {row.label}: about {theirs:,.0f} there; here {', '.join(parts)}.")
    head = "Steps per client, against those of the published code, which trains these rows more than the paper states:"
    return [head, "", *sentences, ""] if sentences else []


def order_of_methods(rows: Sequence[Row]) -> list[str]:
    """Which differences are sure: paired t-tests over common seeds, at least three, with Holm's correction."""
    pairs = [(a, b) for a, b in combinations(rows, 2) if work_of(a) == work_of(b)]
    lines = [
        f"- {title}{sure}" for key, title in MEASURES.items() if (sure := _sure(pairs, partial(Row.by_draw, key=key)))
    ]
    head = (
        "Order of the methods with the same local_steps and rounds (BCFL-MH trains several models a round, see the "
        "steps above), by paired t-tests over common seeds with Holm's correction:"
    )
    return [head, "", *lines] if lines else ["Fewer than three common seeds: no order is claimed."]


def _sure(pairs: Iterable[tuple[Row, Row]], values_of: Callable[[Row], Mapping[Draw, float]]) -> str:
    """Of which pairs it is sure, by these values of theirs by seed, that one is better; nothing without such pairs."""
    values = [((a, values_of(a)), (b, values_of(b))) for a, b in pairs]
    common = [(a, b) for a, b in values if len(a[1].keys() & b[1].keys()) >= ENOUGH_SEEDS]
    gaps = [paired_gaps(a[1], b[1]) for a, b in common]
    sure = []
    for (a, b), gap, p in zip(common, gaps, holm([paired_p(gap) for gap in gaps]), strict=True):
        if p < LEVEL:
            better, worse = (a, b) if fmean(gap) > 0 else (b, a)
            sure.append(f"{better[0].label} > {worse[0].label} ({f'p = {p:.3f}' if p >= 0.001 else 'p < 0.001'})")
    found = "; ".join(sure) or f"no difference with p < {LEVEL}, no order is claimed"
    return f" (pairs: {len(common)}): {found}." if common else ""


def equal_work(rows: Sequence[Row]) -> list[str]:
    """Each method where a client has worked as much as with FedAvg, and as with BCFL-G, by the end of their runs."""
    budgets = {}
    for name in ("fedavg", "bcfl-g"):
        if reference := min((row for row in rows if row.method == name), key=rank, default=None):
            budgets[reference.label] = fmean(client_work(run)[-1] for run in reference.runs)
    if not budgets:
        return ["At equal client work: neither FedAvg nor BCFL-G has been run yet, so there is no budget to set.", ""]
    columns = [
        "method",
        "steps trained per client",
        "examples scored per client",
        "work, in steps",
        "MB sent per client",
    ]
    columns += [f"at the work of {name} ({budget:,.0f} steps): accuracy, macro F1" for name, budget in budgets.items()]
    lines = []
    for row in rows:
        cells = [row.label, f"{row.spent('local_steps')[-1]:,.0f}", f"{row.spent('scored_examples')[-1]:,.0f}"]
        cells += [f"{fmean(client_work(run)[-1] for run in row.runs):,.0f}", f"{row.bytes_per_client / 1e6:,.0f}"]
        lines.append([*cells, *(_at_budget(row, budget) for budget in budgets.values())])
    return ["At equal client work:", "", *table(columns, lines), "", *_order_at(rows, budgets)]


def _order_at(rows: Sequence[Row], budgets: Mapping[str, float]) -> list[str]:
    """Which differences are sure where clients have worked alike: tested as at the end of the runs."""
    lines = []
    for name, budget in budgets.items():
        pairs = list(combinations([row for row in rows if _spends(row, budget)], 2))
        for key, title in MEASURES.items():
            if sure := _sure(pairs, partial(Row.by_draw_within, budget=budget, key=key)):
                lines.append(f"- at the work of {name}, {title}{sure}")
    head = "Order of the methods at equal client work, of those that have spent it, by the same tests:"
    return [head, "", *lines, ""] if lines else []


def _at_budget(row: Row, budget: float) -> str:
    at = [(run, last_within(run, budget)) for run in row.runs]
    fits = [(run, place) for run, place in at if place is not None]
    if len(fits) < len(at):
        return "more than that before its first test"
    values = (show([100 * run["by_round"][key][place - 1] for run, place in fits]) for key in MEASURES)
    rounds = fmean(place for _, place in fits)
    return f"{', '.join(values)} (round {rounds:.0f}{'' if _spends(row, budget) else ', all it ran'})"


def _spends(row: Row, budget: float) -> bool:
    """Whether the runs used the budget up: one that ends below it could have gone on, to what is not known."""
    return any(client_work(run)[-1] >= 0.99 * budget for run in row.runs)


def sensitivity(problem: Problem, records: Sequence[Record], paper: Paper, reasons: Sequence[Reason] = ()) -> list[str]:
    """Accuracy and macro F1 by K, with the paper's in brackets, where more than one K was run."""
    counts = sorted({clusters for clusters in map(clusters_of, records) if clusters is not None})
    if len(counts) < 2:
        return []
    heading, rows = ", ".join(problem), sorted(rows_of(records), key=lambda row: row.label)
    main = main_clusters(problem, records, paper)
    lines = [f"## {heading}, by K", ""]
    for key, title in MEASURES.items():
        cells: dict[str, dict[int, str]] = defaultdict(dict)
        for row in rows:
            own, label = clusters_of(row.runs[0]), row.without("method.num_clusters").label
            for clusters in counts if own is None else [own]:
                theirs = paper.get(paper_key(problem, clusters), {}).get(row.method, {}).get(key)
                ours = f"{show(row.finals(key))}{few_seeds(row)}"
                cells[label][clusters] = ours + ("" if theirs is None else f" ({theirs})")
        lines += [f"{title[0].upper()}{title[1:]}, the paper's in brackets:", ""]
        # Methods that were run with the main K alone stand in a section of their own.
        varied = {row.method for row in rows if clusters_of(row.runs[0]) != main}
        of_varied = {row.without("method.num_clusters").label for row in rows if row.method in varied}
        shown = [[label, *(own.get(k, "") for k in counts)] for label, own in cells.items() if label in of_varied]
        lines += [*table(["method", *(f"K = {clusters}" for clusters in counts)], shown), ""]
    if alike := [row.label for row in rows if clusters_of(row.runs[0]) is None]:
        lines += [f"The same runs at every K, which they are not told; more of them above: {', '.join(alike)}.", ""]
    for clusters in counts:
        if clusters != main:
            of_count = [row.without("method.num_clusters") for row in rows if clusters_of(row.runs[0]) == clusters]
            printed = paper.get(paper_key(problem, clusters), {})
            lines += below_paper(f"{heading}, K = {clusters}", of_count, printed, reasons, f" with K = {clusters}")
    return lines


def defaults(records: Sequence[Record]) -> list[str]:
    """The studies behind the default settings: one table for each data set and method, the default in bold."""
    problems = by_problem(records)
    lines = ["## Defaults, chosen on validation data", "", STUDIES, ""] if problems else []
    for problem, own in problems.items():
        rows_by_method: dict[str, list[Row]] = defaultdict(list)
        for row in rows_of(own):
            rows_by_method[row.method].append(row)
        for method, rows in rows_by_method.items():
            rounds = rows[0].runs[0]["result"]["rounds"]
            lines += [f"### {', '.join(problem)}: {method}, {rounds} rounds", "", *study(rows), ""]
    return lines


def study(rows: Sequence[Row]) -> list[str]:
    """The settings tried, best accuracy first, and how far the default is from the best."""
    rows = sorted(rows, key=lambda row: -fmean(row.finals("accuracy")))
    varied = list(dict.fromkeys(key for row in rows for key in row.settings))
    lines = []
    for row in rows:
        ari = row.finals("ari")
        cells = [text_of(row.settings[key]) if key in row.settings else "" for key in varied]
        cells += [show(row.finals("accuracy")), show(row.finals("macro_f1")), f"{fmean(row.finals('nll')):.3f}"]
        cells += [show(ari) if ari else "", str(len(row.runs))]
        lines.append([f"**{cell}**" if is_default(row) and cell else cell for cell in cells])
    columns = [*map(title_of, varied), "accuracy", "macro F1", "NLL", "agreement", "seeds"]
    return [*table(columns, lines), "", verdict(rows)]


def is_default(row: Row) -> bool:
    """Whether the row has the settings that the method and training have by themselves."""
    own = {"method": make_method(row.method, {}), "training": Training()}
    named = [(*key.split("."), value) for key, value in row.settings.items()]
    return all(getattr(own.get(section), key, None) == value for section, key, value in named)


def verdict(rows: Sequence[Row]) -> str:
    """How the default stands among the settings tried, which come best first."""
    best, default = rows[0], next((row for row in rows if is_default(row)), None)
    if default is None:
        return "The default is not among them yet."
    if default is best:
        return f"The default is the best of {len(rows)} by accuracy; {_surely_better(default, rows[1:])}."
    gaps = paired_gaps(best.by_draw("accuracy"), default.by_draw("accuracy"))
    gap = fmean(best.finals("accuracy")) - fmean(default.finals("accuracy"))
    if len(gaps) < ENOUGH_SEEDS:
        sure = TOO_FEW_SEEDS
    else:
        # The best of several is chosen after the fact, so its test counts as one of as many.
        rivals = len(rows) - 1
        p = min(1.0, rivals * paired_p(gaps))
        corrected = f", corrected for {rivals} rivals" if rivals > 1 else ""
        sure = f"paired t-test over {len(gaps)} seeds{corrected}: p = {p:.2f}"
    return f"The best is {gap:.2f} above the default ({sure})."


def _surely_better(default: Row, others: Sequence[Row]) -> str:
    """Of how many of the others that is more than chance."""
    gaps = [paired_gaps(default.by_draw("accuracy"), row.by_draw("accuracy")) for row in others]
    if min(map(len, gaps), default=0) < ENOUGH_SEEDS:
        return TOO_FEW_SEEDS
    sure = sum(p < LEVEL for p in holm([paired_p(gap) for gap in gaps]))
    tests = f"paired t-tests over common seeds with Holm's correction, p < {LEVEL}"
    return f"surely better than {sure or 'none'} of the others ({tests})"
