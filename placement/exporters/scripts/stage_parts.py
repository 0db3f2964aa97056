"""The pieces of an exported script about stages, as text in which ``$NAME`` stands for what a strategy says."""

from __future__ import annotations

STAGE = '''
class Handover(Exception):
    """Takes what a stage hands to the next one out of the model's forward pass."""


class Stage(nn.Module):
    """The model's own forward pass, in which the modules of other stages have no parameters and do nothing.

    What needs none, such as masks and positions, every stage computes for itself.
    """

    def __init__(self, model: nn.Module, number: int) -> None:
        super().__init__()
        self.model, self.number, self.received = model, number, None
        for other, paths in enumerate(STAGES):
            for path in paths if other != number else ():
                self._leave_out(path, model.get_submodule(path), other > number)
        if number:
            first = $BEGIN
            model.get_submodule(first).register_forward_pre_hook(self._begin)
$PIECES
    def _leave_out(self, path: str, module: nn.Module, is_later: bool) -> None:
        for inner_path, inner in module.named_modules(prefix=path):
            for name, parameter in list(inner.named_parameters(recurse=False)):
                if f"{inner_path}.{name}" in READ_OUTSIDE:
                    parameter.requires_grad_(False)
                else:
                    setattr(inner, name, None)
        module.forward = self._hand_over if is_later else $SKIP

    def _skip(self, $PATH*args: Any, **kwargs: Any) -> Any:
        return $RETURNED

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return self.received, *args[1:]

    def _hand_over(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        raise Handover(tensor.contiguous())  # as torch.distributed sends tensors
$END
    def forward(self, $RECEIVED, **inputs: Any) -> Any:
        self.received = $GIVEN
        try:
            $LOSS
        except Handover as handover:
            return handover.args[0]
'''
ONE_TENSOR = {
    "BEGIN": "STAGES[number][0]",
    "PIECES": "",
    "SKIPPED": "self.received",
    "END": "",
    "RECEIVED": "received: torch.Tensor | None = None",
    "GIVEN": "received",
}
ONE_RETURNED = {"SKIP": "self._skip", "PATH": "", "RETURNED": "$SKIPPED"}
SEVERAL_RETURNED = {
    "SKIP": "functools.partial(self._skip, path)",
    "PATH": "path: str, ",
    "RETURNED": "RETURNS.get(path, lambda received: received)($SKIPPED)",
}
IN_PIECES = {
    "BEGIN": "BEGINS[number] if number in BEGINS else STAGES[number][0]",
    "PIECES": """\
        for path, forward in PIECES.get(number, {}).items():
            module = model.get_submodule(path)
            module.forward = functools.partial(forward, module)
""",
    "SKIPPED": "self.received[0] if isinstance(self.received, tuple) else self.received",
    "END": '''
    def end(self) -> None:
        """Hand over what a piece of a module returns, where the next stage begins inside it."""
        path = BEGINS.get(self.number + 1)
        if path in PIECES.get(self.number, {}):
            self.model.get_submodule(path).register_forward_hook(self._end)

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # Copies: PipelineStage detaches what it sent in place, and this stage may read it, too.
        sent = [t.clone(memory_format=torch.contiguous_format) for t in (output if type(output) is tuple else [output])]
        raise Handover(tuple(sent) if len(sent) > 1 else sent[0])
''',
    "RECEIVED": "*received: torch.Tensor",
    "GIVEN": "received[0] if len(received) == 1 else received",
}

OWN_MODULES = '''
def own_modules(model: nn.Module, paths: list[str]) -> list[nn.Module]:
    """Those of the modules that have parameters here; the others are of other stages."""
    found = [model.get_submodule(path) for path in paths]
    return [module for module in found if next(module.parameters(), None) is not None]
'''

ADD_TIED = '''
def mark_tied(stages: dict[int, nn.Module]) -> None:
    """Note on each parameter of the stages which of TIED it is."""
    for stage in stages.values():
        for name, p in stage.model.named_parameters():
            p.tied = next((number for number, (names, _) in enumerate(TIED) if name in names), None)


def add_tied(optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> None:
    """Give all copies of a tied parameter the sum of their gradients, so that they stay equal."""
    trained = [p for listed in optimizer.param_groups for p in listed["params"]]
    for number, (_, shape) in enumerate(TIED):
        total = torch.zeros(shape, device=trained[0].device, dtype=trained[0].dtype)
        copies = [p for p in trained if p.tied == number]
        for p in copies:
            if isinstance(p.grad, DTensor):
                p.grad = p.grad.redistribute(placements=p.placements)
            own = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            total[: len(own)] += own
        dist.all_reduce(total, group=mesh.get_group("pp"))
        for p in copies:
            own = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            own.copy_(total[: len(own)])
'''

SCHEDULE = '''
def make_schedule(stages: dict[int, nn.Module], mesh: DeviceMesh) -> Any:
    """The stages of this rank in the order of the strategy."""
    device = torch.empty(0, device=mesh.device_type).device
    group = mesh.get_group("pp")
$READY
$SCHEDULE
'''

READY = """\
    ready = [PipelineStage(stage, number, len(STAGES), device, group=group) for number, stage in stages.items()]"""
# A stage may hand over parts, of which the next one has to know the mesh.
READY_FOR_PARTS = """\
    known = {"group": group, "get_mesh": lambda names, _: mesh[names]}  # where a stage hands over a DTensor
    ready = [PipelineStage(stage, number, len(STAGES), device, **known) for number, stage in stages.items()]"""

NAMED_SCHEDULE = "    return $CLASS($READY, MICRO_BATCHES, loss_fn=lambda loss, _: loss.sum())"

CSV_SCHEDULE = """    # torch has no class for this order; its private runtime reads one, a row of CSV for each rank.
    schedule = _PipelineScheduleRuntime(ready, MICRO_BATCHES, loss_fn=lambda loss, _: loss.sum())
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write(ORDER)
        file.flush()
        schedule._load_csv(file.name)
    return schedule"""

PARALLELIZE_STAGES = '''
def parallelize(model: nn.Module, mesh: DeviceMesh) -> dict[int, nn.Module]:
    """The stages of this rank, by number."""
    mine = [number for number, rank in enumerate(RANK_OF_STAGE) if rank == mesh["pp"].get_local_rank()]
    return {number: make_stage(copy.deepcopy(model), number, mesh) for number in mine}


def make_stage(model: nn.Module, number: int, mesh: DeviceMesh) -> nn.Module:
    """One stage, as this rank computes it."""
    stage = Stage(model, number)
$BODY
$END    return stage
'''

TRAIN_STEP_STAGES = '''
def train_step(schedule: Any, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, inputs: dict[str, Any]) -> float:
    """One step on the whole batch$WHOSE; returns $WHICH loss on the last stage."""
    optimizer.zero_grad()
$OWN    # Every stage gets the inputs. Only the last one has a loss, which needs no target beside them.
    losses: list[torch.Tensor] = []
    some = next(value for value in inputs.values() if isinstance(value, torch.Tensor))
$RUN
    optimizer.step()
    return sum(loss.item() for loss in losses) / MICRO_BATCHES$SHARE
'''
