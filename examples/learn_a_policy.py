"""Learn a policy: a network that proposes placements is trained in the simulator, saved, and used on another graph.

    python examples/learn_a_policy.py

The same on the command line: `placement train MODEL --cluster CLUSTER --policy graph -o policy.zip`, then
`placement optimize OTHER --cluster CLUSTER --method policy:policy.zip`. train_with_sb3.py trains an agent of your own.
"""

import tempfile

import placement
from graphs.generators import layered

cluster = placement.Cluster.preset("4xV100-pcie")
# Random layered graphs whose transfers take four times as long as their computing (ccr).
seen, unseen = layered(40, seed=0, ccr=4.0, width=4), layered(40, seed=1, ccr=4.0, width=4)

with tempfile.TemporaryDirectory() as folder:
    # 1. Training. It begins by imitating the best heuristic, so it is never worse than that.
    policy = f"{folder}/policy.zip"
    trained = placement.train(seen, cluster, "graph", evaluations=256, seed=0, output=policy)
    print(f"{trained.results[0].step_time_s * 1e3:.3f} ms on the graph of the training")

    # 2. The policy is a method: its proposal for a graph that it has not seen, at once, beside others.
    for method in ("single_device", "heft", f"policy:{policy}"):
        result = placement.optimize(unseen, cluster, method, seed=0, strategy="none")
        print(f"{method.partition(':')[0]:13} {result.step_time_s * 1e3:.3f} ms, gap {result.gap:.0%}")
