"""Names that would act on a terminal, values too long to read, file names that are no text, and disks that are full."""

from __future__ import annotations

import errno
import json
import os
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env.cluster import Cluster, Device
from graphs import disk
from graphs.checks import check_time_keys
from graphs.errors import ClusterError, GraphError, PlacementError, UnknownNameError
from graphs.files import load_graph, save_graph
from graphs.formatting import MESSAGE_LENGTH, NAME_LENGTH, show, show_line, show_message, show_output
from graphs.opgraph import Op, OpGraph, Tensor
from placement import optimization
from placement.cli import run
from placement.cli.output import command_line, progress
from placement.inputs import sources

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b\u202e\nplacement: forged\r[bold red]x[/]"
SHOWN = "\\x1b]0;owned\\x07\\x1b[2J\\x9b\\u202e\\nplacement: forged\\r[bold red]x[/]"


# -- one function shows names -------------------------------------------------------------------------------------


def test_what_would_act_on_a_terminal_is_escaped_and_other_letters_are_not() -> None:
    assert show(EVIL) == SHOWN
    assert show("naïve 网络 😀\u00a0") == "naïve 网络 😀\u00a0"
    assert show("half \ud800 a pair, a\u2028line") == "half \\ud800 a pair, a\\u2028line"
    assert show_line("two\n words\x1b") == "two words\\x1b"
    assert show_output("a\tb\n\x1b[1mbold\x1b[0m\x1b[2J", colours=True) == "a\tb\n\x1b[1mbold\x1b[0m\\x1b[2J"
    assert show_output("\x1b[1m") == "\\x1b[1m"


@given(st.text(max_size=400))
def test_whatever_is_shown_is_printable_and_short(text: str) -> None:
    assert show(text).isprintable() or any(c.isspace() for c in show(text))
    assert not re.search("[\x00-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", show(text))
    assert len(show(text)) <= NAME_LENGTH
    assert len(show_message(text * 20)) <= MESSAGE_LENGTH


def test_no_error_says_more_than_anybody_reads() -> None:
    long = "x" * 5000
    for error in (
        PlacementError(f"op {long!r} is wrong; mend it."),
        UnknownNameError("model", long, [long, "words " * 999]),
    ):
        assert len(str(error)) <= MESSAGE_LENGTH
        assert "xxx ... xxx" in str(error)
    with pytest.raises(ClusterError, match=r"has memory_bytes = '9+ \.\.\. 9+'; expected a finite number"):
        Device("a", "gpu", "9" * 3000, {"float32": 1.0}, 1.0)  # type: ignore[arg-type]


# -- on the command line --------------------------------------------------------------------------------------------


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a graph and a cluster whose names act on terminals, to run commands in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLACEMENT_CACHE_DIR", str(tmp_path / "cache"))
    ops = [Op(EVIL, kind=EVIL, module=EVIL, time_s={"*": 1e-3}), Op("b", time_s={"*": 1e-3})]
    save_graph(OpGraph.build(ops, [Tensor(EVIL, 9, ("b",))], EVIL), tmp_path / "g.json")
    devices = (Device(EVIL, "gpu", 10**9, {"float32": 1e12, EVIL: 1.0}, 1e12, 0.0, EVIL),)
    cluster = Cluster(EVIL, devices, (), EVIL, EVIL)
    (tmp_path / "c.toml").write_text(cluster.to_toml(), encoding="utf-8")
    assert Cluster.from_toml(tmp_path / "c.toml") == cluster
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        "optimize g.json --cluster c.toml --method heft -o r.json",
        "optimize g.json --cluster c.toml --method no-such",
        "compare g.json --cluster c.toml --methods heft,random",
        "compare g.json --clusters c.toml,c.toml --methods heft",
        "clusters c.toml",
        "clusters c.toml --toml",
        "capture g.json -o again.json",
        "verify r.json",
        "export r.json --to json",
        "optimize pinned.json --cluster c.toml",
        "optimize big.json --cluster c.toml --method heft",
    ],
)
def test_no_command_lets_a_name_act_on_the_terminal_or_forge_a_line(
    evil: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = load_graph(evil / "g.json")
    ops, tensors = graph.records()
    save_graph(OpGraph.build([replace(ops[0], pins=(EVIL * 50,)), ops[1]], tensors, EVIL), evil / "pinned.json")
    save_graph(OpGraph.build([replace(ops[0], kept_bytes=10**12), ops[1]], tensors, EVIL), evil / "big.json")
    run(["optimize", "g.json", "--cluster", "c.toml", "--method", "heft", "-o", "r.json"])
    capsys.readouterr()
    run(command.split())
    out, err = capsys.readouterr()
    assert out or err
    for text in (out, err):
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)
        assert not any(line.startswith("placement: forged") for line in text.splitlines())
        assert max(map(len, err.splitlines()), default=0) <= MESSAGE_LENGTH + len("placement: ")


