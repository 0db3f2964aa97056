"""train: what it makes, that it goes on exactly where it was cut off, and what it refuses. With the smallest policy."""

from __future__ import annotations

import io
import json
import math
import signal
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import softmax_policy
import torch
from small_problems import PAIR, cluster_of, device, two_branches
from training_runs import Killed, after, fans, kill

from env.cluster import Cluster, both_ways
from env.problem import Problem
from graphs.errors import InfeasibleError, MismatchError, PolicyFileError, UnknownNameError
from graphs.generators import layered
from placement import verify
from placement.learning.learners.registry import make_learner
from placement.learning.policies.policy_file import load_policy
from placement.learning.policies.registry import POLICIES
from placement.learning.session import Checkpoint, Files, Status, load_checkpoint, save_checkpoint
from placement.learning.training import Training, train
from placement.results.result import Result

TIMESTEPS = 160


@pytest.fixture(autouse=True)
def the_smallest_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    softmax_policy.in_the_place_of_hierarchical(monkeypatch)


def weights(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read("weights.safetensors")


# -- what it makes ----------------------------------------------------------------------------------------------


def test_it_makes_a_policy_file_and_a_placement_that_verifies(tmp_path: Path) -> None:
    output = tmp_path / "policy.zip"
    told: list[Status] = []
    found = train(fans(), PAIR, output=output, evaluations=TIMESTEPS, progress=told.append, command="as typed")
    assert (found.samples, found.resumed_from, found.interrupted, found.proven) == (TIMESTEPS, 0, False, False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy.best.json", "policy.curve.csv", "policy.zip"]
    (result,) = found.results
    assert result is not None
    assert Result.load(found.result_files[0]) == result
    assert verify(result).holds
    assert (result.method, result.chosen, result.evaluations) == ("hierarchical", "hierarchical", TIMESTEPS)
    assert result.command == "as typed"
    assert [point.samples for point in found.curve] == list(range(8, TIMESTEPS + 1, 8))
    best = [point.best_s for point in found.curve]
    assert best == sorted(best, reverse=True)
    assert best[-1] == result.step_time_s
    assert len(told) == len(found.curve)
    assert told[-1].left_s == 0
    assert told[-1].best_s == (result.step_time_s,)


def test_it_learns(tmp_path: Path) -> None:
    found = train(fans(), PAIR, output=tmp_path / "policy.zip", evaluations=1600)
    means = [point.mean_s for point in found.curve]
    assert sum(means[-10:]) < 0.95 * sum(means[:10])  # type: ignore[arg-type]


def test_every_graph_is_placed_on_every_cluster(tmp_path: Path) -> None:
    slow = Cluster("slow", PAIR.devices, tuple(both_ways("gpu0", "gpu1", 1e4, 0.0)))
    found = train([fans(), fans(name="more")], [PAIR, slow], output=tmp_path / "p.zip", evaluations=64)
    assert found.labels == ("fans on pair", "fans on slow", "more on pair", "more on slow")
    assert [path.name for path in found.result_files] == [f"p.best.{k}.json" for k in range(1, 5)]
    for result, label in zip(found.results, found.labels, strict=True):
        assert result is not None
        assert f"{result.graph_name} on {result.cluster_name}" == label
        assert verify(result).holds


def test_it_ends_at_a_proven_gap_of_0(tmp_path: Path) -> None:
    found = train(two_branches(), PAIR, output=tmp_path / "policy.zip", budget_s=600)
    assert found.proven
    assert found.results[0].gap == 0  # type: ignore[union-attr]


def test_a_graph_of_which_no_placement_fits_has_no_result(tmp_path: Path) -> None:
    """Half of the ops fit on a device; with a seed of eight bad draws there is nothing to write."""
    tight = two_branches(kept_bytes=40 * 2**20)
    found = train(tight, PAIR, output=tmp_path / "policy.zip", evaluations=0)
    assert found.results == (None,)
    assert not (tmp_path / "policy.best.json").exists()


def test_the_log_is_for_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(fans(), PAIR, output=tmp_path / "policy.zip", evaluations=TIMESTEPS, log_dir=tmp_path / "log")
    events = EventAccumulator(str(tmp_path / "log"))
    events.Reload()
    tags = {"fans/best_s", "fans/mean_s", "fans/feasible", "policy/entropy", "speed/samples_per_s"}
    assert set(events.Tags()["scalars"]) == tags
    assert [event.step for event in events.Scalars("fans/best_s")] == list(range(8, TIMESTEPS + 1, 8))


# -- cut off and gone on with -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [8, 80, TIMESTEPS])
def test_a_killed_run_goes_on_to_the_same_result(tmp_path: Path, cut: int) -> None:
    whole = train(fans(), PAIR, output=tmp_path / "whole.zip", evaluations=TIMESTEPS)
    output = tmp_path / "cut.zip"
    asked: dict[str, Any] = {"output": output, "evaluations": TIMESTEPS, "checkpoint_every_s": 0.0}
    with pytest.raises(Killed):
        train(fans(), PAIR, progress=after(cut, kill), **asked)
    assert not output.exists()
    assert (tmp_path / "cut.best.json").exists()
    assert (tmp_path / "cut.checkpoint").exists() == (cut > 8)  # the first update's had no time to be written
    again = train(fans(), PAIR, **asked)
    assert again.resumed_from == cut - 8
    assert again.curve == whole.curve
    assert again.results == whole.results
    assert output.read_bytes() == (tmp_path / "whole.zip").read_bytes()
    assert not (tmp_path / "cut.checkpoint").exists()


def test_ctrl_c_keeps_what_is_learned_and_the_same_call_goes_on(tmp_path: Path) -> None:
    output = tmp_path / "policy.zip"
    stop = after(80, lambda: signal.raise_signal(signal.SIGINT))
    first = train(fans(), PAIR, output=output, evaluations=TIMESTEPS, progress=stop)
    assert (first.interrupted, first.samples) == (True, 80)
    assert first.results[0].interrupted  # type: ignore[union-attr]
    assert load_policy(output).origin.samples == 80
    second = train(fans(), PAIR, output=output, evaluations=TIMESTEPS)
    assert (second.interrupted, second.samples, second.resumed_from) == (False, TIMESTEPS, 80)
    whole = train(fans(), PAIR, output=tmp_path / "whole.zip", evaluations=TIMESTEPS)
    assert weights(output) == weights(tmp_path / "whole.zip")
    assert second.results == whole.results
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_time_before_a_checkpoint_counts(tmp_path: Path) -> None:
    output = tmp_path / "policy.zip"
    train(fans(), PAIR, output=output, evaluations=800, progress=after(80, lambda: signal.raise_signal(signal.SIGINT)))
    path = tmp_path / "policy.checkpoint"
    saved = load_checkpoint(path, {})
    save_checkpoint(path, replace(saved, seconds=1000.0))
    again = train(fans(), PAIR, output=output, budget_s=900)
    assert (again.samples, again.resumed_from) == (80, 80)
    assert again.seconds > 1000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "of another run (seed 0 there, 1 here)"),
        ({"warm_start": False}, "(warm start True there, False here)"),
        ({"graphs": [fans(name="other")]}, "(graphs fans ("),
        ({"clusters": [cluster_of(device("a"), device("b"))]}, "(clusters pair ("),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    asked = {"graphs": [fans()], "clusters": [PAIR], "output": tmp_path / "policy.zip", "evaluations": TIMESTEPS}
    train(**asked, progress=after(80, lambda: signal.raise_signal(signal.SIGINT)))  # type: ignore[arg-type]
    with pytest.raises(PolicyFileError) as caught:
        train(**(asked | changes))  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert str(caught.value).endswith("start anew with --restart, or choose another --output.")
    anew = train(**(asked | changes), restart=True)  # type: ignore[arg-type]
    assert (anew.resumed_from, anew.samples) == (0, TIMESTEPS)


def test_a_checkpoint_cut_short_is_refused_and_restart_helps(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"output": tmp_path / "policy.zip", "evaluations": TIMESTEPS}
    train(fans(), PAIR, progress=after(80, lambda: signal.raise_signal(signal.SIGINT)), **asked)
    path = tmp_path / "policy.checkpoint"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(PolicyFileError, match=r"policy.checkpoint is cut short or .* start anew with --restart\.$"):
        train(fans(), PAIR, **asked)
    assert train(fans(), PAIR, restart=True, **asked).samples == TIMESTEPS


# -- policy files -----------------------------------------------------------------------------------------------


@pytest.fixture
def policy_file(tmp_path: Path) -> Path:
    return train(fans(), PAIR, output=tmp_path / "policy.zip", evaluations=80, seed=3, command="as typed").policy_file


def test_a_policy_file_says_where_it_comes_from_and_holds_the_policy(policy_file: Path) -> None:
    loaded = load_policy(policy_file)
    origin = loaded.origin
    assert (origin.preset, origin.warm_start, origin.seed, origin.samples) == ("default", True, 3, 80)
    assert origin.graphs == (("fans", fans().hash),)
    assert origin.clusters == (("pair", PAIR.hash),)
    assert origin.command == "as typed"
    assert origin.versions["torch"] == torch.__version__
    assert isinstance(loaded.policy, softmax_policy.SoftmaxPolicy)
    learner = make_learner("hierarchical", [Problem(fans(), PAIR)], 3)
    while learner.samples < 80:
        learner.update()
    assert torch.equal(loaded.policy.logits, learner.policy.logits)  # type: ignore[arg-type]


def test_a_policy_file_of_version_0_1_is_read() -> None:
    """Its policy places as it did when the file was written."""
    loaded = load_policy(Path(__file__).parents[1] / "data" / "policy_v1.zip")
    assert (loaded.origin.seed, loaded.origin.samples, loaded.origin.graphs) == (3, 64, (("g", "h"),))
    assert (loaded.origin.command, loaded.origin.note) == ("as typed", "")
    problem = Problem(layered(30, 1), Cluster.preset("4xV100-pcie"))
    placed = loaded.policy.propose(problem, 1, torch.Generator(), greedy=True).device[0]
    assert "".join(map(str, placed.tolist())) == "210303011013100131120121220231"


def test_loading_leaves_the_random_numbers_of_torch_alone(policy_file: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    load_policy(policy_file)
    assert torch.rand(1) == expected


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    record = json.loads(members["policy.json"])
    change(record)
    members["policy.json"] = json.dumps(record).encode()
    pack(path, members)


def pack(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def pickled(path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, path)


def bomb(path: Path) -> None:
    pack(path, {"policy.json": b"{}", "weights.safetensors": b"\0" * 10**7}, zipfile.ZIP_DEFLATED)


def odd_member(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("../evil.py", "")


def shorter(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 0xFF
    path.write_bytes(bytes(data))


def of_places_before_the_file(path: Path) -> None:
    data = bytearray(path.read_bytes())
    at = data.rfind(b"PK\5\6") + 16
    (start,) = struct.unpack("<I", data[at : at + 4])
    data[at : at + 4] = struct.pack("<I", start + 96)
    path.write_bytes(bytes(data))


def no_numbers(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        text, tensors = archive.read("policy.json"), safetensors.torch.load(archive.read("weights.safetensors"))
    tensors["logits"][0, 0] = math.nan
    pack(path, {"policy.json": text, "weights.safetensors": safetensors.torch.save(tensors)})


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (shorter, "is cut short or damaged, expected a policy file"),
        (flipped, "is cut short or damaged, expected a policy file"),
        (of_places_before_the_file, "is cut short or damaged, expected a policy file"),
        (Path.unlink, "No such file or directory; check the path"),
        (lambda path: path.write_bytes(b""), "is not a policy file, which `placement train` writes"),
        (lambda path: path.write_text("{}"), "is not a policy file"),
        (pickled, "is not a policy file"),
        (odd_member, "is not a policy file"),
        (bomb, "has a compressed member 'policy.json', and a policy file has none"),
        (
            lambda path: rewrite(path, lambda r: r.update(version=2)),
            "is version 2 of a policy file, and this placement",
        ),
        (lambda path: rewrite(path, lambda r: r.update(schema="x")), "is not a policy file"),
        (lambda path: rewrite(path, lambda r: r.update(policy="x")), "holds a policy 'x', which this version does not"),
        (
            lambda path: rewrite(path, lambda r: r.update(searches="x")),
            "searches strategies, which this version does not",
        ),
        (lambda path: rewrite(path, lambda r: r.pop("config")), "lacks part of its description"),
        (lambda path: rewrite(path, lambda r: r.update(graphs=[1])), "lacks part of its description"),
        (lambda path: rewrite(path, lambda r: r["config"].update(units=10**9)), "weights that do not fit its config"),
        (lambda path: rewrite(path, lambda r: r["config"].update(units="9")), "weights that do not fit its config"),
        (lambda path: rewrite(path, lambda r: r["config"].update(hidden=2)), "weights that do not fit its config"),
        (no_numbers, "has weights that are no numbers"),
    ],
)
def test_what_is_no_policy_file_is_refused_in_a_sentence(
    policy_file: Path, harm: Callable[[Path], Any], message: str
) -> None:
    harm(policy_file)
    with pytest.raises(PolicyFileError) as caught:
        load_policy(policy_file)
    assert message in str(caught.value)
    assert str(policy_file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_is_no_policy(tmp_path: Path) -> None:
    learner = make_learner("hierarchical", [Problem(fans(), PAIR)], 0)
    save_checkpoint(tmp_path / "c", Checkpoint({}, 0.0, [], learner.state()))
    with pytest.raises(PolicyFileError, match="is not a policy file"):
        load_policy(tmp_path / "c")


def test_equal_policies_make_equal_files(policy_file: Path, tmp_path: Path) -> None:
    before = policy_file.read_bytes()
    again = train(fans(), PAIR, output=tmp_path / "again.zip", evaluations=80, seed=3, command="as typed").policy_file
    assert again.read_bytes() == before
    assert zipfile.ZipFile(io.BytesIO(before)).testzip() is None


# -- what it refuses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"policy": "hierarchicle"}, UnknownNameError, "unknown policy 'hierarchicle', did you mean 'hierarchical'"),
        ({"preset": "papr"}, UnknownNameError, "unknown preset 'papr', did you mean 'paper'"),
        ({"seed": -1}, ValueError, "a seed is a whole number, 0 or more, got -1"),
        ({"evaluations": 1.5}, ValueError, "a number of evaluations is a whole number, 0 or more, got 1.5"),
        ({"budget_s": math.nan}, ValueError, "a budget is a finite number of seconds"),
        ({"checkpoint_every_s": -1}, ValueError, "the time between checkpoints is a finite number of seconds"),
        ({"graphs": []}, ValueError, "at least one graph and one cluster"),
        ({"clusters": "pair"}, ValueError, "expected a Cluster, got str 'pair'"),
        ({"output": Path("nowhere/policy.zip")}, OSError, "there is no folder"),
        ({"graphs": [fans(), fans(3)]}, MismatchError, "units"),
        ({"graphs": [two_branches(kept_bytes=10**9)]}, InfeasibleError, "op '"),
    ],
)
def test_bad_arguments(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: dict[str, Any] = {"graphs": fans(), "clusters": PAIR, "output": tmp_path / "p.zip", "evaluations": 8}
    with pytest.raises(error, match=message):
        train(**(asked | changes))
    assert list(tmp_path.iterdir()) == []


def test_files_beside_a_policy() -> None:
    one = Files.beside(Path("a/policy.zip"), 1)
    assert (one.checkpoint, one.results) == (Path("a/policy.checkpoint"), (Path("a/policy.best.json"),))
    assert Files.beside(Path("mine"), 2).results == (Path("mine.best.1.json"), Path("mine.best.2.json"))


def test_the_policies_have_the_names_they_are_registered_under() -> None:
    for name, policy in POLICIES.items():
        assert policy.name == name


def test_a_training_is_frozen(tmp_path: Path) -> None:
    found = train(fans(), PAIR, output=tmp_path / "policy.zip", evaluations=8)
    assert isinstance(found, Training)
    with pytest.raises(AttributeError):
        found.samples = 1  # type: ignore[misc]


def test_what_is_no_graph_cluster_or_file_is_named_as_it_came(tmp_path: Path) -> None:
    for graphs, clusters, found in (("two_tower", PAIR, "'two_tower'"), (fans(), "4xV100-pcie", "'4xV100-pcie'")):
        with pytest.raises(ValueError, match=f"got str {found}"):
            train(graphs, clusters, output=tmp_path / "policy.zip")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got NoneType"):
        train(fans(), None, output=tmp_path / "policy.zip")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="name of the policy file"):
        train(fans(), PAIR, output=None)  # type: ignore[arg-type]
