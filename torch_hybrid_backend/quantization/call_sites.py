"""Call sites: where a model's forward multiplies, found as it runs, in eager and while Dynamo traces it.

A site is a call of an operator, named after the module in whose forward it is made: modules are followed by classes of their own, operators by
a mode of torch's. So functional calls (products of attention, weights kept as bare parameters) are seen like those of layers. Inside operators
of `torch.nn.functional` that are Python and take others' place nothing is seen, but for `multi_head_attention_forward`: its projections
have the sites "in_proj" (with "#2" and "#3" where keys and values have inputs of their own) and "out_proj" behind the module's name.
Additions of two tensors and average poolings are numbered by themselves: "#add1", "#add2", "#pool1".

Dynamo checks in every call what it read while it traced: hooks, attributes, closures. It checks the class of every module as it is. So
what is known of a module's sites is part of its class, as literals of its forward's code: that is checked with no guard more.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from torch_hybrid_backend.quantization.attention import arguments_of, is_taken, multi_head_attention
from torch_hybrid_backend.torch_private import count_torch_function_modes, torch_function_mode_at

KINDS = ("conv", "linear", "matmul", "attention", "add", "pool")


@dataclass(frozen=True, slots=True)
class Operator:
    """A function of torch's: what kind of layer it is, where its operands are, as (position, name), and the dimension of the second that
    counts output channels, where that is a weight."""

    kind: str
    operands: tuple[tuple[int, str], ...]
    axis: int | None = None


_CONV = Operator("conv", ((0, "input"), (1, "weight")), 0)
_TRANSPOSED = Operator("conv", ((0, "input"), (1, "weight")), 1)
_MATMUL = Operator("matmul", ((0, "input"), (1, "other")))
_MAT2 = Operator("matmul", ((0, "input"), (1, "mat2")))
OPERATORS: dict[Callable[..., Any], Operator] = {
    torch.conv1d: _CONV,
    torch.conv2d: _CONV,
    torch.conv3d: _CONV,
    torch.conv_transpose1d: _TRANSPOSED,
    torch.conv_transpose2d: _TRANSPOSED,
    functional.linear: Operator("linear", ((0, "input"), (1, "weight")), 0),
    torch.matmul: _MATMUL,
    torch.Tensor.matmul: _MATMUL,
    torch.Tensor.__matmul__: _MATMUL,
    torch.mm: _MAT2,
    torch.Tensor.mm: _MAT2,
    torch.bmm: _MAT2,
    torch.Tensor.bmm: _MAT2,
    torch.addmm: Operator("matmul", ((1, "mat1"), (2, "mat2"))),
    functional.scaled_dot_product_attention: Operator("attention", ((0, "query"), (1, "key"), (2, "value"))),
}

# Of transposed convolutions those are products of integers, as kernels have them, for which both are 1.
_GROUPS_AND_DILATION = ((6, "groups"), (7, "dilation"))

# What is quantized only beside a convolution that reads the same: sites that are numbered by their kind.
BESIDE = ("add", "pool")
POOLINGS = frozenset((functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d))
# Each a function of two tensors; whether it writes to the first.
ADDITIONS: dict[Callable[..., Any], bool] = {torch.add: False, torch.Tensor.add: False, torch.Tensor.add_: True}

# What a site's visitor is told of it by whoever had the model followed: nested tuples of what `repr` writes as literals.
Known = tuple[Any, ...]
# By the number of a module's site, that of an addition behind "add", of a pooling behind "pool"; by the name of a projection the same for its
# sites.
Sites = Mapping["int | str", Any]
PROJECTIONS = ("in_proj", "out_proj")


class LayerCall(NamedTuple):
    """A call of an operator at a site. `compute` is the operator as a function of its operands.

    `known`: what whoever had the model followed told of the site. `axis`: the dimension of the second operand that counts output channels; None
    where all operands are activations.
    """

    site: str
    known: Known | None
    kind: str
    axis: int | None
    operands: tuple[torch.Tensor, ...]
    compute: Callable[..., Any]


Visit = Callable[[LayerCall], Any]


class CallSites(TorchFunctionMode):
    """While it is active, `visit` stands in for every operator of `OPERATORS` that modules followed by `follow` call, and for those additions
    and poolings that something is known of; for all of them with `all_beside`."""

    def __init__(self, visit: Visit, *, all_beside: bool = False) -> None:
        super().__init__()
        self._visit = visit
        self._all_beside = all_beside
        # Innermost last: a module's name, what is known of its sites by their number, how many calls, additions and poolings it has made.
        self._calls: list[list[Any]] = [_call("", {})]

    def enter(self, name: str, known: Sites) -> None:
        """A module's forward begins."""
        self._calls.append(_call(name, known))

    def leave(self) -> None:
        """Take note that a call has ended."""
        self._calls.pop()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        operator = OPERATORS.get(function)
        if function is functional.multi_head_attention_forward and is_taken(given := arguments_of(args, kwargs)):
            return self._attention(given)
        if function in ADDITIONS and len(args) == 2 and not kwargs and all(isinstance(x, torch.Tensor) for x in args):
            return self._addition(function, *args)
        if function in POOLINGS and args and _is_taken(args[0]):
            return self._pooling(function, *args, **kwargs)
        if operator is None:
            return function(*args, **kwargs)
        here = self._calls[-1]
        here[2] += 1
        name, known, count = here[:3]
        operands = tuple(_operand(place, args, kwargs) for place in operator.operands)
        options = [_operand(place, args, kwargs) for place in _GROUPS_AND_DILATION if operator is _TRANSPOSED]
        if not all(map(_is_taken, operands)) or not all(map(_is_one, options)):
            return function(*args, **kwargs)

        def compute(*values: Any) -> Any:
            positional, named = list(args), dict(kwargs)
            for (place, key), value in zip(operator.operands, values, strict=True):
                if place < len(positional):
                    positional[place] = value
                else:
                    named[key] = value
            return function(*positional, **named)

        kind, axis, second = operator.kind, operator.axis, operands[1]
        if kind == "matmul" and isinstance(second, nn.Parameter) and second.dim() == 2:
            kind, axis = "linear", 1  # a weight kept as (inputs, outputs), as GPT-2's
        return self._visit(LayerCall(_site(name, count), known.get(count), kind, axis, operands, compute))

    def _addition(self, function: Callable[..., Any], first: torch.Tensor, second: torch.Tensor) -> Any:
        site, what = self._site_beside("add", 3)
        if what is None and not self._all_beside:
            return function(first, second)
        result = self._visit(LayerCall(site, what, "add", None, (first, second), torch.add))
        return first.copy_(result) if ADDITIONS[function] else result

    def _pooling(self, function: Callable[..., Any], x: torch.Tensor, *window: Any, **options: Any) -> Any:
        site, what = self._site_beside("pool", 4)
        if what is None and not self._all_beside:
            return function(x, *window, **options)
        return self._visit(LayerCall(site, what, "pool", None, (x,), lambda x: function(x, *window, **options)))

    def _site_beside(self, kind: str, counter: int) -> tuple[str, Known | None]:
        """The name of the next site of a kind of `BESIDE`, and what is known of it."""
        here = self._calls[-1]
        here[counter] += 1
        site = f"{kind}{here[counter]}"
        return f"{here[0]}#{site}", here[1].get(site)

    def _attention(self, given: Mapping[str, Any]) -> Any:
        """Multi-head attention, each of whose projections is a module of its own to the visitor."""
        name, known, *_ = self._calls[-1]
        parts = {part: _call(f"{name}.{part}" if name else part, known.get(part, {})) for part in PROJECTIONS}

        def project(part: str, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            self._calls.append(parts[part])
            try:
                return functional.linear(x, w, bias)
            finally:
                self._calls.pop()

        with self:
            return multi_head_attention(project, given)


def _call(name: str, known: Sites) -> list[Any]:
    return [name, known, 0, 0, 0]


def _operand(place: tuple[int, str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[place[0]] if place[0] < len(args) else kwargs.get(place[1])


def _is_taken(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and value.dim() > 0
        and value.numel() > 0
    )


def _is_one(option: Any) -> bool:
    return option is None or (option == 1 if isinstance(option, int) else all(each == 1 for each in option))


def _site(module: str, count: int) -> str:
    return module if count == 1 else f"{module}#{count}"


def follow(model: nn.Module, known: Mapping[str, Known] | None = None) -> None:
    """Have the modules of a model tell the active `CallSites` when their forwards begin and end, and what is `known` of their sites, by name.
    A model that is followed already is told anew. Modules of `torch.nn` that compute without its operators are left alone.

    A module gets a class derived from its own, under the same name. It is copied and pickled as one of its own class: whoever copies the
    model follows the copy.
    """
    by_module: dict[str, dict[int | str, Any]] = {}
    for site, what in (known or {}).items():
        module_name, _, count = site.partition("#")
        by_module.setdefault(module_name, {})[count if count.startswith(BESIDE) else int(count or 1)] = what
    for module_name, sites in list(by_module.items()):
        around, _, part = module_name.rpartition(".")
        if part in PROJECTIONS:  # of an attention, which calls no module for them
            by_module.setdefault(around, {})[part] = sites
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoderLayer) and not module._forward_hooks:
            module.register_forward_hook(_look_in)
        if _may_call(module):
            plain = _plain(type(module))
            own = vars(module).pop(
                "forward", None
            )  # the instance's: what stands for it in the class would not be called
            if own is not None and not hasattr(own, "_followed"):
                vars(module)[_FORWARD] = own
            object.__setattr__(module, "__class__", _followed(plain, name, by_module.get(name, {})))


_FORWARD = "_forward_as_written"
_CODE = f"""
def forward(self, *args, **kwargs):
    mode = _active()
    if mode is None:
        return self.{_FORWARD}(*args, **kwargs)
    mode.enter({{name!r}}, {{known!r}})
    try:
        return self.{_FORWARD}(*args, **kwargs)
    finally:
        mode.leave()
"""


def _followed(plain: type[nn.Module], name: str, known: Sites) -> type[nn.Module]:
    """A class of modules of that name. What it knows is code, as closures and attributes are guarded one by one."""

    def reduced(module: nn.Module, protocol: Any) -> Any:
        make, given, *state = cast(tuple[Any, ...], super(followed, module).__reduce_ex__(protocol))
        return (make, given, *state) if followed not in given else (_new, (plain,), *state)

    made: dict[str, Any] = {}
    exec(compile(_CODE.format(name=name, known=known), __file__, "exec"), globals(), made)
    made["forward"]._followed = True
    members = {
        "forward": made["forward"],
        _FORWARD: inspect.getattr_static(plain, "forward"),
        "__reduce_ex__": reduced,
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
    }
    followed: type[nn.Module] = type(plain.__name__, (plain,), members)
    return followed


def _new(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


def _plain(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that a module had before it was followed."""
    return kind.__base__ if _FORWARD in vars(kind) else kind  # type: ignore[return-value]


def _look_in(module: nn.Module, args: Any, output: Any) -> None:
    """Does nothing. While it has a hook, PyTorch's encoder layer calls its layers, which one operator computes otherwise."""


def _may_call(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):  # runs without Python: no mode sees what it calls
        return False
    own = type(module).__module__.startswith("torch.nn.modules.")
    return not own or isinstance(module, nn.Linear | nn.MultiheadAttention | nn.modules.conv._ConvNd)


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that are layers of the kinds that are quantized, by name; an attention by the name of its first projection."""
    taken, transposed = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d, nn.ConvTranspose1d | nn.ConvTranspose2d
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, taken):
            found[name] = module
        elif isinstance(module, transposed):
            if _is_one(module.groups) and _is_one(module.dilation):
                found[name] = module
        elif isinstance(module, nn.MultiheadAttention):
            found[f"{name}.in_proj" if name else "in_proj"] = module
    return found


def _active() -> CallSites | None:
    """The innermost one of this thread."""
    for position in reversed(range(count_torch_function_modes())):
        mode = torch_function_mode_at(position)
        if isinstance(mode, CallSites):
            return mode
    return None
