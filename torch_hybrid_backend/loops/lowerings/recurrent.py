"""Recurrent layers: `nn.LSTM`, `nn.GRU` and `nn.RNN`, whole as ATen's operators (`capture.fixes.recurrent_layers` keeps them so).

Each direction of a layer is one product of all steps' inputs, (T * B, I) by (I, G * H), and one `RecurrentOp` behind it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.loops.index import Index
from torch_hybrid_backend.loops.ir import Buffer, CellFn, Expr, RecurrentOp, Value
from torch_hybrid_backend.loops.lowering import Context, Refuse, lowers, reindex
from torch_hybrid_backend.loops.lowerings.arithmetic import lit
from torch_hybrid_backend.loops.lowerings.indexing import cat, stack
from torch_hybrid_backend.loops.lowerings.matmul import product
from torch_hybrid_backend.loops.lowerings.views import permuted, reshaped, selected
from torch_hybrid_backend.loops.ops import add, call, mul, sub, where
from torch_hybrid_backend.sizes.size import Dim, known_int

aten = torch.ops.aten

# (gate -> its product with the state, gate -> its share of the input, state, cell) -> (new state, new cell)
_Gate = Callable[[int], Expr]
_Unit = Callable[[_Gate, _Gate, Expr, "Expr | None"], "tuple[Expr, Expr | None]"]


def _lstm_unit(product: _Gate, given: _Gate, state: Expr, cell: Expr | None) -> tuple[Expr, Expr | None]:
    assert cell is not None
    i, f, o = (call("sigmoid", add(given(gate), product(gate))) for gate in (0, 1, 3))
    cell = add(mul(f, cell), mul(i, call("tanh", add(given(2), product(2)))))
    return mul(o, call("tanh", cell)), cell


def _gru_unit(product: _Gate, given: _Gate, state: Expr, cell: Expr | None) -> tuple[Expr, Expr | None]:
    r, z = (call("sigmoid", add(given(gate), product(gate))) for gate in (0, 1))
    new = call("tanh", add(given(2), mul(r, product(2))))
    return add(mul(sub(state, new), z), new), None


def _tanh_unit(product: _Gate, given: _Gate, state: Expr, cell: Expr | None) -> tuple[Expr, Expr | None]:
    return call("tanh", add(given(0), product(0))), None


def _relu_unit(product: _Gate, given: _Gate, state: Expr, cell: Expr | None) -> tuple[Expr, Expr | None]:
    total = add(given(0), product(0))
    return where(call("lt", total, lit(total, 0)), lit(total, 0), total), None


@dataclass(frozen=True, slots=True)
class _Kind:
    gates: int
    unit: _Unit


@dataclass(frozen=True, slots=True)
class _Layer:
    """Parameters of one direction of a layer: weights (G * H, I) and (G * H, H), biases (G * H) or None."""

    of_input: Value
    of_state: Value
    input_bias: Value | None
    state_bias: Value | None


@lowers(aten.lstm.input)
def lstm(
    ctx: Context,
    x: Value,
    hx: Sequence[Value],
    params: Sequence[Value],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Value, ...]:
    """(output, last states, last cells): x (T, B, I), or (B, T, I) where `batch_first`; states and cells (layers * directions, B, H)."""
    state, cell = hx
    if known_int(state.shape[2]) != known_int(cell.shape[2]):
        raise Refuse(Reason.ARGUMENT, "an LSTM with projections (proj_size) is left to eager")
    return _layers(
        ctx, _Kind(4, _lstm_unit), x, state, cell, params, has_biases, dropout, train, bidirectional, batch_first
    )


def _without_cell(kind: _Kind) -> Callable[..., tuple[Value, ...]]:
    def lowering(
        ctx: Context,
        x: Value,
        hx: Value,
        params: Sequence[Value],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Value, ...]:
        """(output, last states): x (T, B, I), or (B, T, I) where `batch_first`; states (layers * directions, B, H)."""
        return _layers(ctx, kind, x, hx, None, params, has_biases, dropout, train, bidirectional, batch_first)

    return lowering


lowers(aten.gru.input)(_without_cell(_Kind(3, _gru_unit)))
lowers(aten.rnn_tanh.input)(_without_cell(_Kind(1, _tanh_unit)))
lowers(aten.rnn_relu.input)(_without_cell(_Kind(1, _relu_unit)))


def _layers(
    ctx: Context,
    kind: _Kind,
    x: Value,
    state: Value,
    cell: Value | None,
    params: Sequence[Value],
    has_biases: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Value, ...]:
    if not ctx.abilities.recurrent:
        raise Refuse(Reason.ARGUMENT, "recurrent layers are left to PyTorch's library")
    if train and dropout:
        raise Refuse(Reason.ARGUMENT, "dropout between recurrent layers is left to eager")
    if any(value.dtype != "float32" for value in (x, state, *params)):
        raise Refuse(Reason.DTYPE, "recurrent layers in another dtype than float32 are left to eager")
    each, directions = 4 if has_biases else 2, 2 if bidirectional else 1
    x = permuted(x, (1, 0, 2)) if batch_first else x
    states: list[Value] = []
    cells: list[Value] = []
    for first in range(0, len(params) // each, directions):
        results: list[Value] = []
        for number in range(first, first + directions):
            of_input, of_state, *biases = params[number * each : (number + 1) * each]
            layer = _Layer(of_input, of_state, *(biases or (None, None)))
            begin = None if cell is None else selected(cell, 0, number)
            op = _direction(ctx, kind, x, selected(state, 0, number), begin, layer, number != first)
            results.append(_steps(op, number != first))
            states.append(selected(op.out, 0, op.out.shape[0] - 1))
            if op.last_cell is not None:
                cells.append(op.last_cell)
        shape = (*x.shape[:2], directions * known_int(state.shape[2]))
        x = results[0] if directions == 1 else cat(_for_result(ctx, 0, shape), results, 2)
    out = permuted(x, (1, 0, 2)) if batch_first else x
    last = stack(_for_result(ctx, 1, state.shape), states, 0)
    return (out, last) if cell is None else (out, last, stack(_for_result(ctx, 2, cell.shape), cells, 0))


def _direction(
    ctx: Context, kind: _Kind, x: Value, state: Value, cell: Value | None, layer: _Layer, is_backward: bool
) -> RecurrentOp:
    """Emit one direction of a layer. x (T, B, I); its steps run in the order of time, or backward."""
    steps, batch, depth = x.shape
    units = known_int(state.shape[1])
    inputs = product(ctx, reshaped(x, (steps * batch, depth)), permuted(layer.of_input, (1, 0)), "float32")
    given = inputs
    if layer.input_bias is not None:
        given = ctx.pointwise(add, inputs, layer.input_bias, dtype="float32", shape=inputs.shape)
    gates = ctx.materialize(given)

    def unit(
        products: tuple[Expr, ...], point: tuple[Index, ...], before: Expr, cell: Expr | None
    ) -> tuple[Expr, Expr | None]:
        step, row, j = point
        time = steps - 1 - step if is_backward else step

        def of_input(gate: int) -> Expr:
            return gates.at((time * batch + row, j + gate * units))

        def of_state(gate: int) -> Expr:
            bias = layer.state_bias
            return products[gate] if bias is None else add(products[gate], bias.at((j + gate * units,)))

        return kind.unit(of_state, of_input, before, cell)

    made: CellFn = unit
    out = Buffer((steps + 1, batch, units), "float32", "states")
    last_cell = None if cell is None else Buffer((batch, units), "float32", "cell")
    op = RecurrentOp(
        out, gates=kind.gates, weight=layer.of_state, state=state, unit=made, cell=cell, last_cell=last_cell
    )
    ctx.realize(op)
    return op


def _steps(op: RecurrentOp, is_backward: bool) -> Value:
    """The states by time, (T, B, H)."""
    last = op.out.shape[0] - 1
    shape = (last, *op.out.shape[1:])
    return reindex(op.out, shape, lambda i: (last - i[0] if is_backward else i[0] + 1, *i[1:]))


def _for_result(ctx: Context, position: int, shape: tuple[Dim, ...]) -> Context:
    """The context of a lowering that makes a value of `shape`, and of the dtype of the node's result at `position`."""
    inner = copy.copy(ctx)
    spec = ctx.outs[position]
    inner.outs = (dataclasses.replace(spec, shape=shape),)
    return inner
