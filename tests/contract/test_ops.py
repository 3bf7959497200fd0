"""torch.ops.memkern and torch.ops.memkern_reference: complete, alike, and checked by opcheck."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import memkern
from memkern import reference, schemas
from memkern.schemas import STEP_OPS
from tests.support.helpers import assert_same, needs_cpp
from tests.support.interpreted import interpreted
from tests.support.op_helpers import CASES, NAMESPACES, SAMPLES, op, over_namespaces, step_args
from tests.support.optimizers import SPECS

over_ops = pytest.mark.parametrize("name", schemas.SCHEMAS)


# ---- every op has all its parts


@over_ops
def test_every_op_has_a_reference_a_fake_a_test_and_a_benchmark(name: str) -> None:
    root = Path(__file__).parents[2]
    public = name.removesuffix("_step_").removesuffix("_")  # adam, lion, quantize_blockwise, ...
    assert name in reference.__all__
    assert callable(getattr(reference, name))
    assert name in schemas.FAKES
    assert name in SAMPLES
    steps = {spec.family: f"{spec.name}8bit" for spec in SPECS.values()}
    word = steps.get(public, public)
    folders = {"tests": "**/test_*.py", "benchmarks": "bench_*.py"}
    for folder, pattern in folders.items():
        files = {*(root / folder).glob(pattern)} - {Path(__file__)}  # which has every word
        assert any(word in file.read_text() for file in files), f"{folder}/ does not mention {word}"


def test_nothing_is_left_unlisted() -> None:
    only_by_reference = {schemas.AMSGRAD_STEP.name}
    assert {*schemas.FAKES} == {*schemas.SCHEMAS} == {*reference.__all__} - only_by_reference
    registered = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("memkern::")}
    assert registered == {*schemas.SCHEMAS}


@over_ops
def test_schemas_are_alike(name: str) -> None:
    ours, references = (str(op(namespace, name)._schema) for namespace in NAMESPACES[:2])
    assert ours.split("::")[1] == references.split("::")[1]
    stated = torch._C.parse_schema(f"memkern::{name}{schemas.SCHEMAS[name]}")
    assert str(stated) == ours


@needs_cpp
@over_ops
def test_cpu_tensors_meet_cpp(name: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"memkern::{name}", "CPU")
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"memkern_reference::{name}", "CPU")


# ---- opcheck


@interpreted(name=("adam_step_", "lion_step_", "grad_norm_"), sample=("mixed, scaler", "all dtypes, scaler"))
@pytest.mark.parametrize(
    "namespace", [pytest.param(n, marks=pytest.mark.full if n == "memkern_reference" else ()) for n in NAMESPACES]
)
@pytest.mark.parametrize(("name", "sample"), CASES)
def test_opcheck(namespace: str, name: str, sample: str) -> None:
    """With a graph of aot_dispatch, which takes most of the time, for one sample of each layout or kind of states."""
    layout = sample.split(",")[0]
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if sample == next(each for each in SAMPLES[name] if each.split(",")[0] == layout):
        checks.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(op(namespace, name), SAMPLES[name][sample](), test_utils=checks)


@needs_cpp  # else torch.ops.memkern is the reference itself
@pytest.mark.parametrize(("name", "sample"), CASES)
def test_namespaces_give_the_same_bits(name: str, sample: str) -> None:
    results = []
    for namespace in NAMESPACES:
        args = SAMPLES[name][sample]()
        result = op(namespace, name)(*args)
        results.append(
            [[*result] if isinstance(result, tuple) else result, [a for a in args if isinstance(a, (list, Tensor))]]
        )
    if name in ("grad_norm_", "muon_momentum_"):  # each backend adds up in an order of its own
        at = 1 if name == "muon_momentum_" else 0
        sums = [found.pop(at) for _, found in results]
        torch.testing.assert_close(*sums, rtol=1e-12, atol=0)
    assert_same(*results)


@pytest.mark.parametrize("name", [name for name in SAMPLES if not name.endswith("_")])
def test_meta_tensors(name: str) -> None:
    # What the fakes say about shapes, strides and dtypes, on tensors without data.
    for make in SAMPLES[name].values():
        args = make()
        real = op("memkern", name)(*args)
        fake = op("memkern", name)(*(a.to("meta") if isinstance(a, Tensor) else a for a in args))
        for r, f in zip(*((x if isinstance(x, tuple) else (x,)) for x in (real, fake)), strict=True):
            assert (r.shape, r.dtype) == (f.shape, f.dtype)
            assert r.numel() < 2 or r.stride() == f.stride()


TWO_PASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "LAMB": ("lamb_step_", {}),
    "LAMB, layers": ("lamb_step_", {"layers": [1, 3, 1], "trust_ratios": [torch.ones(n) for n in (1, 3, 1)]}),
    "LARS": ("lars_step_", {}),
    "LARS, classic": ("lars_step_", {"trust_coeff": [1e-2] * 3, "nesterov": [1] * 3}),
}


@interpreted(case=("LAMB", "LARS, classic"))
@over_namespaces
@pytest.mark.parametrize("case", TWO_PASSES)
def test_two_passes_one_after_the_other(namespace: str, case: str) -> None:
    """Squares of layers by one call, and the step with them by another: the bits of a step in one call."""
    name, options = TWO_PASSES[case]

    def new() -> schemas.StepArgs:
        return copy.deepcopy(step_args(name, ["codes", "fp32", "codes"], **options))

    whole, halves, expected = new(), new(), new()
    squares, truth = (torch.zeros(sum(map(len, whole.trust_ratios)), 2, dtype=torch.float64) for _ in range(2))
    step = op(namespace, name)
    op("memkern_reference", name)(*new()._replace(squares=truth, squares_only=True))
    step(*whole)
    step(*halves._replace(squares=squares, squares_only=True))
    assert_same([*halves], [*expected])
    torch.testing.assert_close(squares, truth, rtol=1e-12, atol=0)
    assert (squares > 0).all()
    step(*halves._replace(squares=squares))
    assert_same([*halves], [*whole])


@over_namespaces
def test_opcheck_of_squares(namespace: str) -> None:
    squares = torch.zeros(2, 2, dtype=torch.float64)
    args = step_args("lamb_step_", ["codes", "fp32"], squares=squares, squares_only=True)
    torch.library.opcheck(op(namespace, "lamb_step_"), args)


@over_namespaces
def test_no_gradient_flows_through_codes(namespace: str) -> None:
    x = torch.randn(4, 256, requires_grad=True)
    codes, _ = memkern.quantize_blockwise(x)
    assert not codes.requires_grad
    with torch.no_grad():
        assert_same(op(namespace, "quantize_blockwise")(x, 0, True, 128)[0], codes)


@over_namespaces
@pytest.mark.parametrize("name", STEP_OPS)
def test_gradients_of_other_strides_are_taken(namespace: str, name: str) -> None:
    expected, actual = (step_args(name, ["codes", "fp32", "codes"]) for _ in range(2))
    others = [
        expected.grads[0].t().contiguous().t(),
        torch.stack([expected.grads[1], expected.grads[1]], -1)[..., 0],  # with gaps
        expected.grads[2].contiguous(),  # of a channels_last parameter
    ]
    for g, same in zip(others, expected.grads, strict=True):
        assert_same(g.contiguous(), same.contiguous())
        assert g.stride() != same.stride()
    before = [g.clone() for g in others]
    op(namespace, name)(*expected)
    op(namespace, name)(*actual._replace(grads=others))
    assert_same([*actual._replace(grads=())], [*expected._replace(grads=())])
    assert_same([g.contiguous() for g in others], [g.contiguous() for g in before])


@over_namespaces
def test_a_norm_of_gradients_of_any_strides(namespace: str) -> None:
    x, norm = torch.randn(64, 64), torch.zeros((), dtype=torch.float64)
    op(namespace, "grad_norm_")(norm, [x[:, ::2], x.t(), torch.ones(()).expand(7, 9)])
    expected = (x[:, ::2].double().square().sum() + x.double().square().sum() + 63) ** 0.5
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
