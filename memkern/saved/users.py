"""Which operations may get a saved tensor back from 8-bit codes: the table of the users.

What an operation has saved it uses in its backward pass, so the operation decides. A node of the autograd graph that is
not in this table gets exactly what it saved. tests/fixtures/saved-attributes.csv has the decision for every tensor that
an operation of torch saves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction

# How large the gradient may be that comes to an operation's output, seen from the operations after it.
UNKNOWN = 0  # none of them tells
BOUNDED = 1  # of a product, a norm or a loss: an error of codes stays as large as it is
REDUCED = 2  # of a division or logarithm of a sum or mean over many elements
AMPLIFIED = 3  # of a division, a logarithm or an unknown operation: errors may be divided by small values


# Of which elements it is.
NOT_TOLD = 0
SPARSE = 1  # a few of each row: of a loss of classes, or gathered
DENSE = 2


class User(NamedTuple):
    """An operation that saves tensors.

    kind: "product" (products, norms, attention, losses: a relative error in what it saved is one in its result, however
    large the gradient), "smooth" (elementwise with bounded derivatives: codes only where the gradient that comes is
    BOUNDED), "linear" (passes gradients on, and saves nothing or exactly), "singular" (divides or takes a logarithm).
    coded: the tensors that may be coded. shape: those of which only the shape is used, so that any codes serve.
    """

    kind: str
    coded: tuple[str, ...] = ()
    shape: tuple[str, ...] = ()


def _rows(kind: str, coded: tuple[str, ...], *names: str) -> dict[str, User]:
    return dict.fromkeys(names, User(kind, coded))


_PRODUCTS = {
    **_rows("product", ("mat1", "mat2"), "AddmmBackward0"),
    **_rows("product", ("self", "mat2"), "MmBackward0", "BmmBackward0", "GroupedMmBackward0"),
    **_rows("product", ("batch1", "batch2"), "BaddbmmBackward0", "AddbmmBackward0"),
    **_rows("product", ("mat", "vec"), "AddmvBackward0"),
    **_rows("product", ("self", "vec"), "MvBackward0"),
    **_rows("product", ("vec1", "vec2"), "AddrBackward0"),
    **_rows("product", ("self", "other"), "MatmulBackward0"),
    **_rows(
        "product",
        ("input", "weight"),
        "LinearBackward0",
        "ConvolutionBackward0",
        "ConvolutionBackward1",
        "ConvolutionOverrideableBackward0",
        "NnpackSpatialConvolutionBackward0",
    ),
    **_rows(
        "product",
        ("self", "weight"),
        "MkldnnLinearBackward0",
        "MkldnnConvolutionBackward0",
        "ConvDepthwise2DBackward0",
        "ConvDepthwise3DBackward0",
        "ConvTbcBackward0",
        "CudnnConvolutionBackward0",
        "CudnnConvolutionTransposeBackward0",
        "MiopenConvolutionBackward0",
        "MiopenConvolutionTransposeBackward0",
        "MiopenDepthwiseConvolutionBackward0",
        "MpsConvolutionBackward0",
        "MpsConvolutionTransposeBackward0",
        "SlowConv2DBackward0",
        "SlowConv3DBackward0",
        "SlowConvDilated2DBackward0",
        "SlowConvDilated3DBackward0",
        "SlowConvTranspose2DBackward0",
        "SlowConvTranspose3DBackward0",
    ),
    **_rows(
        "product",
        ("query", "key", "value", "output"),
        "ScaledDotProductFlashAttentionForCpuBackward0",
        "ScaledDotProductFlashAttentionBackward0",
        "ScaledDotProductEfficientAttentionBackward0",
        "ScaledDotProductCudnnAttentionBackward0",
    ),
    # Where the mean of a row is large beside its deviation, what is coded is x - mean (data_needs.normalization).
    **_rows(
        "product",
        ("input",),
        "NativeLayerNormBackward0",
        "FusedRmsNormBackward0",
        "NativeGroupNormBackward0",
        "NativeBatchNormBackward0",
        "CudnnBatchNormBackward0",
        "MiopenBatchNormBackward0",
    ),
    # Their gradient is a constant and says nothing of the values; they save log-probabilities for the shape.
    **dict.fromkeys(("NllLossBackward0", "NllLoss2DBackward0"), User("product", (), ("self",))),
    **dict.fromkeys(("EmbeddingBackward0", "memkern.RandomizedLinear", "memkern.LinearCrossEntropy"), User("product")),
    **_rows("product", ("saved_tensors",), "memkern.MLP"),
}

_SMOOTH = {
    **_rows("smooth", ("result",), "SoftmaxBackward0", "SafeSoftmaxBackward0", "LogSoftmaxBackward0"),
    **_rows("smooth", ("result",), "ReluBackward0", "SigmoidBackward0", "TanhBackward0"),
    **_rows(
        "smooth",
        ("self",),
        "SiluBackward0",
        "GeluBackward0",
        "MishBackward0",
        "HardswishBackward0",
        "HardsigmoidBackward0",
        "HardtanhBackward0",
        "LeakyReluBackward0",
        "EluBackward0",
        "CeluBackward0",
        "SoftplusBackward0",
        "GluBackward0",
        "PowBackward0",  # of whole exponents only; others are singular (of_power)
    ),
    **_rows("smooth", ("self", "other"), "MulBackward0"),
    **_rows("smooth", ("tensor1", "tensor2"), "AddcmulBackward0"),
    **_rows("smooth", ("saved_tensors",), "memkern.Glu", "memkern.Recompute"),
}

_PASS_ON = (
    # sums, scales, copies
    "AddBackward0", "AddBackward1", "SubBackward0", "SubBackward1", "NegBackward0", "MulBackward1",
    "DivBackward1", "RsubBackward0", "RsubBackward1", "LerpBackward0", "SumBackward0", "SumBackward1",
    "MeanBackward0", "MeanBackward1", "CumsumBackward0", "AliasBackward0", "ViewBackward0",
    "UnsafeViewBackward0", "ReshapeAliasBackward0", "UnsqueezeBackward0", "SqueezeBackward0",
    "SqueezeBackward1", "SqueezeBackward2", "TBackward0", "TransposeBackward0", "PermuteBackward0",
    "ExpandBackward0", "SliceBackward0", "SplitBackward0", "SplitWithSizesBackward0", "SelectBackward0",
    "UnbindBackward0", "AsStridedBackward0", "DiagonalBackward0", "UnfoldBackward0", "UnsafeSplitBackward0",
    "CloneBackward0", "ToCopyBackward0", "CatBackward0", "StackBackward0", "RepeatBackward0",
    "RollBackward0", "FlipBackward0", "ConstantPadNdBackward0", "TriuBackward0", "TrilBackward0",
    "torch::autograd::CopyBackwards", "IndexBackward0", "IndexSelectBackward0", "IndexPutBackward0",
    "MaskedFillBackward0", "MaskedFillBackward1", "WhereBackward0", "ScatterAddBackward0",
    "ScatterBackward0", "MaskedSelectBackward0", "NativeDropoutBackward0", "UpsampleNearest2DBackward0",
    "UpsampleBilinear2DBackward0", "PixelShuffleBackward0", "UpsampleBicubic2DBackward0", "SortBackward0",
    "TopkBackward0", "MaxBackward0",
    # compared or looked at for a sign, always as they are
    "AmaxBackward0", "AminBackward0", "AbsBackward0", "ClampBackward1", "ExpBackward0", "ClampMinBackward0",
    "ClampMaxBackward0", "MaximumBackward0", "MinimumBackward0", "SinBackward0", "CosBackward0",
    "MseLossBackward0", "SmoothL1LossBackward0", "VarBackward0", "BinaryCrossEntropyWithLogitsBackward0",
    "PreluKernelBackward0", "memkern.FewBit",
)  # fmt: skip
_LINEAR = {
    **dict.fromkeys(_PASS_ON, User("linear")),
    **dict.fromkeys(
        (
            "GatherBackward0",
            "MaxPool2DWithIndicesBackward0",
            "AvgPool2DBackward0",
            "AdaptiveAvgPool2DBackward0",
        ),
        User("linear", (), ("self",)),
    ),
    **dict.fromkeys(("IndexAddBackward0", "IndexCopyBackward0"), User("linear", (), ("source",))),
}

USERS: dict[str, User] = {**_PRODUCTS, **_SMOOTH, **_LINEAR}
"""The rows by the node's name."""

