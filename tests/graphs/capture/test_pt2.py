"""The reader of `.pt2` files: exported programs are read, and nothing that an archive brings is run."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import resource
import struct
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from graphs.capture import costs, from_exported_program
from graphs.errors import CaptureError, GraphFileError
from graphs.files import load_graph
from graphs.readers.pt2 import is_harmless, plain_program, read_pt2
from placement.cli.entry import run


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small program with a symbolic size, a buffer and a constant."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.register_buffer("shift", torch.ones(3))

        def forward(self, x: Any) -> Any:
            return self.linear(x.reshape(-1, 4)).relu() + self.shift * torch.tensor([1.0, 2.0, 3.0])

    n = torch.export.Dim("n", min=2, max=64)
    program = torch.export.export(Net(), (torch.ones(8, 4),), dynamic_shapes=({0: 2 * n},))
    path = tmp_path_factory.mktemp("exported") / "net.pt2"
    torch.export.save(program, path)
    return path


def rewritten(source: Path, target: Path, change: dict[str, Any]) -> Path:
    """A copy of an archive; `change` maps the end of a member's name to new bytes, or a function of the old."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            value = next((new for end, new in change.items() if name.endswith(end)), old.read(name))
            new.writestr(name, value(old.read(name)) if callable(value) else value)
    return target


def test_pt2_program(exported: Path) -> None:
    graph = load_graph(exported)
    assert graph.name == "net"
    assert (graph.origin.source, graph.origin.train, graph.origin.granularity) == ("pt2", False, "op")
    linear = next(op for op in graph.records()[0] if op.kind == "aten.linear")
    assert linear.flops == 2 * 8 * 4 * 3
    assert linear.kept_bytes == 4 * (4 * 3 + 3)


def test_pt2_operators_made_of_endless_calls_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Differences(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.diff(x, n=5)

    path = tmp_path / "net.pt2"
    torch.export.save(torch.export.export(Differences(), (torch.ones(2, 1_500_007),)), path)
    assert load_graph(path).n_ops == 2
    evil = rewritten(path, tmp_path / "evil.pt2", {"model.json": lambda old: old.replace(b": 5}", b": 1000000}")})
    monkeypatch.setattr(costs, "MOST_CALLS", 1000)
    with pytest.raises(
        CaptureError, match=r"evil\.pt2: aten\.diff is made of too many calls .* capture the model itself"
    ):
        load_graph(evil)


class Touch:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def pickled_by_torch(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def as_pickled(config: bytes) -> bytes:
    document = json.loads(config)
    next(iter(document["config"].values()))["use_pickle"] = True
    return json.dumps(document).encode()


def harmful(folder: Path) -> bytes:
    return pickled_by_torch(Touch(folder / "ran"))


def assert_not_run(folder: Path) -> None:
    assert not (folder / "ran").exists()
    pickle.loads(pickle.dumps(Touch(folder / "ran")))  # the trap does work
    assert (folder / "ran").exists()


def test_pt2_pickled_weight_is_refused(exported: Path, tmp_path: Path) -> None:
    change = {"weight_0": harmful(tmp_path), "model_weights_config.json": as_pickled}
    path = rewritten(exported, tmp_path / "bad.pt2", change)
    with pytest.raises(
        GraphFileError, match=r"bad\.pt2 is refused: .* run code from the file; capture the model in Python"
    ):
        read_pt2(path)
    assert_not_run(tmp_path)


@pytest.mark.parametrize("part", ["sample_inputs/model.pt", "weight_0", "tensor_0"])
def test_pt2_pickles_that_no_graph_needs_are_not_read(part: str, exported: Path, tmp_path: Path) -> None:
    path = rewritten(exported, tmp_path / "net.pt2", {part: harmful(tmp_path)})
    assert read_pt2(path).hash == read_pt2(exported).hash
    assert_not_run(tmp_path)


# -- an archive that two readers take for two -----------------------------------------------------------------------


def archive(source: Path, change: dict[str, Any]) -> tuple[bytes, bytes, int]:
    """The members of an archive, its central directory, and the number of its entries."""
    data = rewritten(source, source.with_suffix(".changed"), change).read_bytes()
    end = data.rfind(b"PK\5\6")
    count, size, start = struct.unpack("<HII", data[end + 10 : end + 20])
    return data[:start], data[start : start + size], count


def moved(directory: bytes, by: int) -> bytes:
    changed, at = bytearray(directory), 0
    while at < len(changed):
        lengths = struct.unpack("<HHH", changed[at + 28 : at + 34])
        (offset,) = struct.unpack("<I", changed[at + 42 : at + 46])
        changed[at + 42 : at + 46] = struct.pack("<I", offset + by)
        at += 46 + sum(lengths)
    return bytes(changed)


def zip64_record(count: int, size: int, start: int) -> bytes:
    return struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)


def last_record(count: int, size: int, start: int) -> bytes:
    return struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, count, count, size, start, 0)


