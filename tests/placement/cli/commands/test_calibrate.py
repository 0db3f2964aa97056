"""``placement calibrate``, really run on steps and files; measuring a machine is in tests/placement/measuring."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_lines import Call, refused

from env.cluster import Cluster


@pytest.fixture
def products_file(tmp_path: Path) -> Path:
    """Products at 60 % of an H100's peak, at most."""
    path = tmp_path / "products.csv"
    lines = ["dtype,m,n,k,latency_ms"]
    for m in (64, 1024, 4096):
        for n in (512, 2048, 8192):
            for k in (256, 4096):
                seconds = max(2 * m * n * k / 5.9e14, 2 * (m * n + m * k + n * k) / 2e12) + 4e-6
                lines.append(f"bfloat16,{m},{n},{k},{1e3 * seconds}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_products_of_a_file(call: Call, products_file: Path, graph_file: Path) -> None:
    words = ("--base", "8xH100-nvswitch", "--products", products_file)
    code, out, err = call("calibrate", *words, "-o", "mine.toml")
    assert (code, err) == (0, "")
    assert "8xH100-nvswitch-calibrated: products " in out
    assert "source       calibrated on " in out
    assert "9 fitted, 9 left out, of which " in out
    assert "constant     products.bfloat16.flops_per_s = " in out
    assert "kept         convolutions, attention, memory-bound ops: as before" in out
    assert "kept         links and collectives of 8xH100-nvswitch" in out
    cluster = Cluster.from_toml("mine.toml")
    assert all(device.rates is not None for device in cluster.devices)
    assert "H100" in cluster.source
    code, out, _ = call("optimize", graph_file, "--cluster", "mine.toml", "--method", "single_device", "-o", "p.json")
    assert code == 0
    assert "8xH100-nvswitch-calibrated" in out
    assert call("verify", "p.json")[0] == 0  # what it says of the devices is read again
    assert "Rates of data sheets are peaks" not in call("clusters", "mine.toml")[1]
    said = call("clusters", "mine.toml")[1]
    assert "predictions: not compared with public runs yet" in said  # those were of the preset's figures
    assert "reached by H100-SXM5-80GB: products " in said
    assert f"torch {torch.__version__}" not in said  # who knows by which version the file was made?
    document = json.loads(call("calibrate", *words, "--json")[1])
    assert document["fits"][0]["after"] < 0.25


LOG = """\
# nThread 1 nGpus 8 minBytes 1048576 maxBytes 4194304 step: 4(factor) warmup iters: 5 iters: 20 agg iters: 1
# Using devices
{}#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
     1048576        262144     float     sum      -1    40.10   26.15   45.76      0    39.50   26.55   46.46      0
     4194304       1048576     float     sum      -1    70.00   59.92  104.86      0    69.00   60.79  106.38      0
"""


def test_a_log_of_nccl_tests(call: Call) -> None:
    ranks = (f"#  Rank  {r} Group  0 Pid  30{r} on      node1 device  {r} [0x0{r}] NVIDIA H100\n" for r in range(8))
    Path("sums.log").write_text(LOG.format("".join(ranks)), encoding="utf-8")
    code, out, err = call("calibrate", "--base", "8xH100-nvswitch", "--nccl-tests", "sums.log", "-o", "mine.toml")
    assert (code, err) == (0, "")
    assert "measured     all_reduce among 8 of 2 sizes" in out
    known = Cluster.from_toml("mine.toml").measured("all_reduce", 8)
    assert known is not None
    assert known.seconds == pytest.approx((40.1e-6, 70e-6))
    assert "kept         kernels, of 8xH100-nvswitch" in out
    assert "kept         links and other collectives of 8xH100-nvswitch" in out
    words = ("--nccl-tests", "sums.log", "--base")
    refused(call("calibrate", *words, "1xH100"), "sums.log has collectives among 8 devices, and cluster '1xH100' has 1")
    refused(call("calibrate", *words, "8xRTX4090-pcie"), "faster than the links of '8xRTX4090-pcie' carry it")
    log = Path("sums.log").read_text(encoding="utf-8")
    for time_us in ("nan", "-70.00", "0.00"):
        Path("bad.log").write_text(log.replace(" 70.00", f" {time_us}"), encoding="utf-8")
        sentence = f"bad.log: the log says that 4194304 bytes took {time_us} us; expected a number above 0"
        refused(call("calibrate", "--base", "8xH100-nvswitch", "--nccl-tests", "bad.log"), sentence)
    Path("none.log").write_text("nothing of the kind\n", encoding="utf-8")
    refused(
        call("calibrate", "--base", "8xH100-nvswitch", "--nccl-tests", "none.log"),
        "none.log: the log has no line of sizes and times; expected the output of all_reduce_perf",
    )


def test_a_known_step(call: Call, graph_file: Path) -> None:
    code, out, err = call("calibrate", "--base", "2xK40-pcie", "--step", f"{graph_file} = 100 s")
    assert (code, out) == (2, "")
    assert "no factor up to 8 explains" in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--products", "none.csv"), "change a cluster; name it with --base"),
        (("--base", "8xH100-nvswitch"), "--base is for --step, --nccl-tests and --products, and none of them is given"),
        (("--base", "8xH100", "--products", "p.csv"), "unknown cluster '8xH100', did you mean '8xH100-nvswitch'?"),
        (("--base", "4xV100-pcie", "--products", "none.csv"), "cannot read products from none.csv: No such file"),
        (("--base", "4xV100-pcie", "--step", "gpt2"), "gives no time"),
        (("--base", "4xV100-pcie", "--step", "gpt9 = 1 s"), "unknown model 'gpt9', did you mean 'gpt2'?"),
        (("--base", "4xV100-pcie", "--step", "gpt2 = 1 s", "--devices", "1"), "--devices says what to measure here"),
        (("--base", "4xV100-pcie", "--nccl-tests", "none.log"), "cannot read collectives from none.log"),
        (("--minutes", "0"), "--minutes takes a number above 0 and at most 60"),
    ],
)
def test_bad_calibrations(call: Call, words: tuple[str, ...], sentence: str) -> None:
    refused(call("calibrate", *words), sentence)


def test_rates_over_the_peak(call: Call) -> None:
    Path("fast.csv").write_text("dtype,m,n,k,time_us\nbf16,8192,8192,8192,100\n", encoding="utf-8")
    refused(
        call("calibrate", "--base", "8xH100-nvswitch", "--products", "fast.csv"),
        "PFLOP/s, and 'H100-SXM5-80GB' has a peak of",
    )


def test_too_few_products(call: Call) -> None:
    text = "dtype,m,n,k,time_us\n" + 40 * "bf16,4096,4096,4096,800\n"
    Path("few.csv").write_text(text, encoding="utf-8")
    refused(
        call("calibrate", "--base", "8xH100-nvswitch", "--products", "few.csv"),
        "few.csv has 1 products of 'H100-SXM5-80GB' (shapes, each counted once), too few to fit rates to; give 8",
    )


def test_times_in_another_unit_than_the_column_says(call: Call, products_file: Path) -> None:
    text = products_file.read_text(encoding="utf-8").replace("latency_ms", "time_s")
    Path("slow.csv").write_text(text, encoding="utf-8")
    refused(
        call("calibrate", "--base", "8xH100-nvswitch", "--products", "slow.csv"),
        "times as long as 'H100-SXM5-80GB' is known to need; expected at most 20 times; check the unit of the times",
    )
