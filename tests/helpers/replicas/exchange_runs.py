"""Exchanges run on a tiny model in virtual time, with all that participants compute and tell written down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from small_problems import cluster_of, device
from torch import Tensor, nn

from placement.fitting.log import FitRun, Stop
from placement.fitting.methods import FitMethod
from placement.fitting.participants import Compute, Participant, ParticipantLost, Post, Request, Role, Updated
from placement.fitting.task import FitTask
from placement.fitting.virtual.engine import VirtualEngine
from placement.fitting.virtual.speeds import Speeds


class Classifier(nn.Module):
    """Six numbers, eight hidden ones, three classes; answers by its loss. Four parameters: 56 + 27 entries."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, values: Tensor, classes: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.out(torch.tanh(self.hidden(values))), classes)


@cache
def task(batch: int = 8) -> FitTask:
    """96 samples whose class is the largest of three sums."""
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(128, 6, generator=generator)
    classes = (values @ torch.randn(6, 3, generator=generator)).argmax(1)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Classifier()
    return FitTask(model, (values[:96], classes[:96]), (values[96:], classes[96:]), batch, lambda loss: loss, seed=1)


@dataclass(frozen=True)
class Watched:
    """A run, and what was asked of the engine: every request with its participant, in order of asking."""

    run: FitRun
    requests: list[tuple[int, Request]]

    def told(self) -> dict[int, Tensor]:
        """The model at each version that somebody told."""
        updates = [each for _, each in self.requests if isinstance(each, Updated)]
        return {each.version: each.weights for each in updates if each.weights is not None}

    def computed(self, worker: int) -> list[Compute]:
        """A worker's gradients, in order."""
        return [each for number, each in self.requests if isinstance(each, Compute) and number == worker]

    def posts(self) -> list[tuple[int, Post]]:
        """Who sent what."""
        return [(number, each) for number, each in self.requests if isinstance(each, Post)]


@dataclass(frozen=True)
class Setting:
    """How a run differs from the plain one.

    Attributes:
        step_s: (worker, step, samples) -> seconds.
        lost: when participants die.
        starts: of each participant, where it begins; by default all at the model's own weights.
    """

    step_s: Callable[[int, int, int], float] = lambda worker, step, samples: 1.0
    lost: Mapping[int, float] = field(default_factory=dict)
    starts: Sequence[Tensor] = ()
    seed: int = 0


def fit(text: str, workers: int, stop: Stop, setting: Setting | None = None) -> Watched:
    """A method on workers, one device for each participant, a switch between them."""
    setting = setting or Setting()
    method, problem = FitMethod.parse(text), task()
    exchange = method.exchange
    assert exchange.refuse(method, workers) is None
    number = workers + len(exchange.servers(workers))
    starts = setting.starts or [problem.weights()] * number
    rate = 0.1 if method.learning_rate is None else method.learning_rate
    requests: list[tuple[int, Request]] = []
    roles = [Role(k, workers, starts[k], problem.layout, method, rate, setting.seed) for k in range(number)]
    participants = [_watched(exchange.participant(role), role.number, requests) for role in roles]
    speeds = Speeds(range(number), setting.step_s, lambda participant: 0.01)
    cluster = cluster_of(*(device(f"cpu{k}", kind="cpu") for k in range(number)))
    engine = VirtualEngine(problem, cluster, workers, participants, speeds)
    for participant, time_s in setting.lost.items():
        engine.lose(participant, time_s)
    return Watched(engine.run(text, stop), requests)


def sgd(batch_of: int, steps: int, optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]) -> list[Tensor]:
    """Weights of a single process on the global batches of so many workers, after each step; the start first."""
    problem = task()
    weights = nn.Parameter(problem.weights())
    update = optimizer([weights])
    seen = [weights.detach().clone()]
    for step in range(steps):
        samples = torch.cat([problem.samples(worker, batch_of, step) for worker in range(batch_of)])
        _, weights.grad = problem.gradient(weights.detach(), samples)
        update.step()
        seen.append(weights.detach().clone())
    return seen


def _watched(participant: Participant, number: int, requests: list[tuple[int, Request]]) -> Participant:
    request = next(participant)
    while True:
        requests.append((number, _copied(request)))
        try:
            answer = yield request
        except ParticipantLost as lost:
            request = participant.throw(lost)
        else:
            request = participant.send(answer)


def _copied(request: Request) -> Request:
    """With weights of its own, since participants go on with theirs."""
    if isinstance(request, Compute):
        return Compute(request.weights.clone(), request.version, request.samples)
    if isinstance(request, Updated) and request.weights is not None:
        return Updated(request.version, request.staleness, request.weights.clone(), request.part)
    return request
