"""Front door: the README is short, its commands can be read, and examples print their shown output."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from command_lines import commands
from source_tree import ROOT

README = ROOT / "README.md"
GETTING_STARTED = ROOT / "docs" / "getting_started.md"
PAGES = [README, *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "results")]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def command_lines(page: Path) -> Iterator[list[str]]:
    """Words of every call of `placement` in a page's shell blocks, without comments."""
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["placement"] and words[1:2] != ["--install-completion"]:
                yield words[1:]


def test_the_readme_is_short() -> None:
    text = re.sub(r"<!--.*?-->", "", README.read_text(encoding="utf-8"))
    assert len(re.findall(r"\S*\w\S*", text)) <= 930


def test_the_first_screen_says_what_it_is_that_times_are_predicted_and_which_hardware_ran() -> None:
    first = "\n".join(README.read_text(encoding="utf-8").splitlines()[:20])
    for word in ("heuristic", "search", "learning", "policy", "Gymnasium", "make demo", "make test", "predicted"):
        assert word in first
    assert "GPU of ours" in first


def test_placing_and_learning_print_their_shown_output(capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks "Place it yourself" and "Learn it" are one program, whose output stands below them."""
    text = (
        README.read_text(encoding="utf-8").partition("## Place it yourself")[2].partition("```sh\nplacement train")[0]
    )
    shown = re.findall(r"```python\n.*?```\n\n```text\n(.*?)```", text, re.DOTALL)
    exec("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), {})
    assert capsys.readouterr().out == "".join(shown)


def test_optimize_is_shown_with_six_lines_of_output() -> None:
    output = next(block for block in blocks(README, "text") if "do it" in block)
    lines = output.strip().splitlines()
    assert len(lines) == 6
    assert len(lines[0]) <= 100
    assert "predicted" in output


def test_apply_is_shown_in_five_lines() -> None:
    running = next(block for block in blocks(README, "python") if "placed.step(" in block)
    assert "placement.apply(model, " in running
    assert len(running.strip().splitlines()) <= 5
    compile(running, "README.md", "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_are_shown_can_be_read(page: Path) -> None:
    known = commands()
    for name, *words in command_lines(page):
        known[name].make_context(name, words)


def test_the_model_of_the_first_steps_has_a_loss() -> None:
    made: dict[str, object] = {}
    exec(blocks(GETTING_STARTED, "python")[0], made)
    model, args = made["make"]()  # type: ignore[operator]
    assert model(*args).shape == torch.Size([])


def test_the_example_prints_its_shown_output(tmp_path: Path) -> None:
    found = re.search(
        r"```python\nimport placement\n((?:(?!```).)*)```\n+```text\n(.*?)```",
        GETTING_STARTED.read_text(encoding="utf-8"),
        re.DOTALL,
    )
    assert found is not None
    code, output = found.groups()
    assert len(code.strip().splitlines()) <= 10
    (tmp_path / "example.py").write_text(f"import placement\n{code}", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == output.strip()


@pytest.mark.slow
def test_the_command_of_the_readme_prints_its_shown_output(tmp_path: Path) -> None:
    """An answer depends on the command and the seed alone, so its figures can be checked on any machine."""
    words = next(words for words in command_lines(README) if words[0] == "optimize")
    shown = next(block for block in blocks(README, "text") if "do it" in block)
    done = subprocess.run(
        [sys.executable, "-m", "placement", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    printed = [re.sub(r", fits in .*", "", line) for line in done.stdout.splitlines()]
    assert [line for line in shown.strip().splitlines() if line not in printed] == []
    counts = re.search(r"(\d[\d,]*) were estimated and (\d+) simulated", README.read_text(encoding="utf-8"))
    assert counts is not None
    assert f"{counts[1]} strategies estimated, {counts[2]} scored by the simulator" in done.stdout
