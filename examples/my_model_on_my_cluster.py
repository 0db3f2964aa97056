"""My model on my cluster: which strategy is the fastest?

    python examples/my_model_on_my_cluster.py

No GPU is needed: the graph comes from fake tensors, times from a simulator. The same on the command line:

    placement optimize examples/classifier.py:make --train --cluster examples/my_cluster.toml -o found.json
"""

import tempfile
from pathlib import Path

from classifier import make

import placement

# 1. The model becomes a graph: forward pass, backward pass and update of one step, with FLOPs and bytes of every op.
model, args = make()
graph = placement.capture(model, args, train=True)
print(f"{graph.n_ops} ops, {graph.flops.sum() / 1e9:.0f} GFLOP, {graph.kept_bytes.sum() / 1e6:.0f} MB kept all step")

# 2. The cluster: devices and links. Presets have names: placement.Cluster.preset("8xH100-nvswitch").
cluster = placement.Cluster.from_toml(Path(__file__).with_name("my_cluster.toml"))

# 3. The search. With `evaluations` in place of a time the answer depends on the seed alone.
result = placement.optimize(graph, cluster, seed=0, evaluations=500)
print(result.summary())

# 4. The answer as a file, scored again by code that shares nothing with the search.
with tempfile.TemporaryDirectory() as folder:
    result.save(f"{folder}/found.json")
    print("verified:", placement.verify(placement.Result.load(f"{folder}/found.json"), graph).holds)
