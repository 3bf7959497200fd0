"""A step's table on the device, for many tensors in a launch, and how a program finds its tensor there. Mirror:
``csrc/cuda/step_table.cuh``.

The table (``tensor_table.py`` fills it) is int64 words: a header; GROUP_WORDS for each group; the gradients' addresses;
then a column for each of the names below, with a word for each tensor. An fp64 number is stored as its bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..quant import codec as C
from ..schemas import STEP_OPS, StepOp
from .codec import dither

# Header: three scalar arguments (two words each: value or address, then the kind), and max_grad_norm.
GRAD_SCALE = tl.constexpr(0)
FOUND_INF = tl.constexpr(2)
GRAD_NORM = tl.constexpr(4)
MAX_GRAD_NORM = tl.constexpr(6)
HEADER_WORDS = tl.constexpr(8)
# A group: lr (a word and its kind), then its hyperparameters.
GROUP_WORDS = tl.constexpr(12)
LR_WORDS = tl.constexpr(2)


def word_of(op: StepOp, hyperparameter: str) -> tl.constexpr:
    """The word of a group that holds one of its hyperparameters, an fp64 number."""
    return tl.constexpr(LR_WORDS.value + op.hyperparameters.index(hyperparameter))


# The kind of a scalar argument: absent, an fp64 value, or the address of a tensor that holds it.
ABSENT = tl.constexpr(0)
VALUE = tl.constexpr(1)
AT_FP32 = tl.constexpr(2)
AT_FP64 = tl.constexpr(3)
# Columns.
PARAM = tl.constexpr(0)
M = tl.constexpr(1)  # first and second moment, whatever their names in the optimizer's state
V = tl.constexpr(2)
M_SCALE = tl.constexpr(3)
V_SCALE = tl.constexpr(4)
STEP = tl.constexpr(5)
NUMEL = tl.constexpr(6)
SEGMENT = tl.constexpr(7)
BLOCK = tl.constexpr(8)
PER_SEGMENT = tl.constexpr(9)
BLOCKS = tl.constexpr(10)
GROUP = tl.constexpr(11)
ORDER = tl.constexpr(12)  # slot -> tensor; a launch works on consecutive slots
FIRST_PROGRAM = tl.constexpr(13)  # by slot, within its launch
TRUST_RATIO = tl.constexpr(14)  # addresses, of LAMB and LARS
COUNTED_STEP = tl.constexpr(15)  # STEP of a tensor's first layer, 0 of its others: it is incremented once
WEIGHT_STATE = tl.constexpr(16)  # addresses; 0 where there is none

DITHER_STEP = tl.constexpr(C.DITHER_STEP)
WEIGHT_STEP = tl.constexpr(C.WEIGHT_STEP)
# A tensor's scalars, which the prologue computes, all fp32: each name of StepOp.scalars has one word in all optimizers.
_SCALARS = [
    *dict.fromkeys(name for op in STEP_OPS.values() for name in op.scalars),
    *("run", "adapt", "step_offset", "weight_offset"),
]
SCALARS = tl.constexpr(len(_SCALARS))


def scalar(name: str) -> tl.constexpr:
    """The word of a scalar among a tensor's. Below are those of several optimizers; modules have their own."""
    return tl.constexpr(_SCALARS.index(name))


GRAD_FACTOR = scalar("grad_factor")
BETA1 = scalar("beta1")
ONE_MINUS_BETA1 = scalar("one_minus_beta1")
BETA2 = scalar("beta2")
ONE_MINUS_BETA2 = scalar("one_minus_beta2")
DECAY = scalar("decay")  # 1 - lr * weight_decay where that is decoupled, else 1
RATE = scalar("rate")  # lr, times the trust ratio
RUN = scalar("run")  # 0 where the step is skipped
STEP_OFFSET = scalar("step_offset")  # step * DITHER_STEP modulo 2^32, for the dither: the bits of a uint32
WEIGHT_OFFSET = scalar("weight_offset")  # step * WEIGHT_STEP likewise, for the random bits of weights
PROLOGUE_TENSORS = tl.constexpr(128)  # per program of the prologue
_SEARCH = tl.constexpr(128)  # slots that find_tensor compares at a time


@triton.jit
def columns_of(table, groups, tensors):
    """Pointers to the gradients' addresses and to the columns."""
    grads = table + HEADER_WORDS + groups * GROUP_WORDS
    return grads, grads + tensors


@triton.jit
def tensors_of_program(table, groups, tensors):
    """What a program of the prologue works on: the columns, its tensors' indices, and their mask."""
    _, columns = columns_of(table, groups, tensors)
    t = tl.program_id(0) * PROLOGUE_TENSORS + tl.arange(0, PROLOGUE_TENSORS)
    return columns, t, t < tensors


@triton.jit
def group_of(table, columns, tensors, t, mask):
    """Pointers to the words of the tensors' groups."""
    group = tl.load(columns + GROUP * tensors + t, mask=mask, other=0)
    return table + HEADER_WORDS + group * GROUP_WORDS


