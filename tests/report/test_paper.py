from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_runs import keep_rounds, write_eventful_run

from bcfl.cli import main
from bcfl.report.drawing import MARK_NAMES, client_graph, marks
from bcfl.report.reading import Group, Run, group_runs, read_run, read_runs

pytest.importorskip("matplotlib")

from bcfl.report import charts, paper

MakeRun = Callable[..., Path]
FIRST_BYTES = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


def test_every_figure_in_every_format(made_up: MakeRun, tmp_path: Path) -> None:
    out = tmp_path / "figures"
    assert main(["figures", str(made_up()), "--out", str(out)]) == 0
    details = ("graph", "association", "trellis", "certainty", "calibration", "client_measure", "labels", "work")
    names = {"learning", *details}
    assert {path.name for path in out.iterdir()} == {f"{name}.{kind}" for name in names for kind in FIRST_BYTES}
    assert all(path.read_bytes().startswith(FIRST_BYTES[path.suffix[1:]]) for path in out.iterdir())


def test_the_command_says_which_runs_are_unfinished(
    made_up: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(charts, "of_run", lambda run, shown: {})
    paths = [str(made_up("a0")), str(keep_rounds(made_up("a1", seed=1), 3))]
    assert main(["figures", *paths, "--out", str(tmp_path / "figures"), "--formats", "svg"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["Unfinished runs, not counted: bcfl-mh-3 1 of 2."]


def test_several_methods_have_files_of_their_own(
    made_up: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_run = charts.of_run
    monkeypatch.setattr(charts, "of_run", lambda *run: {k: v for k, v in of_run(*run).items() if k == "trellis"})
    runs = read_runs([made_up("a"), made_up("b", method="bcfl-g", hypotheses=1)])
    names = {path.name for path in paper.save_figures(runs, tmp_path / "figures", ["svg"])}
    assert {"learning.svg", "graph-bcfl-mh-3.svg", "trellis-bcfl-mh-3.svg", "graph-bcfl-g.svg"} <= names
    assert "trellis-bcfl-g.svg" not in names


def test_the_run_that_has_got_furthest_stands_for_its_seeds(
    made_up: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    monkeypatch.setattr(charts, "of_run", lambda run, shown: drawn.append(run.seed) or {})
    runs = [keep_rounds(made_up("a0"), 3), made_up("a1", seed=1), made_up("a2", seed=2)]
    paper.save_figures(read_runs(runs), tmp_path / "figures", ["svg"])
    assert drawn == [1]


def test_curves_say_how_many_seeds_they_are_a_mean_of(made_up: MakeRun) -> None:
    runs = read_runs([made_up("a0"), made_up("a1", seed=1), made_up("b", method="bcfl-g", hypotheses=1)])
    for shown, expected in ((runs, ["bcfl-mh-3 (2 seeds)", "bcfl-g (1 seed)"]), (runs[:2], ["bcfl-mh-3 (2 seeds)"])):
        (legend,) = paper.learning(group_runs(shown)).legends
        assert [text.get_text() for text in legend.get_texts()] == expected


@pytest.mark.parametrize("count", [2, 16])
@pytest.mark.parametrize("label", ["bcfl-mh-3-w", "bcfl-mh-3-w, fusion pooled, " * 8])
def test_the_legend_stands_below_panels_of_full_size(made_up: MakeRun, count: int, label: str) -> None:
    run = read_run(made_up())
    alone = paper.learning([Group("fedavg", {}, [run])])
    figure = paper.learning([Group(f"{label}{i}", {}, [run]) for i in range(count)])
    for drawn in (alone, figure):
        drawn.draw_without_rendering()  # a warning that the layout does not fit would fail here
    (legend,), panels = figure.legends, [axes.get_tightbbox() for axes in figure.axes]
    box = legend.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
    assert 0 <= box.y0 < box.y1 <= min(panel.y0 for panel in panels if panel is not None)
    for panel, full in zip(figure.axes, alone.axes, strict=True):
        assert panel.get_window_extent().height > 0.9 * full.get_window_extent().height


def figure_of(run: Run, name: str) -> Any:
    return paper.drawn(name, charts.of_run(run, np.arange(len(run.rounds)))[name])


@pytest.mark.parametrize("rounds", [1, 2, 3, 40])
def test_rounds_hypotheses_and_moves_are_counted_in_whole_numbers(made_up: MakeRun, rounds: int) -> None:
    run = read_run(made_up(rounds=rounds))
    learning = paper.learning(group_runs([run]))
    trellis, certainty, work = (figure_of(run, name) for name in ("trellis", "certainty", "work"))
    counted = [axes.xaxis for figure in (learning, trellis, certainty, work) for axes in figure.axes]
    for axis in [*counted, trellis.axes[0].yaxis, certainty.axes[1].yaxis]:
        low, high = axis.get_view_interval()
        shown = [tick for tick in axis.get_majorticklocs() if min(low, high) <= tick <= max(low, high)]
        assert shown
        assert all(float(tick).is_integer() for tick in shown)


def test_the_trellis_has_the_pages_marks(tmp_path: Path) -> None:
    run = read_run(write_eventful_run(tmp_path / "run"))
    figure = figure_of(run, "trellis")
    drawn = {str(dots.get_label()): len(dots.get_offsets()) for dots in figure.axes[0].collections}
    told = Counter(MARK_NAMES[mark.kind] for mark in marks(run))
    assert {name: drawn[name] for name in told} == told
    assert told.keys() == set(MARK_NAMES.values())


def test_edge_widths_are_the_co_association(made_up: MakeRun) -> None:
    run = read_run(made_up())
    figure = paper.graph(run)
    (lines,) = [c for c in figure.axes[0].collections if hasattr(c, "get_segments")]
    assert lines.get_linewidths() == pytest.approx(client_graph(run).strength * paper.WIDEST_EDGE)


def test_heat_maps_are_the_marginals(made_up: MakeRun) -> None:
    run = read_run(made_up())
    images = [axes.images[0].get_array() for axes in figure_of(run, "association").axes if axes.images]
    for image, round_index in ((images[0], 0), (images[-1], -1)):
        np.testing.assert_allclose(np.array(image).T, run.marginals[round_index][run.order], atol=5.1e-4)


def test_curves_are_the_log(made_up: MakeRun) -> None:
    run = read_run(made_up())
    figure = paper.learning(group_runs([run]))
    for axes, key in zip(figure.axes, ("accuracy", "macro_f1"), strict=True):
        assert axes.lines[0].get_ydata() == pytest.approx([record[key] for record in run.rounds], abs=5e-5)


def test_the_same_figure_is_the_same_file(made_up: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "of_run", lambda run, shown: {})
    run = read_run(made_up())
    for name in ("a", "b"):
        paper.save_figures([run], tmp_path / name, ["svg"])
    assert (tmp_path / "a" / "graph.svg").read_bytes() == (tmp_path / "b" / "graph.svg").read_bytes()


def test_unknown_format_is_refused(made_up: MakeRun, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--formats must be some of png, svg, pdf, got 'gif'"):
        paper.save_figures([read_run(made_up())], tmp_path, ["gif"])


def test_nothing_to_draw_is_said(made_up: MakeRun, tmp_path: Path) -> None:
    path = keep_rounds(made_up(), 0)
    with pytest.raises(ValueError, match="no round is finished"):
        paper.save_figures([read_run(path)], tmp_path, ["png"])
