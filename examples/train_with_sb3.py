"""Train an agent of your own: PPO of stable-baselines3 places a layered graph on four GPUs, in twelve units.

    python examples/train_with_sb3.py        (some 10 seconds)

For one unit a step with masks, take "placement/Sequential-v0" and sb3-contrib's MaskablePPO.
"""

from stable_baselines3 import PPO

from env.cluster import Cluster
from env.gym.vector import PlacementVecEnv
from graphs.generators import layered

graph, cluster = layered(40, seed=0, ccr=4.0, width=4), Cluster.preset("4xV100-pcie")
env = PlacementVecEnv("placement/Group-v0", 64, graph=graph, cluster=cluster, reward="normalized", units=12)
agent = PPO("MultiInputPolicy", env, n_steps=4, batch_size=256, n_epochs=4, learning_rate=3e-3, seed=0)
for _ in range(4):
    agent.learn(768, reset_num_timesteps=False)
    found = env.last_scores
    ratio = found.step_time_s / found.reference_s  # of the best single device
    print(f"{agent.num_timesteps:6} placements: mean {ratio.mean():.2f} of one device, best {ratio.min():.2f}")
