"""Place a graph of your own: describe ops and tensors, then let the environment show and score a placement.

    python examples/own_graph.py

A graph of your PyTorch model comes from `placement.capture(model, args)`, one of networkx from `OpGraph.from_networkx`.
"""

import gymnasium

import placement
from graphs.opgraph import Op, OpGraph, Tensor

MB = 1_000_000
graph = OpGraph.build(
    [
        Op("tokens", kernels=0),  # an input: it is there already
        Op("embed", flops=1e9, kept_bytes=400 * MB),
        Op("left", flops=8e11, kept_bytes=200 * MB, colocation="tied"),  # shares its weights with `head`
        Op("right", flops=8e11, kept_bytes=200 * MB, time_s={"gpu": 0.06}),  # measured: replaces the model
        Op("head", flops=2e11, colocation="tied"),
    ],
    [
        Tensor("tokens", 8_192, ("embed",)),
        Tensor("embed", 16 * MB, ("left", "right")),
        Tensor("left", 16 * MB, ("head",)),
        Tensor("right", 16 * MB, ("head",)),
    ],
    name="two branches",
)
cluster = placement.Cluster.preset("4xV100-pcie")
env = gymnasium.make("placement/Improve-v0", graph=graph, cluster=cluster, reward="normalized", render_mode="ansi")
observation, _ = env.reset()
print("units of placement:", int(observation["unit_mask"].sum()))
print(env.render())
unit, device = 3, 1  # move `right` to the second GPU
_, reward, _, _, info = env.step(unit * cluster.n_devices + device)
print(env.render())
print(f"improved by {reward:.2f} of the step time of one device, to {info['step_time_s'] * 1e3:.1f} ms")
