"""Write a reward of your own: fast, but with little traffic between devices, and never out of memory.

    python examples/custom_reward.py

A reward takes an `env.gym.rewards.Outcome`, arrays about k placements, and gives k numbers; larger is better.
"""

import gymnasium
import numpy as np

import placement
from env.gym.rewards import Outcome
from graphs.generators import fork_join


def speed_up(outcome: Outcome) -> np.ndarray:
    """How many times faster than one device; 0 if infeasible, less the gigabytes that lack."""
    gained = np.where(outcome.feasible, outcome.reference_s / outcome.step_time_s, 0.0)
    return gained - outcome.over_bytes / 1e9


env = gymnasium.make(
    "placement/Group-v0", graph=fork_join(24, seed=0), cluster=placement.Cluster.preset("4xV100-pcie"), reward=speed_up
)
env.reset(seed=0)
env.action_space.seed(0)
best = -np.inf
for _ in range(200):  # random search
    action = env.action_space.sample()
    _, reward, _, _, info = env.step(action)
    env.reset()
    best = max(best, float(reward))
print(f"best speed-up of 200 random placements: {best:.2f}")
