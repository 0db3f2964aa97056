"""The pieces of an exported script about its optimizer, as text in which ``$NAME`` stands for what a strategy says."""

from __future__ import annotations

# Lists of parameters that one call updates hold plain tensors, or DTensors of one mesh.
ALIKE = '''
def alike(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Parameters in groups that the optimizer updates together: plain tensors, and DTensors of one mesh."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for p in parameters:
        groups.setdefault(getattr(p, "device_mesh", None), []).append(p)
    return [{"params": group} for group in groups.values()]
'''

LOCAL = '''
def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
'''

PARTS_OPTIMIZER = '''
class PartsOptimizer:
    """$WHAT"""

    def __init__(self, parameters: Iterable[nn.Parameter], make: Callable[..., torch.optim.Optimizer]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.parts = [nn.Parameter($PART) for p in self.parameters]
        self.optimizer = make(self.parts)
        self.param_groups = [{"params": self.parameters}]

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None

    def step(self) -> None:
        for p, part in zip(self.parameters, self.parts, strict=True):
            part.grad = None if p.grad is None else $GRADIENT
        self.optimizer.step()
$BACK'''
PARTS_HERE = {
    "WHAT": "An optimizer of this rank's parts of DTensors, as plain tensors in the same memory.",
    "PART": "local(p.detach())",
    "GRADIENT": "local(p.grad)",
    "BACK": "",
}
PARTS_ON_HOST = {
    "WHAT": "An optimizer that keeps its state in the memory of the host, and updates copies of the parameters there.",
    "PART": 'local(p.detach()).to("cpu", copy=True)',
    "GRADIENT": 'local(p.grad).to("cpu")',
    "BACK": """\
        with torch.no_grad():
            for p, part in zip(self.parameters, self.parts, strict=True):
                local(p).copy_(part)
""",
}

TOGETHER = '''
class Together:
    """Several optimizers as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
'''
