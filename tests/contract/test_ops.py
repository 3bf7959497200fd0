"""torch.ops.memkern and torch.ops.memkern_reference have the same ops and schemas, and pass torch's opcheck."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import memkern
from memkern import reference, schemas
from tests.support.helpers import assert_same, at, on, over_all, why_not
from tests.support.interpreted import interpreted
from tests.support.kernels.arguments import LAYERWISE, step_args
from tests.support.kernels.hard_values import of_size
from tests.support.op_helpers import NAMESPACES, SAMPLES, op, over_namespaces
from tests.support.optimizers import SPECS

ROOT = Path(__file__).parents[2]


# ---- every op has all its parts


@pytest.mark.parametrize("name", schemas.SCHEMAS)
def test_every_op_has_a_reference_with_its_schema_a_test_and_a_benchmark(name: str) -> None:
    public = name.removesuffix("_step_").removesuffix("_")  # adam, lion, quantize_blockwise, ...
    assert name in SAMPLES
    word = {spec.family: f"{spec.name}8bit" for spec in SPECS.values()}.get(public, public)
    assert any(word in file.read_text() for file in (ROOT / "benchmarks").glob("bench_*.py"))
    ours, references = (str(op(namespace, name)._schema) for namespace in NAMESPACES[:2])
    assert ours.split("::")[1] == references.split("::")[1]
    assert ours == str(torch._C.parse_schema(f"memkern::{name}{schemas.SCHEMAS[name]}"))
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"memkern_reference::{name}", "CPU")
    in_cpp = torch._C._dispatch_has_kernel_for_dispatch_key(f"memkern::{name}", "CPU")
    assert in_cpp == (why_not("cpu") is None)


def test_every_registered_op_has_a_schema() -> None:
    only_by_reference = {schemas.AMSGRAD_STEP.name}
    assert {*schemas.FAKES} == {*schemas.SCHEMAS} == {*reference.__all__} - only_by_reference
    registered = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("memkern::")}
    assert registered == {*schemas.SCHEMAS}


# ---- opcheck


@interpreted(name=("adam_step_", "lion_step_"), sample=("mixed, scaler",))
@pytest.mark.parametrize(
    ("namespace", "name", "sample"),
    [
        # Of the reference, whose schemas and fakes are the same, one sample.
        pytest.param(n, name, sample, marks=pytest.mark.full if n == "memkern_reference" else ())
        for n in NAMESPACES
        for name, samples in SAMPLES.items()
        for sample in ([*samples][:1] if n == "memkern_reference" else samples)
    ],
)
def test_ops_pass_opcheck(namespace: str, name: str, sample: str) -> None:
    """opcheck's slow test_aot_dispatch_dynamic is run for each op's first sample, and for steps with all arguments."""
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if sample in (next(iter(SAMPLES[name])), "mixed, scaler"):
        checks.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(op(namespace, name), SAMPLES[name][sample](), test_utils=checks)


@interpreted(layers=(1,))
@over_namespaces
@pytest.mark.parametrize("name", LAYERWISE)
@pytest.mark.parametrize("layers", [1, 3])
def test_squares_and_step_in_two_calls_have_the_bits_of_one(namespace: str, name: str, layers: int) -> None:

    def arguments() -> schemas.StepArgs:
        return step_args(
            name, ("1-D", "long rows", "whole blocks"), layers=[1, layers], groups=(0, 4), gradient=of_size(1e-3)
        )

    in_one_call, in_two_calls, unchanged = arguments(), arguments(), arguments()
    squares, truth = (torch.zeros(sum(map(len, in_one_call.trust_ratios)), 2, dtype=torch.float64) for _ in range(2))
    step = op(namespace, name)
    op("memkern_reference", name)(*arguments()._replace(squares=truth, squares_only=True))
    step(*in_one_call)
    step(*in_two_calls._replace(squares=squares, squares_only=True))
    assert_same([*in_two_calls], [*unchanged])
    torch.testing.assert_close(squares, truth, rtol=1e-12, atol=0)  # fp64 sums in another order
    assert (squares > 0).all()
    step(*in_two_calls._replace(squares=squares))
    assert_same([*in_two_calls], [*in_one_call])


@interpreted()
@over_all
def test_a_gradient_that_is_negated_lazily(backend: str) -> None:
    """The gradient of a number b in ``torch.complex(a, b).conj()`` is one."""
    p = torch.nn.Parameter(at(torch.ones(1), backend))
    p.grad = torch._neg_view(torch.ones_like(p))
    with on(backend):
        memkern.optim.SGD([p], lr=0.5).step()
    assert (p == 1.5).all()


@interpreted()
@over_all
def test_torchs_default_device_holds_nothing_of_a_step(backend: str) -> None:
    p = torch.nn.Parameter(at(torch.ones(300), backend))
    p.grad = torch.ones_like(p)
    with on(backend), torch.device("meta"):
        memkern.optim.SGD([p], lr=0.5).step()
    assert (p == 0.5).all()


@interpreted()
@over_namespaces
def test_another_shape_in_the_same_memory(namespace: str) -> None:
    """A new model's tensors may lie where those of a freed one did, at each of its addresses."""
    room: dict[str, Tensor] = {}

    def moved(field: str, x: Tensor) -> Tensor:
        memory = room.setdefault(field, torch.empty(2000, dtype=x.dtype))
        return memory[: x.numel()].view(x.shape).copy_(x)

    for shape in ((10, 130), (130, 10)):  # in 20 blocks, and in 11
        expected = step_args("lion_step_", [shape], kinds="codes")
        fields = ("params", "grads", "moments", "scales", "steps")
        args = expected._replace(**{field: [moved(field, x) for x in getattr(expected, field)] for field in fields})
        op("memkern_reference", "lion_step_")(*expected)
        op(namespace, "lion_step_")(*args)
        assert_same([*args], [*expected])