def prefixed(evil: tuple[bytes, bytes, int], good: tuple[bytes, bytes, int]) -> bytes:
    """`zipfile` counts from where the second archive begins, PyTorch's reader from the beginning of the file."""
    (evil_body, evil_directory, _), (body, directory, count) = evil, good
    gap = bytes(len(evil_body) - len(body))
    return evil_body + evil_directory + body + gap + directory + last_record(count, len(directory), len(evil_body))


def by_locator(evil: tuple[bytes, bytes, int], good: tuple[bytes, bytes, int], ordinary: bool) -> bytes:
    """`zipfile` looks for the zip64 record before the locator, PyTorch's reader where the locator says it is."""
    (evil_body, evil_directory, count), (body, directory, _) = evil, good
    front = evil_body + evil_directory
    at = len(front)
    front += zip64_record(count, len(evil_directory), len(evil_body))
    start = len(front) + len(body)
    directory = moved(directory, len(front))
    result = front + body + directory + zip64_record(count, len(directory), start)
    result += struct.pack("<4sIQI", b"PK\6\7", 0, at, 1)
    return result + (
        last_record(count, len(directory), start) if ordinary else last_record(65535, 2**32 - 1, 2**32 - 1)
    )


def with_zip64_locator(evil: tuple[bytes, bytes, int], good: tuple[bytes, bytes, int]) -> bytes:
    return by_locator(evil, good, ordinary=False)


def with_ordinary_counts(evil: tuple[bytes, bytes, int], good: tuple[bytes, bytes, int]) -> bytes:
    return by_locator(evil, good, ordinary=True)


def as_pickled_buffer(config: bytes) -> bytes:
    document = json.loads(config)
    document["config"]["shift"]["use_pickle"] = True
    return json.dumps(document).encode()


@pytest.mark.parametrize("form", [prefixed, with_zip64_locator, with_ordinary_counts])
@pytest.mark.parametrize(("weight", "mark"), [("weight_0", as_pickled), ("weight_2", as_pickled_buffer)])
@pytest.mark.parametrize("by_command", [False, True])
def test_pt2_of_two_directories(
    form: Callable[..., bytes], weight: str, mark: Any, by_command: bool, exported: Path, tmp_path: Path
) -> None:
    evil = archive(exported, {weight: harmful(tmp_path), "model_weights_config.json": mark})
    path = tmp_path / "two.pt2"
    path.write_bytes(form(evil, archive(exported, {})))
    if by_command:
        assert run(["capture", str(path), "--output", str(tmp_path / "two.json")]) in (0, 2)
    else:
        with contextlib.suppress(GraphFileError):
            assert read_pt2(path).hash == read_pt2(exported).hash  # what was inspected is what was loaded
    assert_not_run(tmp_path)


def test_pt2_of_two_parts_of_one_name(exported: Path, tmp_path: Path) -> None:
    for name in ("net/models/MODEL.json", "net/models/model.json"):
        path = rewritten(exported, tmp_path / "twice.pt2", {})
        with zipfile.ZipFile(path, "a") as changed, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # zipfile warns of what it writes
            changed.writestr(name, b"{}")
        with pytest.raises(GraphFileError, match=r"twice\.pt2 is refused: two of its parts have one name"):
            read_pt2(path)