def test_progress_does_not_read_names_as_markup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with progress("reading [/nothing] [bold]" + EVIL) as report:
        report("reading [/nothing]", 0)
    assert "\x07" not in capsys.readouterr().err


# -- names that are no text -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["name", "kind", "dtype", "module"])
def test_half_a_surrogate_pair_is_no_name(field: str) -> None:
    with pytest.raises(GraphError, match=r"has 'half \\ud800' for a name, which is not Unicode text; rename it"):
        OpGraph.build([Op(**{"name": "a", field: "half \ud800"})], [])
    with pytest.raises(GraphError, match="which is not Unicode text"):
        OpGraph.build([Op("a")], [], "half \ud800")


@pytest.mark.parametrize("name", ["naïve", "😀", "a\x7fb", "tab\there", "\x80", EVIL])
def test_a_cluster_of_any_name_survives_toml(name: str) -> None:
    cluster = Cluster(name, (Device(name, name, 1, {"float32": 1.0, name: 2.0}, 1.0, model=name),))
    data: dict[str, Any] = tomllib.loads(cluster.to_toml())
    assert data["name"] == name
    assert Device(**data["devices"][0]) == cluster.devices[0]
    with pytest.raises(ClusterError, match=r"name = 'half \\ud800'; expected a name in quotes"):
        replace(cluster, name="half \ud800")


def test_a_file_whose_name_is_not_utf_8_is_read_written_and_repeated(
    evil: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = os.fsdecode(b"\xff.json")
    (evil / odd).write_bytes((evil / "g.json").read_bytes())
    assert run(["optimize", odd, "--cluster", "c.toml", "--method", "heft", "-o", os.fsdecode(b"\xfe.json")]) == 0
    assert run(["verify", os.fsdecode(b"\xfe.json")]) == 0
    assert run(["compare", odd, "--cluster", "c.toml", "--methods", "heft", "--html", "r.html", "-o", "r.json"]) == 0
    assert "again: placement compare $'\\xff.json' " in capsys.readouterr().out
    assert "compare $&#x27;\\xff.json&#x27; " in (evil / "r.html").read_text(encoding="utf-8")
    assert json.loads((evil / "r.json").read_text(encoding="utf-8"))["command"].startswith("placement compare $'\\xff")
    assert disk.stem("folder/" + odd) == "\\xff"
    assert command_line("optimize", ["it's\x1b"], {}) == "placement optimize $'it\\x27s\\x1b'"


# -- full disks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        "optimize g.json --cluster c.toml --method heft -o out",
        "compare g.json --cluster c.toml --methods heft -o out",
        "compare g.json --cluster c.toml --methods heft --html out",
        "compare g.json --cluster c.toml --methods heft --trace out",
        "capture g.json -o out",
        "clusters c.toml -o out",
    ],
)
def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    evil: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = sorted(os.listdir(evil))
    monkeypatch.setattr(disk.os, "fsync", full)
    assert run(command.split()) == 2
    assert capsys.readouterr().err == "placement: cannot use out: No space left on device.\n"
    assert sorted(set(os.listdir(evil)) - {"cache"}) == before