UNKNOWN_USER, SCALED = User("singular"), User("linear")
MEANS = ("SumBackward1", "MeanBackward0", "MeanBackward1")
MOST_EXPONENT = 4
"""Of powers from codes: their derivative is off by so many times, less one, what the codes are off."""
PICKING = ("NllLossBackward0", "NllLoss2DBackward0", "GatherBackward0")
LOG_SOFTMAX = "LogSoftmaxBackward0"
"""Its gradient is g - p * sum(g): of a SPARSE g that is p and the small 1 - p, of soft targets q it is p - q.

So codes of p serve losses of classes, and not soft targets, to which p comes close.
"""
MANY = 32  # elements of a sum, each of them a small part of it


@functools.cache
def _own_functions() -> dict[Any, str]:
    from ..functions.activation import FewBit
    from ..functions.cross_entropy import _LinearCrossEntropy
    from ..functions.glu import Glu
    from ..functions.mlp import _MLP
    from ..functions.randomized_linear import _RandomizedLinear
    from ..functions.saves_input import Recompute

    own: dict[Any, str] = {Recompute: "memkern.Recompute"}
    for function in (FewBit, Glu, _MLP, _RandomizedLinear, _LinearCrossEntropy):
        name = f"memkern.{function.__name__.lstrip('_')}"
        own[function] = name
        if hasattr(function, "eager"):
            own[function.eager] = own[function.transformed] = name
    return own


