"""`StrategyStates`: the tensors that one rank has of a model, and what ranks do about them together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_

from placement.runtime.modules.local_tensors import entries
from placement.runtime.modules.shared_states import SharedStates
from placement.runtime.ranks.group import RankGroup
from placement.runtime.setups.module_tree import is_under
from placement.runtime.torch_runner.setup import Setup


class StrategyStates(SharedStates):
    """A rank's share of a model's tensors under a strategy.

    Args:
        run: what the torch runner has made of the model.
    """

    def __init__(
        self, run: nn.Module, setup: Setup, ranks: RankGroup, outlines: Mapping[str, torch.Tensor], keys: list[str]
    ) -> None:
        self._run, self._setup = run, setup
        super().__init__(ranks, outlines, keys)

    def models(self) -> list[tuple[nn.Module, tuple[str, ...]]]:
        """The models inside of wrappers, each with the modules and parameters that other ranks answer for."""
        stages = self._setup.stages
        if not stages:
            model = self._run.module if isinstance(self._run, DistributedDataParallel) else self._run
            return [(model, ())]
        found = []
        for number, stage in self._run.stages.items():  # type: ignore[union-attr,operator]
            others = [path for other, paths in enumerate(stages) for path in paths if other != int(number)]
            others += [name for name, trained_by in self._setup.loose.items() if trained_by != int(number)]
            found.append((stage.model, tuple(others)))
        return found

    def entries(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of every parameter and buffer that this rank answers for, tied ones under each name."""
        seen = set()
        for model, others in self.models():
            for name, tensor in entries(model):
                is_others = any(is_under(name, path) for path in others)
                if not is_others and name not in seen:
                    seen.add(name)
                    yield name, tensor

    # -- gradients --------------------------------------------------------------------------------------------

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_`, by the norm over all ranks."""
        own = {
            name: tensor
            for name, tensor in self.entries()
            if isinstance(tensor, nn.Parameter) and tensor.grad is not None
        }
        norms = []
        counted = set()
        for name, tensor in own.items():
            norm = torch.linalg.vector_norm(tensor.grad, norm_type, dtype=torch.float32)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            if id(tensor) not in counted and self._answers_for(name):
                norms.append(norm.cpu())
            counted.add(id(tensor))
        total = torch.linalg.vector_norm(torch.stack(norms) if norms else torch.zeros(1), norm_type)
        total = self._over_stages(total, norm_type)
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(f"the total norm of order {norm_type} of the gradients is {float(total)}")
        for tensor in dict.fromkeys(own.values()):
            clip_grads_with_norm_([tensor], max_norm, total.to(tensor.device), foreach=False)
        return total

    def _answers_for(self, name: str) -> bool:
        """Whether the stages of this rank, and not those of an earlier one, count the gradient of a parameter."""
        if not self._setup.stages:
            return True
        tied = next((names for names, *_ in self._setup.tied if name in names), {name})
        of_ranks = math.prod(self._setup.mesh.values()) // self._setup.mesh.get("pp", 1)
        first = min(self._home[other] for other in tied if other in self._home)
        return first // of_ranks == self._ranks.rank // of_ranks

    def _over_stages(self, norm: torch.Tensor, norm_type: float) -> torch.Tensor:
        if not self._setup.stages:
            return norm
        of_ranks = math.prod(self._setup.mesh.values()) // self._setup.mesh.get("pp", 1)
        told = torch.tensor(self._ranks.told(float(norm), "the norm of its gradients"))[::of_ranks]
        found: torch.Tensor = torch.linalg.vector_norm(told, norm_type)
        return found