def test_pt2_compressed_parts_are_refused(exported: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(exported) as old, zipfile.ZipFile(tmp_path / "small.pt2", "w", zipfile.ZIP_DEFLATED) as new:
        assert {member.compress_type for member in old.infolist()} == {zipfile.ZIP_STORED}  # as PyTorch writes them
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(GraphFileError, match=r"small\.pt2 has a compressed part .*; save the program again"):
        read_pt2(tmp_path / "small.pt2")


def test_pt2_name_that_is_no_text(exported: Path, tmp_path: Path) -> None:
    data = exported.read_bytes().replace(b"net/byteorder", b"net/byte\xff\xfeder")
    (tmp_path / "odd.pt2").write_bytes(data)
    with pytest.raises(GraphFileError, match=r"odd\.pt2 is truncated or not a \.pt2 archive"):
        read_pt2(tmp_path / "odd.pt2")


# -- texts that PyTorch makes source of, evaluates or looks up ------------------------------------------------------


def in_program(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    def changed(content: bytes) -> bytes:
        document = json.loads(content)
        change(document)
        return json.dumps(document).encode()

    return changed


def test_pt2_names_become_no_source(exported: Path, tmp_path: Path) -> None:
    call = f"x=__import__('pathlib').Path({str(tmp_path / 'ran')!r}).touch()"
    for old, new in (('"x"', call), ('"kind": 1', None), ('"relu"', f"a; {call}")):
        text = replaced(old, json.dumps(new) if new else f'"kind": 2, "name": {json.dumps(call)}')
        path = rewritten(exported, tmp_path / "bad.pt2", {"models/model.json": text})
        with pytest.raises(GraphFileError, match=r"bad\.pt2 is refused: it has a name .*__import__"):
            read_pt2(path)
    assert_not_run(tmp_path)


@pytest.mark.parametrize("by", ["defaultdict", "enum"])
def test_pt2_tree_specifications_import_nothing(
    by: str, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trap_of_a_tree.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    context: Any = {"default_factory_module": "trap_of_a_tree", "default_factory_name": "x", "dict_context": []}
    if by == "enum":
        context = json.dumps([{"__enum__": True, "fqn": "trap_of_a_tree:A.B", "name": "C"}])
    kind = "collections.defaultdict" if by == "defaultdict" else "builtins.dict"

    def change(document: dict[str, Any]) -> None:
        signature = document["graph_module"]["module_call_graph"][0]["signature"]
        signature["in_spec"] = json.dumps([1, {"type": kind, "context": context, "children_spec": []}])
        document["guards_code"] = ["__import__('trap_of_a_tree')"]

    path = rewritten(exported, tmp_path / "net.pt2", {"models/model.json": in_program(change)})
    assert read_pt2(path).hash == read_pt2(exported).hash
    assert "trap_of_a_tree" not in sys.modules
    assert_not_run(tmp_path)


@pytest.mark.parametrize(
    "size",
    [
        "Symbol('s0', positive=True, integer=True)",
        "Add(FloorDiv(Add(Symbol('s65', positive=True, integer=True), Integer(-1)), Integer(2)), Integer(1))",
        "Mul(Integer(4), Pow(Symbol('s0', positive=True, integer=True), Integer(2)))",
        "Pow(Add(Symbol('s0'), Integer(1)), Rational(1, 2))",
        "Mul(Float('0.5', precision=53), ToFloat(Symbol('u0', integer=True)))",
        "Max(1, Symbol('s0')) * 2 - 7",
        "Max(Min(Max(Symbol('s0'), 4), Symbol('s1'), Integer(2)), Symbol('s2'), 1)",
        "Mul(Integer(1048576), Integer(4096), Integer(1000000))",
    ],
)
def test_sizes_that_are_arithmetic(size: str) -> None:
    assert is_harmless(size)


@pytest.mark.parametrize(
    "size",
    [
        "9**9**9**9",
        "Pow(Integer(9), Pow(Integer(9), Integer(10)))",
        "Pow(Pow(Pow(Integer(9), 64), 64), 64)",
        "Pow(2, Symbol('s0'))",
        "Pow(Add(a, b, c), 60)",
        "Mul(" + ", ".join(["Add(a, b)"] * 30) + ")",
        "LShift(1, 999999999999)",
        "1 << 99999999",
        "RoundDecimal(Integer(5), Integer(-1000000000))",
        "Float('0.1', 1000000000)",
        "Float('0.1', precision=1000000000)",
        "Integer(" + "9" * 4000 + ")",
        "Integer('" + "9" * 100 + "')",
        "1e9999",
        "Symbol('s0') + 1" * 1000,
        "(" * 1000 + "1" + ")" * 1000,
        "exec('1')",
        "x.y",
        "[1]",
        "(lambda: 1)()",
        "Symbol('__import__(1)')",
        "Integer(__import__('os'))",
        "Max(" + ", ".join(f"s{i}" for i in range(200)) + ")",
        "Min(Max("
        + ", ".join(f"s{i}" for i in range(25))
        + "), "
        + "Max("
        + ", ".join(f"u{i}" for i in range(25))
        + "))",
        "",
    ],
)
def test_sizes_that_are_not_arithmetic_or_much_work(size: str) -> None:
    assert not is_harmless(size)


@pytest.mark.parametrize("size", ["u999999999", "u99999_99999", "zuf99999_99999", "u 999999999", "s0 + u999999999"])
def test_pt2_ranges_of_many_symbols_are_left_out(size: str, exported: Path, tmp_path: Path) -> None:
    document = {"graph_module": {}, "range_constraints": {size: {}, "s69": {}, "u12": {}, "2*s69": {}}}
    assert list(plain_program(document, "x.pt2")["range_constraints"]) == ["s69", "u12"]
    many = in_program(lambda document: document["range_constraints"].update({size: {"min_val": 0, "max_val": 1}}))
    path = rewritten(exported, tmp_path / "many.pt2", {"models/model.json": many})
    assert read_pt2(path).hash == read_pt2(exported).hash


@pytest.mark.parametrize("calls", ["tensor_split", "unbind", "chunk", "split"])
def test_pt2_lists_of_as_many_tensors_as_the_program_names(calls: str, tmp_path: Path) -> None:
    """Their number is in an argument or a size, and the operator is not run to see."""

    class Parts(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.cat([getattr(x, calls)(*([] if calls == "unbind" else [2]))[0].relu()] * 2)

    def change(document: dict[str, Any]) -> None:
        graph = document["graph_module"]["graph"]
        graph["tensor_values"]["x"]["sizes"][0]["as_int"] = 10**12
        for argument in graph["nodes"][0]["inputs"][1:]:
            argument["arg"] = {"as_int": 10**9 if calls != "split" else 1}

    torch.export.save(torch.export.export(Parts(), (torch.ones(4, 3),)), tmp_path / "parts.pt2")
    graph = read_pt2(tmp_path / "parts.pt2")
    path = rewritten(tmp_path / "parts.pt2", tmp_path / "many.pt2", {"models/model.json": in_program(change)})
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (6 * 2**30, limits[1]))  # so that this fails, and not the machine
    try:
        assert read_pt2(path).n_ops == graph.n_ops
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


def test_pt2_refusals_log_nothing(exported: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for size in ("quit", "And(a < b, b < c)"):
        change = in_program(lambda document, size=size: with_size(document, size))  # type: ignore[misc]
        with pytest.raises(GraphFileError, match="cannot be read by PyTorch"):
            read_pt2(rewritten(exported, tmp_path / "bad.pt2", {"models/model.json": change}))
    assert caplog.records == []


def with_size(value: Any, size: str) -> None:
    """Every symbolic size in a program becomes this one."""
    if isinstance(value, dict) and "expr_str" in value:
        value["expr_str"] = size
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            with_size(inner, size)


def of_size(*dims: int) -> Callable[[bytes], bytes]:
    def change(document: dict[str, Any]) -> None:
        meta = next(iter(document["config"].values()))["tensor_meta"]
        meta["sizes"] = [{"as_int": dim} for dim in dims]
        meta["strides"] = [{"as_int": dims[1]}, {"as_int": 1}]

    return in_program(change)


def test_pt2_weights_take_no_memory(exported: Path, tmp_path: Path) -> None:
    """As programs that were exported without memory for their weights have them."""
    change = {"weight_0": b"", "model_weights_config.json": of_size(2**20, 2**20)}
    assert read_pt2(rewritten(exported, tmp_path / "huge.pt2", change)).kept_bytes.sum() > 2**42


@pytest.mark.parametrize("dims", [(30000, 100000), (2**40, 2**40), (2**62, 1), (-1, 4)])
def test_pt2_sizes_beyond_the_bytes_there_are(dims: tuple[int, int], exported: Path, tmp_path: Path) -> None:
    path = rewritten(exported, tmp_path / "bad.pt2", {"model_weights_config.json": of_size(*dims)})
    with pytest.raises(GraphFileError, match=r"'linear\.weight' in .* is not of a size that its 48 bytes can have"):
        read_pt2(path)


@pytest.mark.filterwarnings("ignore:The tensor attributes", "ignore:No complete tensor")
def test_pt2_gives_the_graph_that_pytorch_gives(exported: Path, tmp_path: Path) -> None:
    class Tied(nn.Module):
        """Tied weights, a view of a part of one, recurrent weights in one piece of memory, control flow."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.second.weight = self.first.weight
            self.part = self.first.weight.data.flatten()[3:11]
            self.layers = nn.ModuleDict({"a-b": nn.LSTM(8, 8)})

        def forward(self, given: dict[str, Any]) -> dict[str, Any]:
            x = self.second(self.first(given["some input"])) * self.part
            with torch.autocast("cpu"):  # one of the functions that take functions
                x = x @ self.first.weight
            x = x.float()
            return {"some output": self.layers["a-b"](x)[0].masked_fill(x > 0, float("inf"))}

    program = torch.export.export(Tied().eval(), ({"some input": torch.ones(2, 8)},))
    torch.export.save(program, tmp_path / "tied.pt2", extra_files={"notes": "any"})
    for path in (exported, tmp_path / "tied.pt2"):
        assert read_pt2(path).hash == from_exported_program(torch.export.load(path), path.stem).hash


def replaced(old: str, new: str) -> Any:
    def change(content: bytes) -> bytes:
        assert old.encode() in content
        return content.replace(old.encode(), new.encode())

    return change


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("models/model.json", replaced("torch.ops.aten.relu.default", "torch.hub.load"), "calls 'torch.hub.load'"),
        ("models/model.json", replaced("torch.ops.aten.relu.default", "os.system"), "calls 'os.system'"),
        ("models/model.json", replaced("Integer(2)", "exec('1')"), r"has a size .*exec.* which is not arithmetic"),
        ("models/model.json", replaced("Integer(2)", "x.y"), "which is not arithmetic"),
        ("model_constants_config.json", replaced("tensor_0", "opaque_obj_0"), "is a pickled object"),
        ("models/model.json", lambda content: content[:-20], r"is damaged: its part .*model\.json is not JSON"),
    ],
)
def test_pt2_refusals(part: str, change: Any, message: str, exported: Path, tmp_path: Path) -> None:
    with pytest.raises(GraphFileError, match=message):
        read_pt2(rewritten(exported, tmp_path / "bad.pt2", {part: change}))


def test_pt2_with_compiled_code_is_refused(exported: Path, tmp_path: Path) -> None:
    path = rewritten(exported, tmp_path / "bad.pt2", {})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("net/data/aotinductor/model/run.so", b"\x7fELF")
    with pytest.raises(GraphFileError, match=r"it has a part 'data/aotinductor/model/run\.so'"):
        read_pt2(path)


def test_pt2_from_another_version(exported: Path, tmp_path: Path) -> None:
    path = rewritten(exported, tmp_path / "old.pt2", {"archive_version": b"999"})
    with pytest.raises(GraphFileError, match=r"old\.pt2 cannot be read by PyTorch .*; export it again"):
        read_pt2(path)


def test_pt2_that_is_none(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "a.pt2").write_bytes(b"not a zip")
    with pytest.raises(GraphFileError, match=r"a\.pt2 is not an exported program: it is no zip archive"):
        load_graph(tmp_path / "a.pt2")
    (tmp_path / "b.pt2").write_bytes(exported.read_bytes()[:500])
    with pytest.raises(GraphFileError, match=r"b\.pt2 is truncated or not a \.pt2 archive"):
        load_graph(tmp_path / "b.pt2")
    with zipfile.ZipFile(tmp_path / "c.pt2", "w") as archive:
        archive.writestr("version", "1")
    with pytest.raises(GraphFileError, match="holds 0 exported programs"):
        load_graph(tmp_path / "c.pt2")
