"""Cases that run the kernels that no case of cases.py does, for the checks of checked.py."""

from __future__ import annotations

from collections.abc import Callable

from lab.emulators.fakegpu import Machine
from lab.emulators.fakegpu.cases import steps_of

CASES: dict[str, Callable[[Machine], None]] = {
    **{
        f"{name}, dynamic codes of bf16 weights": steps_of(name, 1, (1, 1), weights=(1, 2))
        for name in ("adam_step_", "lamb_step_", "lars_step_", "lion_step_", "sgd_step_")
    },
    "sgd_step_ fp32, both codecs": steps_of("sgd_step_", 0, (0, 1)),
    "sgd_step_, power codes of bf16 weights": steps_of("sgd_step_", 1, (0, 0), weights=(2, 3)),
}


def case(function: Callable[[Machine], None]) -> Callable[[Machine], None]:
    CASES[function.__name__.replace("_", " ")] = function
    return function


@case
def whole_blocks_to_the_nearest(machine: Machine) -> None:
    from memkern import reference
    from tests.support.helpers import FLOATS, assert_same, hard

    for dtype in FLOATS:
        for signed, blocks in ((True, 33), (False, 5)):
            x = hard((blocks, 128), blocks, signed=signed).to(dtype)
            expected = reference.quantize_blockwise(x, 0, signed, 128, None)
            actual = machine.ops.quantize_blockwise(machine.to_device(x), 0, signed, 128, None)
            assert_same(machine.to_host(actual), [*expected], f"{dtype}, {signed=}")


@case
def unsigned_codes_of_the_dynamic_map(machine: Machine) -> None:
    from memkern import reference
    from tests.support.helpers import FLOATS, assert_same, hard

    for dtype in FLOATS:
        x = hard((5, 300), 5, signed=False).to(dtype)
        expected = reference.quantize_blockwise(x, 1, False, 128, 3)
        actual = machine.ops.quantize_blockwise(machine.to_device(x), 1, False, 128, 3)
        assert_same(machine.to_host(actual), [*expected], f"{dtype}")
        back = machine.ops.dequantize_blockwise(*actual, 1, 128, dtype)
        assert_same(machine.to_host(back), reference.dequantize_blockwise(*expected, 1, 128, dtype), f"{dtype}")


@case
def levels_of_all_bits(machine: Machine) -> None:
    from memkern import reference
    from memkern.fewbit.tables import LEVELS
    from tests.support.activation_helpers import values
    from tests.support.helpers import FLOATS, assert_same

    for dtype in FLOATS:
        for bits in (1, 2, 3, 4):
            x, grad, table = values("odd", dtype), values("odd", dtype, seed=1), LEVELS["gelu", bits]
            codes = reference.few_bit_encode(x, bits, *table[2:])
            there, grad_there = machine.to_device([codes, grad])
            actual = machine.ops.few_bit_backward(grad_there, there, table.levels)
            assert_same(machine.to_host(actual), reference.few_bit_backward(grad, codes, table.levels))


@case
def gelu_of_all_bits(machine: Machine) -> None:
    """The codes; lab/tests/test_gpu_ptx.py compares the results."""
    import torch

    from memkern import reference
    from memkern.fewbit.tables import LEVELS
    from memkern.quant.codec import ACTIVATIONS
    from tests.support.activation_helpers import values
    from tests.support.activation_kernels import every_bf16
    from tests.support.helpers import assert_same

    for name in ("gelu", "gelu_tanh"):
        for bits in (1, 2, 3, 4):
            for x in (values("odd", torch.float32), values("odd", torch.float16), every_bf16(8)):
                table = LEVELS[name, bits][2:]
                _, codes = machine.ops.few_bit_forward(machine.to_device(x), ACTIVATIONS[name], 0.0, 0.0, bits, *table)
                assert_same(machine.to_host(codes), reference.few_bit_encode(x, bits, *table), f"{name}, {bits}")
