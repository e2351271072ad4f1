"""Results that are kept, the tables that are made of them, and the page."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_up_records import made_up

from bcfl.benchmark.described import results_tables, tasks_page
from bcfl.benchmark.leaderboard import boards
from bcfl.benchmark.ledger import keep, kept, key_of
from bcfl.benchmark.page import page
from bcfl.benchmark.pictures import differences_picture, gains_picture, ranks_picture
from bcfl.benchmark.tasks import all_tasks

LOSSES = [1.0 + 0.01 * index for index in range(20)]
RECORDS = [
    made_up("radon", "fedavg", LOSSES),
    made_up("radon", "local", [loss + 1 for loss in LOSSES]),
    made_up("radon", "bcfl-g", [loss - 0.1 for loss in LOSSES]),
    made_up("contraception", "fedavg", LOSSES),
    made_up("contraception", "local", [loss - 0.5 for loss in LOSSES]),
    made_up("contraception", "bcfl-g", LOSSES[:10] + [loss + 0.001 for loss in LOSSES[10:19]] + [None]),
]


def test_what_was_kept_comes_back_and_the_last_of_the_same_counts(tmp_path: Path) -> None:
    assert kept(tmp_path / "nowhere") == {}
    for record in RECORDS:
        keep(tmp_path, record)
    again = made_up("radon", "fedavg", [2.0, 3.0])
    keep(tmp_path, again)
    found = kept(tmp_path)
    assert len(found) == len(RECORDS)
    assert found[key_of(again)] == again
    assert found[key_of(RECORDS[4])] == RECORDS[4]


def test_half_a_line_is_none_and_nothing_after_it_is_lost(tmp_path: Path) -> None:
    keep(tmp_path, RECORDS[0])
    path = tmp_path / "radon.jsonl"
    path.write_bytes(path.read_bytes() + b'{"task":"radon","contes')
    assert list(kept(tmp_path)) == [key_of(RECORDS[0])]
    keep(tmp_path, RECORDS[1])
    assert set(kept(tmp_path)) == {key_of(RECORDS[0]), key_of(RECORDS[1])}


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "radon.jsonl").write_text('{"task": "radon"}\n')
    with pytest.raises(ValueError, match=r"radon\.jsonl, line 1: must hold task, contestant"):
        kept(tmp_path)


def test_a_board_says_who_is_better_than_whom() -> None:
    (board,) = boards(RECORDS)
    assert (board.reference, board.tasks, board.title) == ("fedavg", ("radon", "contraception"), "linear model")
    rows = {row.contestant: row for row in board.rows}
    radon, contraception = rows["bcfl-g"].cells
    assert radon is not None
    assert contraception is not None
    assert radon.against is not None
    assert radon.against.verdict == "better"
    assert radon.against.mean == pytest.approx(-0.1)
    assert radon.gains == 1.0
    assert contraception.gains == 0.0
    assert contraception.failed == 1
    assert [rows["local"].verdicts(verdict) for verdict in ("better", "worse", "open")] == [1, 1, 0]
    # 2 + 2 (fedavg: second on both), 3 + 1 (local), 1 + 3 (bcfl-g: last on contraception, as it failed at a site).
    assert {name: row.rank for name, row in rows.items()} == {"fedavg": 2.0, "local": 2.0, "bcfl-g": 2.0}


def test_the_default_method_is_what_others_are_compared_with_where_it_took_part() -> None:
    (board,) = boards([*RECORDS, made_up("radon", "bcfl", LOSSES)])
    assert board.reference == "bcfl"
    assert {row.contestant: row.rank for row in board.rows}["bcfl"] is None  # it did not do all tasks


def test_draws_are_averaged_site_by_site_and_compared_only_over_the_same_draws() -> None:
    more = made_up("radon", "fedavg", [loss + 1 for loss in LOSSES], draw=1)
    (board,) = boards([RECORDS[0], more, RECORDS[2]])
    cells = {row.contestant: row.cells[0] for row in board.rows}
    fedavg, greedy = cells["fedavg"], cells["bcfl-g"]
    assert fedavg is not None
    assert greedy is not None
    assert fedavg.loss.mean == pytest.approx(sum(LOSSES) / 20 + 0.5)
    assert fedavg.loss.sites == 20
    assert greedy.against is not None
    assert greedy.against.mean == pytest.approx(-0.1)


def test_models_and_tuning_have_boards_of_their_own() -> None:
    more = [made_up("radon", "fedavg", LOSSES, model="network"), made_up("radon", "fedavg", LOSSES, tuned=True)]
    assert [board.title for board in boards([*RECORDS, *more])] == [
        "linear model", "linear model, tuned", "small network"
    ]  # fmt: skip


class _Balanced(HTMLParser):
    """Refuses a page whose tags do not close in order, but for those that never do."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_asks_for_nothing_and_has_a_card_for_every_task() -> None:
    html = page(RECORDS)
    reader = _Balanced()
    reader.feed(html)
    assert reader.open == []
    assert not re.findall(r'(?:src|href)="(?!#)', html)
    for task in ("radon", "contraception"):
        assert f'<article id="{task}"' in html
    assert '<article id="exam"' not in html


def test_a_site_s_name_cannot_become_a_tag() -> None:
    html = page([made_up("radon", "<b>bold</b>", LOSSES), *RECORDS])
    assert "<b>bold" not in html


def test_a_bar_joins_contestants_that_are_not_told_apart() -> None:
    many = [
        made_up(task, name, [level + 0.1 * place] * 12)
        for place, name in enumerate(("fedavg", "local", "bcfl-g"))
        for level, task in enumerate(("exam", "hsb82", "chem97", "star", "radon", "insteval", "sleepstudy"))
    ]
    (board,) = boards(many)
    assert board.critical_difference == pytest.approx(1.2527, abs=1e-3)  # 2.343 · √(3 · 4 / (6 · 7))
    picture = ranks_picture(board)
    assert picture.count('stroke-width="4"') == 2  # 1 with 2, 2 with 3, not 1 with 3
    assert all(name in picture for name in ("fedavg 1.0", "local 2.0", "bcfl-g 3.0"))


def test_pictures_have_a_mark_for_every_number_that_is_known() -> None:
    assert gains_picture([5, 50, 500], [0.1, None, -0.2], "others").count("<circle") == 2
    assert gains_picture([5], [None], "others") == ""
    assert differences_picture(["a", "b"], {"a": (-0.1, -0.2, 0.0)}, "others").count("<circle") == 1


def test_tables_in_markdown_have_as_many_cells_in_every_line() -> None:
    lines = [line for line in results_tables(RECORDS).splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert any("0.995 ▲" in line for line in lines)


def test_every_task_has_a_card_with_its_licence() -> None:
    text = tasks_page()
    assert all(f"## {name}: {task.title}" in text and task.licence in text for name, task in all_tasks().items())
