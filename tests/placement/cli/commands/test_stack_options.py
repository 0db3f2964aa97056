"""`--stack` and `--rates`: what the first lines say, and what is refused."""

from __future__ import annotations

from command_lines import Call

CLUSTER = "4xV100-pcie"


def test_the_first_line_says_the_stack(call: Call) -> None:
    words = ("optimize", "two_tower", "--train", "--cluster", CLUSTER, "--strategy", "dp2")
    for stack, rates in (("eager", ()), ("compiled", ("--rates", "peak"))):
        code, out, _ = call(*words, *(() if stack == "eager" else ("--stack", stack)), *rates)
        assert code == 0
        assert f" {stack}, fits in" in out.splitlines()[0]
        assert ("--stack compiled --rates peak" in out.splitlines()[1]) == (stack == "compiled")


def test_unknown_stacks_and_rates_are_one_sentence(call: Call) -> None:
    for option, valid in (("--stack", "fused"), ("--rates", "peak")):
        code, _, err = call("optimize", "two_tower", "--cluster", CLUSTER, option, "jit", "--method", "single_device")
        assert code == 2
        assert valid in err