@triton.jit
def find_tensor(columns, tensors, first, count, TILES: tl.constexpr):
    """This program's tensor, and the first of its tiles. Slots are in the order of their first programs."""
    program = tl.program_id(0)
    begins = columns + FIRST_PROGRAM * tensors + first
    lane = tl.arange(0, _SEARCH)
    before = tl.zeros((_SEARCH,), tl.int32)
    for i in range(0, count, _SEARCH):
        begin = tl.load(begins + i + lane, mask=i + lane < count, other=2**62)
        before += (begin <= program).to(tl.int32)
    slot = tl.sum(before) - 1
    return tl.load(columns + ORDER * tensors + first + slot), (program - tl.load(begins + slot)) * TILES


@triton.jit
def layout_of_tensor(word, tensors):
    """numel, segment, block, blocks per segment, blocks: what :func:`tile_of` takes."""
    return (
        tl.load(word + NUMEL * tensors),
        tl.load(word + SEGMENT * tensors),
        tl.load(word + BLOCK * tensors),
        tl.load(word + PER_SEGMENT * tensors),
        tl.load(word + BLOCKS * tensors),
    )


@triton.jit
def find_work(table, groups, tensors, first, count, TILES: tl.constexpr):
    """This program's tensor, its word in the first column, its gradient's address, its layout, its first tile."""
    grads, columns = columns_of(table, groups, tensors)
    tensor, first_tile = find_tensor(columns, tensors, first, count, TILES)
    word = columns + tensor
    return tensor, word, tl.load(grads + tensor), layout_of_tensor(word, tensors), first_tile


@triton.jit
def tiles_from(
    first_tile, layout, TILES: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, FLAT: tl.constexpr
):
    """The number of tiles of a program, from ``first_tile`` on: TILES, or fewer at the end of the tensor."""
    elements: tl.constexpr = ROWS * BLOCK_SIZE if FLAT else ROWS
    size = layout[0] if FLAT else layout[4]
    return tl.minimum((size + elements - 1) // elements - first_tile, TILES).to(tl.int32)


@triton.jit
def tiles_if(
    flag, first_tile, layout,
    TILES: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """:func:`tiles_from`, or none where the scalar at ``flag`` is 0."""
    return tl.where(tl.load(flag) != 0.0, tiles_from(first_tile, layout, TILES, ROWS, BLOCK_SIZE, FLAT), 0)


@triton.jit
def read_scalar(at, mask):
    """A scalar argument, as fp64: the word at ``at``, and its kind in the word after it; 0 where absent."""
    word = tl.load(at, mask=mask, other=0)
    kind = tl.load(at + 1, mask=mask, other=0)
    from_fp32 = tl.load(word.to(tl.pointer_type(tl.float32)), mask=mask & (kind == AT_FP32), other=0.0)
    from_fp64 = tl.load(word.to(tl.pointer_type(tl.float64)), mask=mask & (kind == AT_FP64), other=0.0)
    value = tl.where(kind == VALUE, word, 0).to(tl.float64, bitcast=True)
    return tl.where(kind == AT_FP64, from_fp64, tl.where(kind == AT_FP32, from_fp32.to(tl.float64), value))


@triton.jit
def read_fp64(at, mask):
    return tl.load(at, mask=mask, other=0).to(tl.float64, bitcast=True)


@triton.jit
def power_of(beta, step):
    """beta^step in fp64 by binary exponentiation, multiplications only, for an entry per tensor."""
    result = tl.full(beta.shape, 1.0, tl.float64)
    square = beta
    while tl.max(step, axis=0) > 0:
        result = tl.where((step & 1) == 1, result * square, result)
        square = square * square
        step = step >> 1
    return result


@triton.jit
def gradient_factor(table):
    """fp64: the factor of all gradients: 1 / grad_scale, times max_grad_norm / grad_norm where that is below 1."""
    always = tl.program_id(0) >= 0  # a mask that is true
    factor = 1.0 / read_scalar(table + GRAD_SCALE, always)
    factor = tl.where(tl.load(table + GRAD_SCALE + 1) == ABSENT, 1.0, factor)
    clip = read_fp64(table + MAX_GRAD_NORM, always) / (read_scalar(table + GRAD_NORM, always) + 1e-6)
    unclipped = (tl.load(table + GRAD_NORM + 1) == ABSENT) | (clip >= 1.0)
    return tl.where(unclipped, factor, factor * clip)


@triton.jit
def skipped(table):
    """Whether a GradScaler found a non-finite gradient: the step is then skipped whole."""
    return read_scalar(table + FOUND_INF, tl.program_id(0) >= 0) != 0.0


@triton.jit
def increment_steps(table, columns, tensors, t, mask):
    """Increments the tensors' steps, unless the step is skipped. Returns them, int64."""
    at = tl.load(columns + STEP * tensors + t, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(at, mask=mask, other=0.0)
    step = tl.where(skipped(table), step, step + 1.0)
    tl.store(at, step, mask=mask)
    return step.to(tl.int64)


@triton.jit
def store_step_offset(out, step, mask):
    tl.store(out + STEP_OFFSET, (step * DITHER_STEP).to(tl.int32).to(tl.float32, bitcast=True), mask=mask)
    tl.store(out + WEIGHT_OFFSET, (step * WEIGHT_STEP).to(tl.int32).to(tl.float32, bitcast=True), mask=mask)


@triton.jit
def dither_of(s, BLOCK_SIZE: tl.constexpr):
    """The dither u of a tensor's step for each position of a block, (1, BLOCK_SIZE); ``s``: its scalars."""
    return dither(tl.arange(0, BLOCK_SIZE), tl.load(s + STEP_OFFSET).to(tl.uint32, bitcast=True))[None, :]
