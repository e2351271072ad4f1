"""What the report says in words: the lead, and under every figure what to see in it."""

from collections.abc import Sequence

import numpy as np

from bcfl.likelihood.measures import TITLES as MEASURE_TITLES
from bcfl.predict.metrics import MORE_IS_BETTER
from bcfl.report.drawing import ClientGraph, columns, marks
from bcfl.report.reading import Group, Run, unfinished_runs
from bcfl.report.tables import cells, leading, shown_measures

MOST_NAMED = 5  # unfinished runs that are told by name
TITLES = {
    "accuracy": "Accuracy by round",
    "lead": "How good it is, by round",
    "macro_f1": "Macro F1 by round",
    "agreement": "Agreement with the true groups",
    "accuracy_by_work": "Accuracy for the same work",
    "graph": "Who belongs together",
    "association": "Who is where, round by round",
    "trellis": "Which hypothesis descends from which",
    "certainty": "How sure, and who still moves",
    "calibration": "Calibration",
    "client_measure": "How good it is for each client",
    "labels": "What the clients hold",
    "work": "Work and traffic",
}
CURVES = {
    "lead": "The measure that tells most of such targets, over all clients' own test examples.",
    "accuracy": "Higher is better: the share of all clients' own test examples that their models get right.",
    "macro_f1": "The same for the F1 score, which counts rare classes as much as common ones.",
    "agreement": "At 1 the clusters are exactly the true groups, at 0 no better than chance (adjusted Rand index).",
    "accuracy_by_work": "Further left is cheaper: a method that carries several hypotheses trains more in a round, so "
                        "this compares at equal training effort.",
}  # fmt: skip
BAND = " The line is the mean over the seeds, the band one standard deviation."


def title(groups: Sequence[Group]) -> str:
    data = {str(run.manifest.get("dataset", "own data")) for group in groups for run in group.runs}
    what = groups[0].label if len(groups) == 1 else f"{len(groups)} methods"
    return f"{what} on {', '.join(sorted(data))}"


def lead(groups: Sequence[Group]) -> str:
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
    final = run.associations[-1].assignment[0]
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


def facts(groups: Sequence[Group]) -> list[str]:
    """What was run, in a few words each."""
    runs = [run for group in groups for run in group.runs]
    first = runs[0]
    partition = first.manifest.get("partition")
    return [
        f"{first.num_clients} clients",
        *([f"partition {partition}"] if partition else []),
        *([f"{len(np.unique(first.group))} true groups"] if first.group is not None else []),
        f"{first.config['experiment']['rounds']} rounds",
        f"{len(runs)} runs" if len(runs) > 1 else f"seed {first.seed}",
    ]


def unfinished_note(groups: Sequence[Group]) -> str:
    """Which runs are not complete, and whether they count; nothing if all are."""
    unfinished = [run for group in groups for run in group.unfinished]
    if not unfinished:
        return ""
    told = [f"{run.path.name}: {len(run.rounds)} of {run.config['experiment']['rounds']} rounds" for run in unfinished]
    more = [f"{len(told) - MOST_NAMED} more"] if len(told) > MOST_NAMED else []
    said = "".join(f" {remark}." for remark in unfinished_runs(groups))
    return f"Not finished yet: {'; '.join(told[:MOST_NAMED] + more)}.{said}"


def graph(run: Run, drawn: ClientGraph) -> str:
    """How to read the client graph, and what of it is not drawn."""
    colours = "colours are the true groups" if run.group is not None else "colours are the final clusters"
    aside = " Those that change group later keep the colour of their first." if run.drift else ""
    if len(drawn.client) < run.num_clients:
        aside += f" {len(drawn.client)} of {run.num_clients} clients are drawn."
    if drawn.dropped:
        aside += f" Of {len(drawn.edges) + drawn.dropped:,} edges the strongest {len(drawn.edges):,} are drawn."
    return (
        f"The thicker a line, the longer two clients shared a cluster over the run; {colours}, so lines between "
        f"colours are doubts or mistakes. Point at a client, tap it, or go through them with the arrow keys, to see "
        f"whom it was with.{aside}"
    )


def caption(name: str, run: Run) -> str:
    """What to see in that figure of a run."""
    return {
        "association": _association,
        "trellis": _trellis,
        "certainty": _certainty,
        "calibration": _calibration,
        "client_measure": _client,
        "labels": _label,
        "work": _work,
    }[name](run)


def _association(run: Run) -> str:
    who = "the mean of several clients" if columns(run).thinned else "a client"
    return (
        f"Each column is {who}, and the strong colour the cluster it belongs to; shades in between are doubt. Move the "
        "slider to see it settle."
    )


def _calibration(run: Run) -> str:
    return (
        "On the dashed line a model is right as often as it says; below it, it is overconfident. The expected "
        f"calibration error is {run.last('ece'):.3f}."
    )


def _trellis(run: Run) -> str:
    best = run.associations[-1].weight[0]
    text = (
        "Each column is a round and each dot a hypothesis, the larger the heavier; the thick line is the ancestry of "
        f"the final best one (weight {best:.2f}), crosses are those that were given up."
    )
    return f"{text} Signs above a dot tell what happened then: point at one, or tap it." if marks(run) else text


def _certainty(run: Run) -> str:
    last_move = max((record["round"] for record in run.rounds if record["changes"]), default=0)
    still = f"nobody has moved since round {last_move}" if last_move else "nobody has ever moved"
    if last_move == len(run.rounds):
        still = "clients still move"
    return f"Falling entropy means that the server makes up its mind; at the end {_doubt_left(run)}, and {still}."


def _doubt_left(run: Run) -> str:
    mean = run.entropy[-1].mean()
    if mean < 0.0005:
        return "everybody's place is certain"
    never = int((run.associations[-1].assignment[0] < 0).sum())
    aside = f" ({never} of {run.num_clients} were never placed and may be anywhere)" if never else ""
    return f"{mean:.3f} nats of doubt are left per client{aside}"


def _client(run: Run) -> str:
    measure = leading(run)
    known = sorted((v for v in run.last(f"client_{measure}") if v is not None), reverse=measure not in MORE_IS_BETTER)
    return (
        f"A fair federation has its clients close to the dashed mean: the worst has {MEASURE_TITLES[measure]} "
        f"{known[0]:.3f}, the best {known[-1]:.3f}."
    )


def _label(run: Run) -> str:
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


def _work(run: Run) -> str:
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
