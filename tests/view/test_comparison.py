"""Tables and plots of any number of schedules, at several sizes and costs."""

import csv
import io
import json

import pytest

from penstock.commands.compare import parse_source
from penstock.errors import PenstockError
from penstock.schedule import Costs, build, simulate
from penstock.view.comparison import Case, csv_table, json_table, latex_table, plot, text_table
from penstock.view.figure.shapes import Box, Text
from penstock.view.record import Record


def case(name: str, microbatches: int, **costs: float) -> Case:
    return Case(Record((simulate(build(name, 4, microbatches), Costs(**costs)),)), costs)


def test_any_number_over_sizes_and_costs_are_a_table(penstock):
    penstock("show", "gpipe", "--ranks", "2", "--microbatches", "3", "--csv", "fixed.csv")
    printed = penstock(
        *("compare", "1f1b", "mine.py", "interleaved-1f1b:stages_per_rank=4", "fixed.csv"),
        *("--ranks", "2", "--microbatches", "4,8", "--send", "0,0.5"),
    )
    assert printed.splitlines() == [
        "schedule                            P  M  send  makespan  bubble  in flight, most on a rank",
        "1f1b                                2  4     0        15   20.0%                          2",
        "1f1b                                2  4   0.5        17   29.4%                          2",
        "1f1b                                2  8     0        27   11.1%                          2",
        "1f1b                                2  8   0.5        31   22.6%                          2",
        "mine                                2  4     0        15   20.0%                          4",
        "mine                                2  4   0.5        16   25.0%                          4",
        "mine                                2  8     0        27   11.1%                          8",
        "mine                                2  8   0.5        28   14.3%                          8",
        "interleaved-1f1b:stages_per_rank=4  2  4     0     12.75    5.9%                       2.25",
        "interleaved-1f1b:stages_per_rank=4  2  4   0.5      21.5   44.2%                       2.25",
        "interleaved-1f1b:stages_per_rank=4  2  8     0     24.75    3.0%                       2.25",
        "interleaved-1f1b:stages_per_rank=4  2  8   0.5     36.75   34.7%                       2.25",
        "fixed                               2  3     0        12   25.0%                          3",
        "fixed                               2  3   0.5        13   30.8%                          3",
    ]


def test_two_alone_are_drawn_and_more_numbers_are_a_table(penstock):
    assert "rank 0 |F0" in penstock("compare", "1f1b", "gpipe:microbatches=8")
    assert "rank 0 |" not in penstock("compare", "1f1b", "gpipe", "--microbatches", "4,8")


def test_options_of_its_own_come_before_those_of_all():
    assert parse_source("runs/a:b") == ("runs/a:b", {})
    assert parse_source("x.py:ranks=3,send=0.5,stages-per-rank=2") == (
        "x.py",
        {"ranks": 3, "send": 0.5, "stages_per_rank": 2},
    )


def test_csv_and_json_have_the_numbers_without_rounding():
    cases = [case("1f1b", 8, send=0.5), case("zb-h1", 8, send=0.5)]
    rows = list(csv.DictReader(io.StringIO(csv_table(cases))))
    values = json.loads(json_table(cases))
    timeline = simulate(build("zb-h1", 4, 8), Costs(send=0.5))
    for row in (rows[1], values[1]):
        assert float(row["bubble"]) == timeline.bubble
        assert float(row["makespan"]) == timeline.makespan
        assert (row["schedule"], int(row["ranks"]), int(row["microbatches"])) == ("zb-h1", 4, 8)
        assert (float(row["send"]), row["memory_unit"]) == (0.5, "activations")


def test_latex_has_the_rules_of_booktabs_and_escapes_names():
    cases = [Case(Record((simulate(build("1f1b", 4, 8)),))), case("gpipe", 8)]
    named = Record((simulate(build("1f1b", 2, 4)),), unit="s")
    object.__setattr__(named.steps[0], "name", "my_rule 50% {x}")
    assert latex_table([*cases, Case(named)]).splitlines() == [
        "% needs \\usepackage{booktabs}",
        "\\begin{tabular}{lrrrrr}",
        "\\toprule",
        "schedule & $P$ & $M$ & makespan & bubble & in flight, most on a rank \\\\",
        "\\midrule",
        "1f1b & 4 & 8 & 33 & 27.3\\,\\% & 4 \\\\",
        "gpipe & 4 & 8 & 33 & 27.3\\,\\% & 8 \\\\",
        "my\\_rule 50\\% \\{x\\} & 2 & 4 & 15\\,s & 20.0\\,\\% & 2 \\\\",
        "\\bottomrule",
        "\\end{tabular}",
    ]


def test_costs_that_do_not_differ_are_no_column():
    assert text_table([case("1f1b", 4, send=1), case("gpipe", 4, send=1)]).splitlines()[0].split()[:4] == [
        *("schedule", "P", "M", "makespan"),
    ]


def test_a_plot_has_a_curve_for_each_schedule_over_the_microbatches():
    cases = [case(name, count) for name in ("1f1b", "zb-h1") for count in (8, 4, 16)]
    figure = plot(cases, "memory")
    texts = [shape.text for shape in figure.shapes if isinstance(shape, Text)]
    assert {"in flight, most on a rank", "microbatches", "4", "8", "16", "1f1b", "zb-h1", "0"} <= {*texts}
    lefts = [shape.x for shape in figure.shapes if isinstance(shape, Box)][:3]
    assert lefts == sorted(lefts)
    with pytest.raises(PenstockError, match=r"a plot needs several numbers: give --microbatches 8,16,32, or --ranks 4,8"):
        plot([case("1f1b", 8), case("gpipe", 8)])


def test_a_bubble_of_zero_is_on_the_axis():
    figure = plot([Case(Record((simulate(build("1f1b", 1, count)),))) for count in (2, 4)])
    texts = [shape for shape in figure.shapes if isinstance(shape, Text)]
    axis = next(shape.y for shape in texts if shape.text == "0")
    assert [shape.y + shape.height / 2 for shape in figure.shapes if isinstance(shape, Box)][:2] == [axis, axis]


def test_files_are_written(penstock, tmp_path):
    words = ("--csv", "t.csv", "--json", "t.json", "--latex", "t.tex", "--plot", "t.pdf", "--html", "t.html")
    printed = penstock("compare", "1f1b", "zb-v", "mine.py", "--microbatches", "4,8", *words)
    assert printed.splitlines()[-5:] == [f"wrote t.{suffix}" for suffix in ("html", "csv", "json", "tex", "pdf")]
    assert (tmp_path / "t.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("1f1b", "gpipe", "--ranks", "4,x"), "--ranks '4,x' cannot be read: give whole numbers, with commas between several"),
        (("1f1b:foo=2", "gpipe"), "1f1b takes no option foo behind its colon: use ranks, microbatches, stages_per_rank"),
        (("1f1b:send=a", "gpipe"), "send of 1f1b 'a' cannot be read: give numbers"),
        (("1f1b", "gpipe", "--microbatches", "4,8", "--plot", "a.gif"), "a.gif is no figure that can be written: let its name"),
        (("1f1b", "gpipe", "--csv", "nowhere/a.csv"), "nowhere/a.csv cannot be written: No such file or directory"),
        (("1f1b", "gpipe", "--plot", "a.svg"), "a plot needs several numbers"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(penstock, words, message):
    assert message in penstock("compare", *words)
