"""Docs that cannot rot: files they show are read by the real readers, and what they point at is there."""

from __future__ import annotations

import re
from pathlib import Path

import configuration_tables
import figures
import pytest
import rooms_table
from source_tree import ROOT

from env.cluster import Cluster
from graphs.files import load_graph
from placement import optimize

FILES = (ROOT / "docs" / "files.md").read_text(encoding="utf-8")
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
# Decisions are a chronicle and results were written once: both may name files that have gone since.
CURRENT = [page for page in PAGES if page.parent.name != "results" and page.name != "decisions.md"]
SUITE = (ROOT / "docs" / "results" / "suite.md").read_text(encoding="utf-8")
FOLDERS = ("graphs", "env", "baselines", "placement", "tests", "benchmarks", "docs", "examples")


def _block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", FILES, re.DOTALL)
    assert found is not None
    return found.group(1)


def _anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_cluster_and_the_graph_can_be_used_together(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(_block("toml"), encoding="utf-8")
    (tmp_path / "graph.json").write_text(_block("json"), encoding="utf-8")
    cluster = Cluster.from_toml(tmp_path / "mine.toml")
    graph = load_graph(tmp_path / "graph.json")
    assert (cluster.n_devices, graph.n_ops, graph.n_tensors) == (2, 2, 1)
    result = optimize(graph, cluster, seed=0)
    assert result.placement is not None
    assert result.placement["embed"] == "cpu0"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*(?:/|\.\w+))`", page.read_text(encoding="utf-8"))
    examples = {"baselines/placers/mine.py"}
    assert [name for name in named if name not in examples and not (ROOT / name).exists()] == []


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if page != "index.md" and f"]({page})" not in index] == []


@pytest.mark.parametrize("page", figures.pages(), ids=lambda page: page.name)
def test_figures_are_those_of_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == figures.with_figures(text), "run PYTHONPATH=. python tests/helpers/figures.py"
    names = set(re.findall(r"<!--(\w+\.\w+)-->", text))
    assert names <= figures.FIGURES.keys()
    assert text.count("<!---->") == len(re.findall(figures.MARK, text))


def test_every_figure_is_shown() -> None:
    shown = "".join(page.read_text(encoding="utf-8") for page in figures.pages())
    assert [name for name in figures.FIGURES if f"<!--{name}-->" not in shown] == []


def test_the_methods_page_has_the_rows_of_the_suite() -> None:
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    for row in re.findall(r"^\| \w+ on .*$", page, re.MULTILINE):
        model, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        found = next(line for line in SUITE.splitlines() if line.startswith(f"| {model} |"))
        assert set(cells) <= {cell.strip() for cell in found.split("|")}


def test_docs_have_at_most_60_000_words() -> None:
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in (ROOT / "docs").glob("*.md")) <= 60_000


def test_contributing_has_the_rooms_of_today() -> None:
    page = rooms_table.PAGE.read_text(encoding="utf-8")
    assert page == rooms_table.with_table(page), "run python tests/helpers/rooms_table.py"


def test_the_configurations_page_has_the_keys_of_today() -> None:
    page = configuration_tables.PAGE.read_text(encoding="utf-8")
    assert page == configuration_tables.page_with_tables(page), "run python tests/helpers/configuration_tables.py"


def test_the_benchmarks_page_names_every_script() -> None:
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    scripts = [path.name for path in sorted((ROOT / "benchmarks").glob("*.py"))]
    assert [name for name in scripts if name not in text] == []


def test_the_glossary_has_one_entry_a_word() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").partition("## One word, not the other")[0]
    words = [word for line in re.findall(r"^\| (.*?) \|", text, re.MULTILINE) for word in line.split(", ")]
    twice = {word for word in words if words.count(word) > 1 and word not in ("word", "---")}
    assert twice == set()


def sentences(page: Path) -> list[str]:
    """Sentences of a page without its code; cells of tables and items of lists are some."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    paragraphs = re.split(r"\n\n|\n(?=[*#-] )|\||^\* |^- ", text, flags=re.MULTILINE)
    joined = (" ".join(paragraph.split()) for paragraph in paragraphs)
    return [sentence for paragraph in joined for sentence in re.split(r"(?<=[.!?]) +", paragraph)]
