"""One table for a terminal and for a page."""

from __future__ import annotations

from rich.console import Console

from placement.comparing.rows import NOTHING, Column, Row, RowTable

TABLE = RowTable(
    (
        Column("name", "method"),
        Column("time_s", "time", "s"),
        Column("speedup", "speed-up", "x"),
        Column("gap", "gap", "gap", only="page"),
        Column("note", "", is_text=True, only="terminal"),
    ),
    (
        Row({"name": "a<b", "time_s": 0.25, "speedup": 2.0, "gap": 0.1234, "note": "two\nlines"}, "best"),
        Row({"name": "one device", "time_s": 0.5, "speedup": None}, "base"),
        Row({"name": "big", "time_s": "does not fit", "gap": 0.9}, "unfit", "needs 3 GB & has 2 GB"),
    ),
)


def test_a_terminal_shows_its_columns_with_units() -> None:
    console = Console(width=100)
    with console.capture() as shown:
        console.print(TABLE.rich())
    head, best, base, unfit = (line.split() for line in shown.get().splitlines())
    assert head == ["method", "time", "speed-up"]
    assert best == ["a<b", "250", "ms", "2.00x", "two", "lines"]
    assert base == ["one", "device", "500", "ms", NOTHING, NOTHING]
    assert unfit == ["big", "does", "not", "fit", NOTHING, NOTHING]


def test_a_page_escapes_names_and_gives_the_reason_in_place_of_figures() -> None:
    page = TABLE.html()
    assert page.count('<th scope="col">') == 4
    assert (
        '<tr class="best"><th scope="row" data-v="a&lt;b"><code>a&lt;b</code></th><td data-v="0.25">250 ms</td>'
        '<td data-v="2.0">2.00x</td><td data-v="0.1234">12.4 %</td>' in page
    )
    row = '<tr><th scope="row" data-v="one device">one device</th><td data-v="0.5">500 ms</td>'
    assert f"{row}<td>{NOTHING}</td><td>{NOTHING}</td>" in page
    assert '<td colspan="3" class="reason">needs 3 GB &amp; has 2 GB</td>' in page
    assert "two" not in page