_ACCUMULATE_GRAD = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
_NAMES: dict[type, str] = {}  # of the types of nodes that torch has for one operation alone


def operation(node: Any) -> str:
    """The name of a node's operation; "" for an autograd.Function that is not memkern's, whatever it is called."""
    kind = type(node)
    name = _NAMES.get(kind)
    if name is None:
        if isinstance(node, BackwardCFunction):
            return _own_functions().get(getattr(node, "_forward_cls", None), "")
        name = node.name()
        if kind.__name__ == name:
            _NAMES[kind] = name
    return name


def is_leaf(node: Any) -> bool:
    """Whether a node gathers the gradient of a leaf."""
    return type(node) is _ACCUMULATE_GRAD


def of_power(exponent: Any) -> User:
    """The row of a power: whole exponents from 1 are smooth, and up to MOST_EXPONENT may be coded."""
    if not isinstance(exponent, (int, float)) or exponent < 1 or exponent != int(exponent):
        return UNKNOWN_USER
    return USERS["PowBackward0"] if exponent <= MOST_EXPONENT else User("smooth")


def user(node: Any, name: str) -> User:
    """The row of a node; of a power it depends on the exponent, of a division on the divisor."""
    row = USERS.get(name, UNKNOWN_USER)
    if name == "PowBackward0":
        return of_power(node._saved_exponent)
    if name == "DivBackward0" and node.next_functions[1][0] is None:
        other = node._saved_other
        if other is not None and other.dim() == 0:
            return SCALED
    return row


def is_square(node: Any, name: str) -> bool:
    """x ** 2 or x * x: with a mean over many it is a norm, whose gradient is bounded by the norm itself."""
    if name == "PowBackward0":
        return bool(node._saved_exponent == 2)
    inputs = node.next_functions
    return name == "MulBackward0" and inputs[0] == inputs[1]


def _is_mean_of_many(node: Any, name: str) -> bool:
    if name not in MEANS:
        return False
    source, nr = node.next_functions[0]
    return source is not None and _numel(source, nr) >= MANY * _numel(node, 0)


def passed_on(
    row: User,
    node: Any,
    name: str,
    state: int,
    is_square: Callable[[Any, str], bool] = is_square,
    is_mean_of_many: Callable[[Any, str], bool] = _is_mean_of_many,
) -> int:
    """How large the gradient may be at a node's inputs, given that at its output (UNKNOWN to AMPLIFIED).

    is_square, is_mean_of_many: what is asked about a node; those here are for nodes of the autograd graph.
    """
    if row.kind == "product":
        return BOUNDED
    if row.kind == "singular":
        return AMPLIFIED
    if state < REDUCED:
        return state
    if state == REDUCED and is_square(node, name):
        return BOUNDED
    if state == AMPLIFIED and is_mean_of_many(node, name):
        return REDUCED
    return state


def spread(row: User, name: str, elements: int) -> int:
    """Of which elements the gradient at a node's inputs is, given that at its output (NOT_TOLD, SPARSE or DENSE)."""
    if name in PICKING:
        return SPARSE
    return DENSE if row.kind != "linear" or name in MEANS else elements


def _numel(node: Any, nr: int) -> int:
    return torch.Size(node._input_metadata[nr].shape).numel()
