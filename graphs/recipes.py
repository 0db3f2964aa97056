"""The recipe of a training step: its optimizer, and the number formats in which it keeps and computes, by name.

Formats are names as of torch, ``"bfloat16"`` say. One table of precisions serves capture, which makes the casts of one
ops of the graph, and arithmetic on graphs that were captured in another one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

UPDATE_KIND = "optimizer."  # and the optimizer's name: the kind of an update op

_BITS = re.compile(r"\d+")


@dataclass(frozen=True)
class Optimizer:
    """An optimizer as capture sees it.

    Attributes:
        name: as in `OPTIMIZERS`.
        states: tensors of the parameter's size kept between steps.
    """

    name: str
    states: int

    @property
    def kept_copies(self) -> int:
        """Tensors kept per trained parameter: the parameter, its gradient and the states."""
        return 2 + self.states

    def remembered_copies(self, has_masters: bool = False) -> int:
        """Tensors kept between steps beside the parameter: the states, and the master copy that is updated."""
        return self.states + has_masters

    def moved_bytes(self, parameter: float, gradient: float, state: float, has_masters: bool = False) -> float:
        """Bytes read and written by one update of a parameter, of its bytes, its gradient's and one state's.

        The gradient is read, and what is remembered read and written; so is the parameter, which is written alone where
        a master copy is updated.
        """
        return gradient + 2 * state * self.remembered_copies(has_masters) + parameter * (1 if has_masters else 2)


OPTIMIZERS = {
    "adam": Optimizer("adam", states=2),
    "adamw": Optimizer("adamw", states=2),
    "momentum": Optimizer("momentum", states=1),
    "sgd": Optimizer("sgd", states=0),
}


@dataclass(frozen=True)
class Precision:
    """Number formats of a training step.

    Attributes:
        name: as in `PRECISIONS`.
        parameter: in which parameters are kept.
        activation: in which ops compute, reading parameters and arguments in it, too.
        gradient: in which gradients are added up, over micro-batches and replicas, and kept.
        state: in which the optimizer remembers.
        has_masters: the optimizer keeps a copy of the parameters, in the format of its state, and updates that.
        product: in which products of layers read their factors, where that is another format than `activation`.
    """

    name: str
    parameter: str
    activation: str
    gradient: str
    state: str
    has_masters: bool = False
    product: str = ""

    @property
    def casts_parameters(self) -> bool:
        """Whether ops compute in another format than parameters are kept in."""
        return self.parameter != self.activation

    @property
    def has_narrow_gradients(self) -> bool:
        """Whether gradients are those of what parameters were cast to, which the update casts back."""
        return self.casts_parameters and self.gradient == self.activation


_WIDE, _NARROW = "float32", "bfloat16"
# "mixed": `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=...)` of torch's FSDP2; its bytes are those of
# torch.autocast. "master": the bfloat16 of Megatron-LM (megatron/core/optimizer, Float16OptimizerWithFloat16Params);
# with narrow gradients as NeMo's scripts for H100 have it (``grad_sync_dtype=bf16``), and as S. Rajbhandari et al.,
# "ZeRO", SC 2020, section 3.1, count: 16 bytes a parameter with adam.
PRECISIONS = {
    one.name: one
    for one in (
        Precision("float32", _WIDE, _WIDE, _WIDE, _WIDE),
        Precision("bfloat16", _NARROW, _NARROW, _NARROW, _NARROW),
        Precision("mixed", _WIDE, _NARROW, _WIDE, _WIDE),
        Precision("mixed-bf16-reduce", _WIDE, _NARROW, _NARROW, _WIDE),
        Precision("master", _NARROW, _NARROW, _WIDE, _WIDE, has_masters=True),
        Precision("master-bf16-reduce", _NARROW, _NARROW, _NARROW, _WIDE, has_masters=True),
    )
}
# Products in 8 bit, as Transformer Engine (``fp8_format="hybrid"``) and torchao's `convert_to_float8_training` have
# them: `graphs.transforms.float8`. All else is as without.
FLOAT8 = "-fp8"
PRECISIONS |= {
    f"{name}{FLOAT8}": replace(one, name=f"{name}{FLOAT8}", product="float8_e4m3fn")
    for name, one in PRECISIONS.items()
    if one.activation == _NARROW
}


def number_bytes(dtype: str) -> int:
    """Bytes of one number: ``"bfloat16"`` has 2; a format without a number in its name, say ``"bool"``, 1."""
    bits = _BITS.search(dtype.replace("float8", "8"))
    return 1 if bits is None else max(1, int(bits[0]) // 8)
