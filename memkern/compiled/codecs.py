"""Adds the 8-bit encoding and decoding of saved values to an fx graph, as nodes.

The power codec is an op of memkern's, or torch's operations that Inductor compiles into one kernel with what is before
and after (:mod:`memkern.compiled.fused`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .. import _ops
from ..quant.layout import is_dense
from . import fused
from .distances import LIMITS
from .nodes import value
from .rules import BLOCK_SIZE, POWER, PROBABILITY, TANH, UNSIGNED
from .torch_internals import (
    detect_fake_mode,
    extract_tensor_metadata,
    is_contiguous_or_false,
    make_fx,
    select_decomp_table,
)

BACKENDS = ("ops", "inductor")  # memkern's kernels, or torch's operations in Inductor's kernels


def check_backend(name: str | None) -> None:
    if name is not None and name not in BACKENDS:
        raise ValueError(f"codec_backend must be one of {BACKENDS} or None, got {name!r}")


def backend_for(x: Tensor, name: str | None) -> str:
    """The backend that codes a tensor: the named one or the device's default where it is possible, else "ops"."""
    if name is None:
        name = "inductor" if x.device.type == "cuda" and torch.version.hip is None else "ops"
    return name if name == "ops" or (_can_be_in_blocks(x) and fused.is_possible(x, BLOCK_SIZE)) else "ops"


class Codec(NamedTuple):
    """encode: makes codes and scales of a tensor. decode: makes a tensor of them. bytes: per element, about."""

    encode: Callable[[Tensor], tuple[Tensor, ...]]
    decode: Callable[[Sequence[Tensor], torch.dtype], Tensor]
    bytes: float


def _power(signed: bool, backend: str) -> Codec:
    """The square-root codec of memkern.quant.codec."""

    def encode(x: Tensor) -> tuple[Tensor, ...]:
        if backend == "inductor":
            return fused.encode(x, signed, BLOCK_SIZE)
        return _ops.quantize_blockwise(x, "power", signed, BLOCK_SIZE, None, mark_nonfinite=True)

    def decode(data: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        if backend == "inductor":
            return fused.decode(data[0], data[1], BLOCK_SIZE, dtype)
        return _ops.dequantize_blockwise(data[0], data[1], "power", BLOCK_SIZE, dtype)

    return Codec(encode, decode, 1.03)


def _distance(name: str, backend: str) -> Codec:
    """The codec of the distance from a limit (distances.py)."""
    limits = LIMITS[name]
    power = _power(False, backend)

    def encode(x: Tensor) -> tuple[Tensor, ...]:
        return (*power.encode(limits.root(x.float())), _ops.few_bit_encode(x, limits.sides))

    def decode(data: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return limits.result(power.decode(data[:2], torch.float32), data[2]).to(dtype)

    return Codec(encode, decode, power.bytes + limits.sides.bits / 8)


def _codecs(backend: str) -> dict[str, Codec]:
    return {
        POWER: _power(True, backend),
        UNSIGNED: _power(False, backend),
        PROBABILITY: _distance(PROBABILITY, backend),
        TANH: _distance(TANH, backend),
    }


BY_BACKEND = {backend: _codecs(backend) for backend in BACKENDS}

DISTANCES = {PROBABILITY, TANH}  # codecs of the distance from a limit (distances.py)


def _can_be_in_blocks(x: Tensor) -> bool:
    """Whether blocks can be laid over x as it lies in memory."""
    if is_contiguous_or_false(x):
        return True
    is_static = all(isinstance(n, int) for n in (*x.shape, *x.stride()))
    return is_static and is_dense(x.shape, x.stride())


def inline(graph: fx.Graph, function: Callable[..., Any], *nodes: fx.Node) -> Any:
    """Adds the operations of a function of tensors to a graph, and returns the nodes of its results."""
    values = [value(n) for n in nodes]
    fake = detect_fake_mode(values)
    assert fake is not None
    with fake, torch.no_grad():
        traced = make_fx(
            torch.func.functionalize(function, remove="mutations"),
            decomposition_table=select_decomp_table(),  # Inductor refuses an operation that it would have decomposed
            tracing_mode="symbolic",
        )(*values)
    traced.graph.eliminate_dead_code()  # of numbers and None among the results of attention on a GPU
    node_of = dict(zip(traced.graph.find_nodes(op="placeholder"), nodes, strict=True))
    for node in traced.graph.nodes:
        if node.op == "output":
            return fx.node.map_arg(node.args[0], node_of.__getitem__)
        if node.op == "placeholder":
            continue
        if node.op == "get_attr":
            raise AssertionError(f"a codec has a constant: {node.target}")
        copy = graph.node_copy(node, node_of.__getitem__)
        copy.meta = {"val": node.meta["val"]}
        if isinstance(value(copy), Tensor):
            copy.meta["tensor_meta"] = extract_tensor_metadata(value(copy))
        if getattr(node.target, "namespace", "").startswith("memkern"):
            # Else Inductor gives an op that was added to its graph an input of any layout.
            copy.meta["eager_input_vals"] = fx.node.map_arg((copy.args, copy.kwargs), value)
        node_of[node] = copy
    raise AssertionError("a graph without an output")


def encode(graph: fx.Graph, x: fx.Node, codec: str, backend: str) -> tuple[fx.Node, ...]:
    """Adds the encoding of a value to a graph; returns the nodes of its codes and scales."""
    function: Callable[[Tensor], tuple[Tensor, ...]] = BY_BACKEND[backend][codec].encode
    if not _can_be_in_blocks(value(x)):
        function = functools.partial(_encode_copy, function)
    return tuple(inline(graph, lambda y: tuple(function(y)), x))


def _encode_copy(function: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor) -> tuple[Tensor, ...]:
    return function(x.clone(memory_format=torch.contiguous_format))


def decode(graph: fx.Graph, data: Sequence[fx.Node], codec: str, backend: str, dtype: torch.dtype) -> fx.Node:
    """Adds the decoding of codes and scales to a graph; returns the node of the value."""
    return inline(graph, lambda *parts: BY_BACKEND[backend][codec].decode(parts, dtype), *data)
