"""Export it: a strategy as a script of plain PyTorch, run here on two CPU processes, and as configurations.

    python examples/export_it.py

On the command line: `placement export found.json --to torch --model examples/classifier.py:make -o parallel.py`.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from classifier import make

import placement
from graphs.errors import PlacementError

HERE = Path(__file__).parent

model, args = make()
graph = placement.capture(model, args, train=True)
cluster = placement.Cluster.preset("8xA100-nvswitch")

# 1. A script that needs torch alone. "dp2 zero3" is `fully_shard` for each layer.
result = placement.optimize(graph, cluster, strategy="dp2 zero3")
script = placement.export(result, "torch", model=model, source=f"{HERE / 'classifier.py'}:make")
print(f"script of {len(script.splitlines())} lines")

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "parallel.py"
    path.write_text(script.replace("STEPS = 10", "STEPS = 3"), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(path)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout or done.stderr)

# 2. Configurations for launchers.
print(placement.export(result, "accelerate")["distributed_type"])
print(placement.export(result, "deepspeed")["zero_optimization"]["stage"])

# 3. A strategy that the target has no words for is refused; the sentence names the nearest one that it has.
mixed = placement.optimize(graph, cluster, strategy="dp2 shares=3:1 | pp2 gpipe mb2", target="any")
try:
    placement.export(mixed, "torch", model=model, source="classifier.py:make")
except PlacementError as error:
    print(error)
