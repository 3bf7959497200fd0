"""Tables of the values that may be saved in 8-bit codes: by the operation that computes them, with the codec, and by
the operations that use them in the backward pass.

Operations are named as in ATen, without overload, leading underscore and "_forward". Results of an operation without a
codec are saved exactly, and an operation that is not in ``USERS`` gets exactly what it uses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

MIN_NUMEL = 1024
"""Smaller values are saved as they are."""
BLOCK_SIZE = 128

# ---- the codec of a value, by the operation that computes it

POWER, UNSIGNED, PROBABILITY, TANH = "power", "unsigned power", "probability", "tanh"
CODEC_BY_OPERATION: dict[str, str] = {
    # products
    **dict.fromkeys(("addmm", "mm", "bmm", "baddbmm", "mv", "linear", "grouped_mm", "convolution", "einsum"), POWER),
    # attention
    "scaled_dot_product_flash_attention_for_cpu": POWER,
    "scaled_dot_product_flash_attention": POWER,
    "scaled_dot_product_efficient_attention": POWER,
    "scaled_dot_product_cudnn_attention": POWER,
    **dict.fromkeys(("softmax", "safe_softmax", "sigmoid"), PROBABILITY),
    # norms
    **dict.fromkeys(("native_layer_norm", "fused_rms_norm", "native_group_norm"), POWER),
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm"), POWER),
    # elementwise
    **dict.fromkeys(("add", "sub", "neg", "mul", "div", "silu", "gelu", "mish", "hardswish", "leaky_relu"), POWER),
    **dict.fromkeys(("elu", "celu", "hardtanh", "hardsigmoid", "softplus", "native_dropout"), POWER),
    "tanh": TANH,
    "relu": UNSIGNED,
    # copies
    **dict.fromkeys(("embedding", "index", "index_select", "gather", "cat", "stack", "repeat", "roll", "flip"), POWER),
    **dict.fromkeys(("constant_pad_nd", "max_pool2d_with_indices", "avg_pool2d"), POWER),
    **dict.fromkeys(("upsample_nearest2d", "upsample_bilinear2d"), POWER),
}

COMPUTED_FROM_CODES = frozenset(
    ("mul", "silu", "gelu", "relu", "mish", "hardswish", "leaky_relu", "elu", "celu", "softplus")
)
"""Elementwise functions that may be computed again from codes of their input: their errors are at most the input's."""
MOST_EXPONENT = 4
"""The largest exponent n of a power of codes: its derivative has n - 1 times the relative error of the codes."""

# ---- what an operation uses in its backward pass


class User(NamedTuple):
    """What an operation uses in its backward pass.

    kind: "product" (products, norms, attention, losses: a relative error of what it uses is one of its result, however
    large the gradient is), "smooth" (element-wise with bounded derivatives: codes only where the gradient at its output
    is BOUNDED), "linear" (passes gradients on, and uses nothing, or exact values), "singular" (divides or takes a
    logarithm). coded: the arguments that may be in codes; of "linear" ones those of which only the shape is used.
    """

    kind: str
    coded: tuple[str, ...] = ()


def _rows(kind: str, coded: tuple[str, ...], *names: str) -> dict[str, User]:
    return dict.fromkeys(names, User(kind, coded))


USERS: dict[str, User] = {
    **_rows("product", ("mat1", "mat2"), "addmm"),
    **_rows("product", ("self", "mat2"), "mm", "bmm", "grouped_mm"),
    **_rows("product", ("batch1", "batch2"), "baddbmm", "addbmm"),
    **_rows("product", ("mat", "vec"), "addmv"),
    **_rows("product", ("self", "vec"), "mv"),
    **_rows("product", ("vec1", "vec2"), "addr"),
    **_rows("product", ("self", "other"), "matmul"),
    **_rows("product", ("input", "weight"), "linear", "convolution"),
    **_rows(
        "product",
        ("query", "key", "value", "output"),
        "scaled_dot_product_flash_attention_for_cpu",
        "scaled_dot_product_flash_attention",
        "scaled_dot_product_efficient_attention",
        "scaled_dot_product_cudnn_attention",
    ),
    **_rows("product", ("input",), "native_layer_norm", "fused_rms_norm", "native_group_norm"),
    **_rows("product", ("input",), "native_batch_norm", "cudnn_batch_norm"),
    **_rows("product", (), "nll_loss", "nll_loss2d", "embedding"),
    **_rows("smooth", ("result",), "softmax", "safe_softmax", "log_softmax", "relu", "sigmoid", "tanh"),
    **_rows("smooth", ("self",), "silu", "gelu", "mish", "hardswish", "hardsigmoid", "hardtanh", "leaky_relu"),
    **_rows("smooth", ("self",), "elu", "celu", "softplus", "glu"),
    **_rows("smooth", ("self",), "pow"),  # whole exponents only; others are singular (row_of_power)
    **_rows("smooth", ("self", "other"), "mul"),
    **_rows("smooth", ("tensor1", "tensor2"), "addcmul"),
    # sums, scales, copies
    **_rows("linear", (), "add", "sub", "neg", "rsub", "lerp", "sum", "mean", "cumsum", "clone", "to_copy"),
    **_rows("linear", (), "alias", "view", "unsafe_view", "reshape_alias", "unsqueeze", "squeeze", "t", "transpose"),
    **_rows("linear", (), "permute", "expand", "slice", "split", "split_with_sizes", "unsafe_split", "select"),
    **_rows("linear", (), "unbind", "as_strided", "diagonal", "unfold", "cat", "stack", "repeat", "roll", "flip"),
    **_rows("linear", (), "constant_pad_nd", "triu", "tril", "index", "index_select", "index_put", "index_add"),
    **_rows("linear", (), "index_copy", "masked_fill", "where", "scatter_add", "scatter", "masked_select", "gather"),
    **_rows("linear", (), "native_dropout", "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d"),
    **_rows("linear", (), "pixel_shuffle", "sort", "topk", "max"),
    **_rows("linear", ("self",), "max_pool2d_with_indices", "avg_pool2d", "adaptive_avg_pool2d", "avg_pool3d"),
    # read for comparisons or signs, always exactly
    **_rows("linear", (), "amax", "amin", "abs", "clamp", "clamp_min", "clamp_max", "exp", "maximum", "minimum"),
    **_rows("linear", (), "sin", "cos", "mse_loss", "smooth_l1_loss", "var", "prelu_kernel"),
    **_rows("linear", (), "binary_cross_entropy_with_logits"),
}
UNKNOWN_USER, SCALED = User("singular"), User("linear")  # SCALED: a division by a number


def row_of_power(exponent: Any) -> User:
    """The row of a power: whole exponents from 1 are smooth, and up to MOST_EXPONENT may be coded."""
    if not isinstance(exponent, (int, float)) or exponent < 1 or exponent != int(exponent):
        return UNKNOWN_USER
    return USERS["pow"] if exponent <= MOST_EXPONENT else User("smooth")
