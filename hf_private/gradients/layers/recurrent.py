"""LSTM, GRU and RNN: linear layers on the input and on the state, one step after the other.

The projection of the input is a linear layer on all positions at once. That of the state, `h W^T + b`, gets a term of
zeros added: the gradient of this term is that of the projection's output at each position, and the states before them
are its input.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_private.gradients.persample import Dense, Outer, widen

from .tap import AutogradOnlyError, Tap
from .tapped import Tapped

State = tuple[Tensor, ...]
Cell = Callable[[Tensor, Tensor, State], State]  # projections of input and state, state -> state, output first


class _Zeros(torch.autograd.Function):
    """Zeros (N, T, gates), whose gradient says what `h W^T + b` needs; `states` (N, T, hidden) come into the list."""

    @staticmethod
    def forward(ctx, graph_root: Tensor, like: Tensor, states: list[Tensor], tap: Tap, names: tuple) -> Tensor:
        ctx.states, ctx.tap, ctx.names = states, tap, names
        return torch.zeros_like(like)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple:
        (ds,) = grad_outputs
        weight, bias = ctx.names
        axis = ctx.tap.axis(ctx.names, ds, 2)
        if axis is not None:
            rows = ctx.tap.rows(ds, axis)
            if bias:
                ctx.tap.observe(bias, Dense(widen(rows).sum(1)))
            if weight:
                ctx.tap.observe(weight, Outer(rows, ctx.tap.rows(ctx.states[0], axis)))
        return None, None, None, None, None


def lstm_cell(x: Tensor, h: Tensor, state: State) -> State:
    i, f, g, o = (x + h).chunk(4, 1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_cell(x: Tensor, h: Tensor, state: State) -> State:
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, 1), h.chunk(3, 1)
    z, n = (xz + hz).sigmoid(), (xn + (xr + hr).sigmoid() * hn).tanh()
    return (n + z * (state[0] - n),)


CELLS: dict[Callable, Cell] = {
    torch.lstm: lstm_cell,
    torch.gru: gru_cell,
    torch.rnn_tanh: lambda x, h, _: ((x + h).tanh(),),
    torch.rnn_relu: lambda x, h, _: ((x + h).relu(),),
}


def recurrent(func: Callable) -> Callable:
    """Rule for `torch.lstm` and its like, which modules call with a list of all weights."""

    def rule(tap: Tap, input: Tensor, hx: Any, weights: Any, *options: Any) -> tuple[Tensor, ...]:
        state = hx if isinstance(hx, (list, tuple)) else (hx,)
        plain = [input, *state]
        if tap.lone or tap.book.sharded or len(options) != 6 or any(type(x) is not Tensor for x in plain):
            raise AutogradOnlyError(f"`{tap.path}` takes packed sequences, or runs alone.")
        biased, layers, dropout, training, both, batch_first = options
        width, each = 2 + 2 * biased, layers * (1 + both)
        if len(weights) != width * each or input.dim() != 3:  # projected states; one sequence
            raise AutogradOnlyError(f"`{tap.path}` has projections.")
        x, last = input if batch_first else input.transpose(0, 1), []
        for layer in range(layers):
            found = []
            for way in range(1 + both):
                k = layer * (1 + both) + way
                mine = (*weights[width * k : width * (k + 1)], None, None)[:4]
                y, end = _run(tap, CELLS[func], x, tuple(s[k] for s in state), mine, backwards=bool(way))
                found.append(y)
                last.append(end)
            x = torch.cat(found, 2)
            if layer + 1 < layers:
                x = F.dropout(x, dropout, training)
        return x if batch_first else x.transpose(0, 1), *(torch.stack(parts) for parts in zip(*last, strict=True))

    return rule


def _run(tap: Tap, cell: Cell, x: Tensor, state: State, weights: tuple, backwards: bool) -> tuple[Tensor, State]:
    """One direction of one layer: its outputs (N, T, hidden), and the state at its end."""
    of_input, of_state, input_bias, state_bias = weights
    projected, states = F.linear(x, of_input, input_bias), []
    names = (tap.name(of_state), tap.name(state_bias))
    tap.announce(names, projected.shape[:2])
    added: Tensor = _Zeros.apply(tap.graph_root, projected.detach(), states, tap, names)
    matrix = tap.detached(of_state).t().to(projected.dtype)
    if state_bias is not None:
        added = added + tap.detached(state_bias).to(projected.dtype)
    inputs, terms, before = projected.unbind(1), added.unbind(1), []
    for t in reversed(range(len(inputs))) if backwards else range(len(inputs)):
        before.append(state[0])
        state = cell(inputs[t], torch.addmm(terms[t], state[0].to(matrix.dtype), matrix), state)
    outputs = [*before[1:], state[0]]
    if backwards:
        before, outputs = before[::-1], outputs[::-1]
    states.append(torch.stack(before, 1).detach())
    return torch.stack(outputs, 1), state


def is_recurrent(weights: Any) -> bool:
    """Whether an argument of a call is the list of weights that these functions take."""
    return isinstance(weights, (list, tuple)) and any(isinstance(w, Tapped) for w in weights)
