"""Generated code with less Python around each operator."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

_OPERATOR = re.compile(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)\(")


def with_fast_calls(module: fx.GraphModule) -> Callable[..., Any]:
    """Replace ``module.forward`` by code with the same lines that has looked up each operator, and return it."""
    code = module.graph.python_code("self")
    names = dict(code.globals)

    def name_of(match: re.Match[str]) -> str:
        namespace, operator, overload = match.groups()
        found = getattr(getattr(getattr(torch.ops, namespace), operator), overload)
        if type(found) is not torch._ops.OpOverload:
            return match[0]
        name = f"{namespace}_{operator}_{overload}_"
        names[name] = found._op
        return f"{name}("

    exec(compile(_OPERATOR.sub(name_of, code.src), "<routine>", "exec"), names)
    type(module).forward = names["forward"]  # each module that fx makes has a class of its own
    forward: Callable[..., Any] = module.forward
    return forward