@pytest.mark.parametrize("code", [errno.EFBIG, errno.EIO])
def test_a_write_that_is_refused_names_the_users_file(
    evil: Path, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(disk.os, "fsync", refuse)
    assert run(["capture", "g.json", "-o", "out"]) == 2
    assert capsys.readouterr().err == f"placement: cannot use out: {os.strerror(code)}.\n"


def test_a_folder_that_takes_no_file_names_the_users_file(
    evil: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(dir: Path, prefix: str, suffix: str) -> None:
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), f"{dir}/{prefix}x{suffix}")

    monkeypatch.setattr(disk.tempfile, "mkstemp", refuse)
    assert run(["capture", "g.json", "-o", "out"]) == 2
    assert capsys.readouterr().err == f"placement: cannot use out: {os.strerror(errno.ENOENT)}.\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    "command",
    ["clusters", "clusters c.toml --json", "optimize g.json --cluster c.toml --method heft", "--help", "models --help"],
)
def test_a_full_stdout_is_one_sentence(
    evil: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        assert run(command.split()) == 2
    assert capsys.readouterr().err == "placement: cannot use stdout: No space left on device.\n"


def test_a_full_cache_of_compiled_code_is_one_sentence(
    evil: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(optimization, "optimize", full)
    assert run(["optimize", "g.json", "--cluster", "c.toml"]) == 2
    assert capsys.readouterr().err.startswith("placement: cannot write a file, compiled code or other: No space")


# -- small files that ask for much ----------------------------------------------------------------------------------


def test_times_of_many_ops_on_many_names_are_refused_before_there_is_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = [Op(f"op{i}", time_s={f"device{i}": 1.0}) for i in range(4000)]
    assert len(OpGraph.build(ops[:1000], []).time_keys) == 1000
    monkeypatch.setattr("numpy.full", None)
    with pytest.raises(GraphError, match="has 4000 ops with time_s on 4000 different names; expected at most 64 names"):
        OpGraph.build(ops, [])


def test_few_names_may_have_times_of_any_number_of_ops() -> None:
    check_time_keys("net", 10**6, 64)
    with pytest.raises(GraphError, match="expected at most 64 names"):
        check_time_keys("net", 10**6, 65)


def test_a_doubled_key_among_very_many_is_found(tmp_path: Path) -> None:
    keys = [f"device{i}" for i in range(100_000)]
    times = ", ".join(f'"{key}": 1' for key in [*keys, keys[-1]])
    path = tmp_path / "graph.json"
    head = '{"schema": "placement.opgraph", "version": 1, "name": "g", "tensors": [], '
    path.write_text(head + f'"ops": [{{"name": "a", "time_s": {{{times}}}}}]}}')
    with pytest.raises(GraphError, match="an object has 'device99999' twice; remove one of the two"):
        load_graph(path)


def test_a_cycle_of_very_many_ops_is_found() -> None:
    n = 100_000
    tensors = [Tensor(str(i), 1, (str((i + 1) % n),)) for i in range(n)]
    with pytest.raises(GraphError, match=r"cycle: 0 -> 1 -> 2 -> 3 -> \.\.\. -> 99998 -> 99999 -> 0;"):
        OpGraph.build([Op(str(i)) for i in range(n)], tensors)


@pytest.mark.parametrize("words", [["optimize", "--cluster"], ["compare", "--cluster"], ["compare", "--clusters"]])
def test_a_name_of_no_cluster_is_refused_before_the_graph_is_read(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sources, "read_source", None)
    command, option = words
    assert run([command, str(tmp_path / "graph.json"), option, "UNKNOWN"]) == 2
    assert "unknown cluster 'UNKNOWN'" in capsys.readouterr().err
