"""From a command line to an exit code: errors nobody foresaw, misspelt words, and the command as a process."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from command_lines import CLUSTER, Call, process, refused

from graphs.errors import MismatchError
from placement.cli import output
from placement.inputs import sources
from placement.solving.interruption import as_keyboard_interrupt, is_interruption


def test_no_arguments_is_help(call: Call) -> None:
    assert call()[1] == call("--help")[1]


def test_an_error_that_nobody_foresaw(call: Call, graph_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise LookupError("of all things\nand more")

    monkeypatch.setattr(sources, "read_source", broken)
    refused(
        call("capture", graph_file, "--json"), "did not foresee (LookupError: of all things); PLACEMENT_TRACEBACK=1"
    )
    monkeypatch.setenv("PLACEMENT_TRACEBACK", "1")
    with pytest.raises(LookupError, match="of all things"):
        call("capture", graph_file, "--json")


def test_ctrl_c_in_a_compiled_function_is_ctrl_c() -> None:
    """What interrupts the Python code on its way out becomes the cause of another error."""

    @numba.njit(nogil=True)  # type: ignore[untyped-decorator]
    def slow(n: int) -> Any:
        found = np.zeros(3)
        for i in range(n):
            found[i % 3] += np.sin(i)
        return found

    slow(3)

    def forever() -> None:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            slow(30_000_000)

    with pytest.raises((SystemError, KeyboardInterrupt)) as caught:
        forever()
    assert is_interruption(caught.value)
    assert not is_interruption(SystemError("of its own"))
    with pytest.raises(KeyboardInterrupt):
        as_keyboard_interrupt()(forever)()
    with pytest.raises(SystemError, match="of its own"), as_keyboard_interrupt():
        raise SystemError("of its own")


def test_a_file_that_ends_too_early_is_no_interruption(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "read_source", lambda *_, **__: (_ for _ in ()).throw(EOFError("cut")))
    code, _, err = call("capture", "alexnet", "--json")
    assert (code, "did not foresee (EOFError: cut)" in err, "interrupted" in err) == (2, True, False)


def test_the_command_line_gives_no_advice_in_python(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = call("optimize", "alexnet", "--cluster", "4xV100-pcie", "--scorer", "execute")
    assert code == 2
    assert "Cluster.local" not in err
    assert "`placement calibrate --devices 2`" in err
    error = MismatchError("it is so; pass x={}.").but_on_command_line("it is so; give --x.")
    assert str(error) == "it is so; pass x={}."
    monkeypatch.setattr(sources, "read_source", lambda *_, **__: (_ for _ in ()).throw(error))
    assert call("capture", "alexnet", "--json")[2] == "placement: it is so; give --x.\n"


def test_the_command_as_a_process(graph_file: Path, tmp_path: Path) -> None:
    started = process("compare", graph_file, *CLUSTER, "--json", cwd=tmp_path)
    out, err = started.communicate(timeout=300)
    assert (started.returncode, err) == (0, "")
    assert json.loads(out)["graph"] == "branches"


def test_a_reader_who_leaves_is_no_error(tmp_path: Path) -> None:
    started = process("clusters", "--json", cwd=tmp_path)
    assert started.stdout is not None
    assert started.stderr is not None
    started.stdout.close()
    err = started.stderr.read()
    started.stderr.close()
    assert started.wait(timeout=300) == 141
    assert err == ""


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\ndef f():\n    open('started', 'w').close()\n    time.sleep(600)\n", encoding="utf-8"
    )
    started = process("capture", "slow.py:f", "-o", "out.json", cwd=tmp_path)
    while not (tmp_path / "started").exists():
        assert started.poll() is None
        time.sleep(0.02)
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=300)
    assert (started.returncode, out, err.strip()) == (130, "", "placement: interrupted; no file is half-written.")
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "__pycache__") == ["slow.py", "started"]


def test_progress_tells_a_pipe_what_is_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "EVERY_S", 0.01)
    told = threading.Event()
    with output.progress("searching", 3) as say:
        say("placing", 2)
        while "placing, 2 of 3" not in capsys.readouterr().err:
            told.wait(0.01)
