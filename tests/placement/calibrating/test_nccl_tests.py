"""Logs of nccl-tests, made up after what its programs print."""

from __future__ import annotations

import pytest

from env.device import MeasuredCollective
from graphs.errors import ClusterError
from placement.calibrating.given import read_nccl_tests

SETTINGS = """\
# nThread 1 nGpus {gpus} minBytes 1048576 maxBytes 4194304 step: 4(factor) warmup iters: 5 iters: 20 agg iters: 1
#
# Using devices
"""
HEADER = """\
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
SUMS = """\
     1048576        262144     float     sum      -1    40.10   26.15   45.76      0    39.50   26.55   46.46      0
     4194304       1048576     float     sum      -1    70.00   59.92  104.86      0    69.00   60.79  106.38      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 75.3
"""
GATHERS = """\
     1048576         32768     float    none      -1    30.00   34.95   30.58      0    29.00   36.16   31.64      0
     4194304        131072     float    none      -1    1e+02   41.94   36.70    N/A    99.00   42.37   37.07    N/A
"""


def ranks(*hosts: str, each: int = 8) -> str:
    names = [host for host in hosts for _ in range(each)]
    lines = (
        f"#  Rank {r:2} Group  0 Pid  30{r} on {host:>12} device {r % each:2} [0x0{r % each}] NVIDIA H100 80GB HBM3\n"
        for r, host in enumerate(names)
    )
    return "".join(lines)


def log(rows: str, *hosts: str, before: str = "") -> str:
    return f"{before}{SETTINGS.format(gpus=8)}{ranks(*hosts)}{HEADER}{rows}"


def test_sums_of_one_host() -> None:
    (found,) = read_nccl_tests(log(SUMS, "node1"))
    assert found == MeasuredCollective("all_reduce", 8, (2**20, 2**22), (40.1e-6, 70e-6), hosts=1)


def test_ranks_on_two_hosts() -> None:
    (found,) = read_nccl_tests(log(SUMS, "node1", "node2"))
    assert (found.ranks, found.hosts) == (16, 2)


@pytest.mark.parametrize(
    "line",
    ["$ ./build/{}_perf -b 1M -e 4M -g 8\n", "# Collective test starting: {}_perf\n", "mpirun -np 8 {}_perf -g 1\n"],
)
def test_the_program_says_which_collective(line: str) -> None:
    (gathers,) = read_nccl_tests(log(GATHERS, "node1", before=line.format("all_gather")))
    assert gathers == MeasuredCollective("all_gather", 8, (2**20, 2**22), (30e-6, 100e-6), hosts=1)
    (exchanges,) = read_nccl_tests(log(GATHERS, "node1", before=line.format("alltoall")))
    assert exchanges == MeasuredCollective("all_to_all", 8, (2**23, 2**25), (30e-6, 100e-6), hosts=1)


def test_sums_whose_parts_stay_are_told_by_their_bandwidth() -> None:
    rows = SUMS.replace("45.76", "22.88").replace("104.86", "52.43")
    (found,) = read_nccl_tests(log(rows, "node1"))
    assert found.kind == "reduce_scatter"


def test_several_runs_one_after_the_other() -> None:
    before = "./build/all_gather_perf -g 8\n"
    ended = "# Collective test concluded: all_reduce_perf\n"
    text = log(SUMS, "a", before="./build/all_reduce_perf\n") + ended + log(GATHERS, "a", before=before)
    again = log(SUMS.replace("40.10", "42.10"), "a", before="./build/all_reduce_perf\n")
    found = {each.kind: each for each in read_nccl_tests(text + again)}
    assert set(found) == {"all_reduce", "all_gather"}
    assert found["all_reduce"].seconds == pytest.approx((41.1e-6, 70e-6))


def test_without_a_list_of_ranks_the_bandwidths_tell() -> None:
    (found,) = read_nccl_tests(HEADER + SUMS)
    assert (found.kind, found.ranks, found.hosts) == ("all_reduce", 8, 1)


def test_lines_that_mpirun_marks() -> None:
    marked = "".join(f"[1,0]<stdout>:{line}\n" for line in log(SUMS, "node1", "node2").splitlines())
    assert read_nccl_tests(marked) == read_nccl_tests(log(SUMS, "node1", "node2"))


def test_an_older_log_without_roots() -> None:
    (found,) = read_nccl_tests(log(SUMS.replace("      -1  ", "  "), "node1"))
    assert found.seconds == (40.1e-6, 70e-6)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "no line of sizes and times; expected the output of all_reduce_perf"),
        ("hello\n1 2 3\n", "no line of sizes and times"),
        (log("", "node1"), "no line of sizes and times"),
        (log(GATHERS, "node1"), "does not say whether all_gather_perf or alltoall_perf"),
        (log(GATHERS, "node1", before="./broadcast_perf -g 8\n"), "the log is of broadcast_perf, of which"),
        (HEADER + SUMS.replace("104.86", "120.0"), "does not list the ranks"),
    ],
)
def test_what_is_no_such_log(text: str, sentence: str) -> None:
    with pytest.raises(ClusterError, match=sentence):
        read_nccl_tests(text)
