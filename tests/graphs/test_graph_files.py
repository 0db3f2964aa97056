"""Saved graphs: nothing lost, nothing half-written, and one clear sentence for each way a file can be wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from opgraph_strategies import opgraphs

from graphs import GraphFileError, Op, OpGraph, Phase, Tensor
from graphs.disk import read_json, write_atomically
from graphs.files import load_graph, load_json_graph, save_graph


@pytest.fixture
def graph() -> OpGraph:
    ops = [
        Op("a", kind="aten.mm", flops=1 / 3, kept_bytes=7, colocation="tied", module="net.a"),
        Op(
            "b", phase=Phase.BACKWARD, forward_of="a", pins=("cpu",), time_s={"V100": 0.1}, colocation="tied", kernels=3
        ),
    ]
    return OpGraph.build(ops, [Tensor("a", 4, ("b",), 0.25), Tensor("b", 8)], name="net")


def document(**changes: Any) -> dict[str, Any]:
    """A valid saved graph of two ops, with changes at the top."""
    return {
        "schema": "placement.opgraph",
        "version": 2,
        "name": "net",
        "ops": [{"name": "a", "flops": 1.0}, {"name": "b"}],
        "tensors": [{"producer": "a", "bytes": 4, "consumers": ["b"]}],
    } | changes


def with_ops(ops: list[Any]) -> dict[str, Any]:
    return document(ops=ops, tensors=[])


def written(folder: Path, content: Any) -> Path:
    path = folder / "graph.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# -- round trip -----------------------------------------------------------------------------------------------------


@given(graph=opgraphs())
def test_a_saved_graph_comes_back_equal(graph: OpGraph, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("saved") / "graph.json"
    save_graph(graph, path)
    assert load_json_graph(path) == graph
    assert load_json_graph(path).origin == graph.origin
    assert load_graph(path).hash == graph.hash


def test_the_file_is_readable(graph: OpGraph, tmp_path: Path) -> None:
    save_graph(graph, tmp_path / "g.json")
    lines = (tmp_path / "g.json").read_text().splitlines()
    start = '{"schema": "placement.opgraph", "version": 2, "name": "net", "origin": '
    assert lines[0] == start + '{"source": "unknown"},'
    assert len(lines) == 3 + graph.n_ops + graph.n_tensors
    (b,) = [line for line in lines if '"name": "b"' in line]
    assert '"phase": "backward"' in b
    assert "flops" not in b  # a default says nothing


def test_defaults_may_be_left_out(tmp_path: Path) -> None:
    loaded = load_json_graph(written(tmp_path, document()))
    assert loaded == OpGraph.build([Op("a", flops=1.0), Op("b")], [Tensor("a", 4, ("b",))], name="net")


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text("\ufeff" + json.dumps(document()), encoding="utf-8")
    assert load_graph(path).n_ops == 2


def test_reading_a_saved_graph_loads_neither_torch_nor_onnx(graph: OpGraph, tmp_path: Path) -> None:
    save_graph(graph, tmp_path / "g.json")
    code = (
        "import sys; from graphs.files import load_graph; load_graph(sys.argv[1]); "
        "print(sorted({'torch', 'onnx'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "g.json")]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    assert result.stdout.strip() == "[]"


# -- writing --------------------------------------------------------------------------------------------------------


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.txt"
    write_atomically(path, "old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file.txt"]


def test_text_bytes_and_permissions(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    write_atomically(path, "gr\u00fcn")
    assert path.read_bytes() == "gr\u00fcn".encode()
    plain = tmp_path / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode
    path.chmod(0o600)
    write_atomically(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_missing_folder_is_an_error(graph: OpGraph, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        save_graph(graph, tmp_path / "no" / "g.json")


# -- errors ---------------------------------------------------------------------------------------------------------


def test_every_truncation_of_a_saved_graph_is_said_to_be_one(graph: OpGraph, tmp_path: Path) -> None:
    save_graph(graph, tmp_path / "g.json")
    text = (tmp_path / "g.json").read_text().rstrip()
    for length in range(1, len(text)):
        with pytest.raises(
            GraphFileError, match=r"is truncated: the JSON breaks off at line \d+, column \d+|is not JSON"
        ):
            read_json(written(tmp_path, text[:length]))
    with pytest.raises(GraphFileError, match=r"truncated.*line 4"):
        read_json(written(tmp_path, text[: text.index('"forward_of"')]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ('{"schema": nonsense}', "is not JSON: Expecting value at line 1, column 12"),
        ('{"schema": "placement.opgraph",\n "version": 2} trailing', "is not JSON: Extra data at line 2, column"),
        ('{"flops": NaN}', "holds NaN, which is not a JSON number"),
        ("[" * 100_000, "nests too deeply"),
        ("[1" + "0" * 5000 + "]", "holds a number that cannot be read"),
        ([1, 2], 'is not a saved graph: expected "schema": "placement.opgraph", it has no schema'),
        (document(schema="other"), "it has schema 'other'"),
        (document(version=4), "is of version 4; this release reads versions 2 and 3, make the graph anew with"),
        (document(version=3), "the graph has ops = .*; expected a whole number"),
        (document(origin=[]), r"the graph has origin = \[\]; expected an object"),
        (document(origin={"made": 1}), "the origin has unknown field 'made'; known: source, train"),
        (document(origin={"train": 1}), "the origin has train = 1; expected true, false or nothing"),
        (with_ops([{"name": "a", "parameter_bytes": 1, "kept_bytes": 1}]), "op 'a' has kept_bytes and parameter_bytes"),
        (with_ops([{"name": "a", "kept_bytes": 1, "gradient_bytes": 2}]), "op 'a' has parameter_bytes = -1"),
        (with_ops([{"name": "a", "gradient_bytes": 2**62}]), r"add up to .* of op 'a'; expected less than 2\*\*62"),
        (with_ops([{"name": "a", "split_rows": ["R"]}]), "split row 'R' cannot be read"),
        (with_ops([{"name": "a", "split_rows": ["R->R"]}]), "op 'a' has split row 'R->R'; expected 0 inputs"),
        (document(tensors=[{"producer": "a", "bytes": 4, "in_place": 1}]), "has in_place = 1; expected true or false"),
        (document(version=None), "is of version None"),
        (document(extra=1), "the graph has unknown field 'extra'; known: schema, version"),
        (document(ops={}), "the graph has ops = {}; expected a list"),
        ({k: v for k, v in document().items() if k != "tensors"}, "the graph has no 'tensors'"),
        (with_ops([]), "has no ops"),
        (with_ops(["a"]), r"ops\[0\] is 'a'; expected an object with name"),
        (with_ops([{"name": "a"}, {}]), r"ops\[1\] has no 'name'"),
        ('{"schema": "placement.opgraph", "version": 2, "version": 2}', "the graph has 'version' twice"),
        (
            '{"schema": "placement.opgraph", "ops": [{"name": "a", "flops": 1, "flops": 2}]}',
            "op 'a' has 'flops' twice; remove one",
        ),
        (with_ops([{"name": "\ud800"}]), r"has name = '\\ud800'; expected a string of Unicode text"),
        (with_ops([{"name": "a", "pins": ["\udc00"]}]), r"has pins = \['\\udc00'\]"),
        (with_ops([{"name": 5}]), r"ops\[0\] has name = 5; expected a string"),
        (
            with_ops([{"name": "a", "flop": 1}]),
            "op 'a' has unknown field 'flop', did you mean 'flops'\\? Known: name, kind",
        ),
        (with_ops([{"name": "a", "flops": "1"}]), "op 'a' has flops = '1'; expected a number"),
        (with_ops([{"name": "a", "flops": True}]), "op 'a' has flops = True; expected a number"),
        (with_ops([{"name": "a", "kept_bytes": 1.0}]), "op 'a' has kept_bytes = 1.0; expected a whole number"),
        (with_ops([{"name": "a", "pins": "cpu"}]), "op 'a' has pins = 'cpu'; expected a list of strings"),
        (
            with_ops([{"name": "a", "phase": "x"}]),
            "op 'a' has phase = 'x'; expected one of forward, backward, update",
        ),
        (
            with_ops([{"name": "a", "time_s": {"*": 10**400}}]),
            r"op 'a' has time_s on '\*' = 1000.*; expected a finite",
        ),
        (with_ops([{"name": "a", "time_s": {"*": -(10**400)}}]), "expected a finite number, 0 or more"),
        (with_ops([{"name": "a", "time_s": 1}]), "op 'a' has time_s = 1; expected an object"),
        (with_ops([{"name": "a", "colocation": [1]}]), r"op 'a' has colocation = \[1\]"),
        (with_ops([{"name": "a"}, {"name": "a"}]), "op name 'a' appears twice"),
        (with_ops([{"name": "a", "kept_bytes": -4}]), "op 'a' has kept_bytes = -4"),
        (with_ops([{"name": "a", "kept_bytes": 10**30}]), "op 'a' has kept_bytes = 1000"),
        (with_ops([{"name": "a", "flops": 10**400}]), "op 'a' has flops = 1000"),
        (with_ops([{"name": "a", "forward_of": "z"}]), "forward_of of op 'a' is 'z'"),
        (document(tensors=[{"producer": "a"}]), r"tensors\[0\] has no 'bytes'"),
        (document(tensors=[{"producer": "a", "bytes": -4}]), "op 'a' has output bytes = -4"),
        (document(tensors=[{"producer": "z", "bytes": 4}]), "producer is 'z'"),
        (document(tensors=[{"producer": "a", "bytes": 4, "consumers": ["z"]}]), "a consumer of op 'a' is 'z'"),
        (document(tensors=[{"producer": "a", "bytes": 4, "consumers": ["a"]}]), "cycle: a -> a"),
    ],
)
def test_a_file_that_is_not_what_it_says(content: Any, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, content)
    with pytest.raises(GraphFileError, match=message) as caught:
        load_json_graph(path)
    said = str(caught.value)
    assert said.startswith(str(path))
    assert "\n" not in said
    assert len(said) < 400 + len(str(path))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(GraphFileError, match=r"cannot read .*none\.json: No such file"):
        load_graph(tmp_path / "none.json")
    with pytest.raises(GraphFileError, match=r"cannot read .*Is a directory"):
        load_graph(tmp_path)
    (tmp_path / "latin.json").write_bytes(b'{"name": "gr\xfcn"}')
    with pytest.raises(GraphFileError, match="is not a text file: byte 12 is not UTF-8"):
        load_graph(tmp_path / "latin.json")


@pytest.mark.parametrize("content", [b"", b"hello", b"\x93NUMPY", b"\x80\x04\x95"])
def test_an_unknown_format_lists_the_known_ones(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "thing.bin").write_bytes(content)
    with pytest.raises(GraphFileError, match=re.escape("(.json), a PipeDream profile (.txt), an ONNX model (.onnx)")):
        load_graph(tmp_path / "thing.bin")


def test_a_saved_graph_is_recognised_without_its_suffix(graph: OpGraph, tmp_path: Path) -> None:
    save_graph(graph, tmp_path / "graph")
    assert load_graph(tmp_path / "graph") == graph


def test_a_link_is_followed_and_a_pipe_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text(encoding="utf-8") == "new"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe or a device"):
        write_atomically(tmp_path / "pipe", "new")
    assert (tmp_path / "pipe").is_fifo()


def test_a_file_that_would_fill_the_memory_is_one_sentence(tmp_path: Path) -> None:
    with (tmp_path / "graph.json").open("wb") as file:
        file.truncate(20 << 30)  # takes no space on the disk
    with pytest.raises(GraphFileError, match=r"graph\.json has more than 2,147,483,648 bytes"):
        load_graph(tmp_path / "graph.json")
