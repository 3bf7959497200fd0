"""Bad options, parameters, gradients and states raise an error that says what is wrong, before anything changes."""

import inspect
import math
import os
import pydoc
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memkern import optim
from tests.support.helpers import (
    OPTIMIZERS,
    assert_same,
    give_gradients,
    make_params,
    on,
    over_kinds,
    over_optimizers,
    set_grad,
    snapshot,
    train,
)
from tests.support.optimizers import SPECS
from tests.support.optimizers.spec import BAD_EPS

ROOT = Path(__file__).parents[2]

# options out of range, the error's message
OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"lr": -1e-3}, "lr must be 0 or more and finite, got -0.001"),
    ({"lr": math.nan}, "lr must be 0 or more"),
    ({"lr": math.inf}, "lr must be 0 or more and finite, got inf"),
    ({"lr": "1e-3"}, "lr must be 0 or more and finite, got '1e-3'"),
    ({"lr": None}, "lr must be 0 or more and finite, got None"),
    ({"lr": torch.ones(2)}, "lr must be a float or a 0-dim"),
    ({"lr": torch.tensor(1)}, "lr must be a float or a 0-dim"),
    # A kernel reads fp32 and fp64; other dtypes are refused here, not in training.
    ({"lr": torch.tensor(0.5, dtype=torch.bfloat16)}, "lr must be a float or a 0-dim"),
    ({"lr": torch.tensor(0.5, dtype=torch.float16)}, "lr must be a float or a 0-dim"),
    ({"lr": torch.tensor(1j)}, "lr must be a float or a 0-dim"),
    ({"weight_decay": -1e-2}, "weight_decay must be 0 or more"),
    ({"weight_decay": math.nan}, "weight_decay must be 0 or more"),
    ({"weight_decay": math.inf}, "weight_decay must be 0 or more and finite, got inf"),
    ({"weight_decay": "0.1"}, "weight_decay must be 0 or more and finite, got '0.1'"),
    ({"weight_decay": torch.tensor(-0.1)}, "weight_decay must be 0 or more and finite, got tensor"),
    ({"weight_decay": torch.zeros(2)}, r"weight_decay must be a number, or a tensor of one element .* of shape \(2,\)"),
    ({"weight_decay": torch.tensor(0.1, device="meta")}, "weight_decay must be a number, or .* on the CPU.* on meta"),
    ({"block_size": torch.tensor(12)}, "block_size must be a multiple of 8"),
    ({"max_grad_norm": torch.tensor(-1.0)}, "max_grad_norm must be None or more than 0, got -1.0"),
    ({"state_bits": 4}, "state_bits must be 8 or 32, got 4$"),
    ({"state_bits": "8"}, "state_bits must be 8 or 32, got '8'$"),
    ({"state_bits": (8, 4)}, r"state_bits must be 8 or 32, got \(8, 4\)$"),
    ({"state_bits": None}, "state_bits must be 8 or 32, got None$"),
    ({"block_size": 0}, "block_size must be a multiple of 8"),
    ({"block_size": 12}, "block_size must be a multiple of 8"),
    ({"block_size": 8192}, "block_size must be a multiple of 8"),
    ({"block_size": 128.0}, "block_size must be a multiple of 8"),
    ({"codec": "linear"}, "codec must be one of 'power', 'dynamic', got 'linear'"),
    ({"min_8bit_size": -1}, "min_8bit_size must be a whole number"),
    ({"min_8bit_size": 4096.0}, "min_8bit_size must be a whole number"),
    ({"differentiable": True}, "does not support differentiable=True"),
    ({"max_grad_norm": 0.0}, "max_grad_norm must be None or more than 0"),
    ({"max_grad_norm": -1.0}, "max_grad_norm must be None or more than 0"),
    ({"max_grad_norm": math.nan}, "max_grad_norm must be None or more than 0"),
    ({"max_grad_norm": "1"}, "max_grad_norm must be None or more than 0, got '1'"),
]
BETAS: list[tuple[dict[str, Any], str]] = [
    ({"betas": (1.0, 0.9)}, "betas must be"),
    ({"betas": (0.9, 1.0)}, "betas must be"),
    ({"betas": (-0.1, 0.9)}, "betas must be"),
    ({"betas": (0.9, math.nan)}, "betas must be"),
    ({"betas": (0.9,)}, "betas must be"),
    ({"betas": (0.9, 0.99, 0.999)}, "betas must be"),
    ({"betas": 0.9}, "betas must be two floats from 0 to below 1, got 0.9"),
    ({"betas": ("0.9", 0.99)}, "betas must be"),
    ({"betas": (torch.tensor(0.9), 1.0)}, "betas must be two floats from 0 to below 1"),
    ({"betas": (torch.tensor(0.9), torch.tensor(1.0))}, "betas must be two floats from 0 to below 1"),
    ({"betas": (torch.tensor(0.9), torch.tensor([0.9, 0.99]))}, "each of betas must be .* a tensor of one element"),
    ({"betas": (torch.tensor(0.9), torch.tensor(0.9, device="meta"))}, "on the CPU.*on meta"),
]
OF_THE_OPTIMIZER_ALONE = {"differentiable", "caution", "corrected_weight_decay", "grad_averaging"}


def option_id(value: Any) -> str | None:
    return ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else None


# class, options out of range, the error's message: all shared options for one class, for the others an option each
REFUSED = [
    pytest.param(cls, *case, id=f"{cls.__name__}-{option_id(case[0])}")
    for cls, cases in [
        (optim.AdamW8bit, OPTIONS + BETAS + BAD_EPS),
        *((cls, OPTIONS[i : i + 1]) for i, cls in enumerate(OPTIMIZERS)),
        *((spec.cls, spec.refused + BETAS[: spec.has_betas]) for spec in SPECS.values()),
    ]
    for case in cases
]


@pytest.mark.parametrize(("build", "options", "message"), REFUSED)
def test_options_out_of_range_raise(build: type, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(make_params(), **options)
    optimizer = build(make_params())
    if not {*options} & OF_THE_OPTIMIZER_ALONE:
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group({"params": make_params(), **options})
        assert len(optimizer.param_groups) == 1
    train(optimizer, 1)


@over_optimizers
def test_unknown_options_raise(build: type) -> None:
    with pytest.raises(TypeError, match=rf"^{build.__name__}\.__init__\(\) got an unexpected keyword argument 'paged'"):
        build(make_params(), paged=True)


@over_optimizers
def test_help_has_every_option(build: type) -> None:
    """Each class has its own signature and docstring; 8 bits are another default and nothing else."""
    bits = 8 if build.__name__.endswith("8bit") else 32
    assert f"state_bits: 'int' = {bits}" in pydoc.plain(pydoc.render_doc(build))
    parameters = inspect.signature(build).parameters
    assert not {p.kind for p in parameters.values()} & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    missing = [name for name in parameters if not re.search(rf"\b{name}\b", build.__doc__)]
    assert not missing, f"the docstring of {build.__name__} does not mention {', '.join(missing)}"
    of_32_bits = inspect.signature(getattr(optim, build.__name__.removesuffix("8bit"))).parameters
    expected = [p.replace(default=bits) if name == "state_bits" else p for name, p in of_32_bits.items()]
    assert [*parameters.values()] == expected


def non_default(name: str, default: Any) -> Any:
    if name == "state_bits":
        return 40 - default
    if name in ("betas", "block_size", "codec"):
        return {"betas": (0.5, 0.75), "block_size": 64, "codec": "dynamic"}[name]
    if isinstance(default, bool):
        return not default
    return default + 1 if isinstance(default, int) else 0.5


@over_kinds
def test_a_subclass_may_take_other_arguments(build: Any) -> None:
    class Bare(build):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(make_params(), lr=0.5)

    class Keywords(build):  # type: ignore[misc]
        def __init__(self, params: Any, *, lr: float) -> None:
            super().__init__(params, lr=lr)

    assert [*inspect.signature(Bare).parameters] == []
    assert [*inspect.signature(Keywords).parameters] == ["params", "lr"]
    for optimizer in (Bare(), Keywords(make_params(), lr=0.5)):
        train(optimizer, 1)
        assert optimizer.param_groups[0]["lr"] == 0.5


@over_optimizers
def test_options_reach_the_groups(build: type) -> None:
    """By name and by position; options of classic LARS, and options that need or refuse others, are left out."""
    parameters = inspect.signature(build).parameters
    names = {"lr", "weight_decay", "momentum", "eps", "betas", "maximize", "layers", "decoupled_weight_decay"}
    names |= {"bias_correction", "trust_clip", "always_adapt", "decoupled_decay", "max_grad_norm"}
    names |= {"state_bits", "block_size", "codec", "min_8bit_size"}
    options = {n: non_default(n, p.default) for n, p in parameters.items() if n in names}
    group = build(make_params([(64, 128)]), **options).param_groups[0]
    assert {name: group[name] for name in options} == options
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD][1:]  # without params
    values = [options.get(n, parameters[n].default) for n in positional]
    group = build(make_params([(64, 128)]), *values).param_groups[0]
    assert all(group[n] == value for n, value in zip(positional, values, strict=True) if n in options)


@pytest.mark.long
def test_a_type_checker_finds_a_misspelt_option(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    misspelt = [f"optim.{build.__name__}([torch.ones(3)], lr=1.0, weight_deacy=0.1)" for build in OPTIMIZERS]
    correct = [f"optim.{build.__name__}([torch.ones(3)], lr=1.0, weight_decay=0.1)" for build in OPTIMIZERS]
    (tmp_path / "script.py").write_text("\n".join(["import torch", "from memkern import optim", *misspelt, *correct]))
    config = ["--config-file", os.devnull, "--follow-imports=silent", "--cache-dir", str(tmp_path / "cache")]
    result = subprocess.run(
        [sys.executable, "-m", "mypy", *config, str(tmp_path / "script.py")],
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    for build in OPTIMIZERS:
        expected = rf'Unexpected keyword argument "weight_deacy" for "{build.__name__}"; did you mean "weight_decay"\?'
        assert len(re.findall(expected, result.stdout)) == 1, result.stdout + result.stderr
    assert result.stdout.count("error:") == len(OPTIMIZERS), result.stdout


DENSE = torch.ones(8, 16)
# name: what makes the parameter, the error and its message
PARAMS: dict[str, tuple[Callable[[], Any], type, str]] = {
    "overlap": (
        lambda: torch.ones(100).as_strided((8, 16), (4, 1)).requires_grad_(),
        ValueError,
        r"a place of its own in memory, got shape \(8, 16\) with strides \(4, 1\)",
    ),
    "expanded": (lambda: torch.ones(8, 1).expand(8, 16).requires_grad_(), ValueError, "a place of its own"),
    "sparse": (lambda: torch.eye(4).to_sparse().requires_grad_(), ValueError, "dense"),
    "complex": (
        lambda: DENSE.to(torch.complex64).requires_grad_(),
        TypeError,
        r"params must be .*complex64.*no meaning.*torch\.view_as_real",
    ),
    "fp8": (lambda: DENSE.to(torch.float8_e5m2).requires_grad_(), TypeError, "float64, got torch.float8_e5m2"),
}


@over_kinds
@pytest.mark.parametrize("name", PARAMS)
def test_parameters_of_a_wrong_kind_are_refused(build: type, name: str) -> None:
    bad, error, message = PARAMS[name]
    with pytest.raises(error, match=message):
        build([*make_params(), bad()])
    with pytest.raises(error, match=message):
        build([*((f"p{i}", p) for i, p in enumerate(make_params())), ("bad", bad())])
    optimizer = build(make_params())
    with pytest.raises(error, match=message):
        optimizer.add_param_group({"params": [bad()]})
    assert len(optimizer.param_groups) == 1


@over_kinds
def test_groups_that_torch_refuses_are_refused(build: type) -> None:
    p, q = make_params([(4, 4), (5, 5)])
    optimizer = build([p])
    for bad, error in (
        ({"params": {q}}, TypeError),  # a set has no order
        ({"params": [p]}, ValueError),  # p would be in two groups
        ([q], TypeError),  # a group is a dict
    ):
        with pytest.raises(error):
            optimizer.add_param_group(bad)
        with pytest.raises(error):
            torch.optim.AdamW([p]).add_param_group(bad)
    assert len(optimizer.param_groups) == 1


def resize(p: torch.nn.Parameter) -> None:
    p.grad = torch.ones_like(p)
    p.data = torch.ones(3, 5)


def gradient_of(dtype: torch.dtype) -> Callable[[torch.nn.Parameter], None]:
    return lambda p: set_grad(p, torch.ones_like(p, dtype=dtype))


def sparse(p: torch.nn.Parameter) -> None:
    p.grad = torch.ones_like(p).to_sparse()


# name: what gives the parameter a bad gradient, the error and its message
GRADIENTS: dict[str, tuple[Callable[[torch.nn.Parameter], None], Any, str]] = {
    "sparse": (sparse, RuntimeError, "dense gradients.*SparseAdam"),
    "fp64": (gradient_of(torch.float64), TypeError, "gradients must be float32, bfloat16 or float16"),
    "complex": (gradient_of(torch.complex64), TypeError, "gradients must be float32, bfloat16 or float16"),
    # The state of the old shape may be refused before the gradient.
    "another shape": (resize, (RuntimeError, ValueError), "parameter's shape and device|must be of shape"),
}


@over_kinds
@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("steps", [0, 2], ids=["first step", "later"])
def test_bad_gradients_raise_before_anything_changes(build: type, name: str, steps: int) -> None:
    spoil, error, message = GRADIENTS[name]
    params = make_params()
    optimizer = build([{"params": params[:1]}, {"params": params[1:]}])
    train(optimizer, steps)
    give_gradients(params, 9)
    spoil(params[1])
    before, versions = snapshot(optimizer), [p._version for p in params]
    with pytest.raises(error, match=message):
        optimizer.step()
    after = snapshot(optimizer)
    assert_same(after["params"], before["params"])
    assert [p._version for p in params] == versions
    if steps:
        assert_same(after["states"], before["states"])
    else:
        initial = {"trust_ratio": 1.0}  # all others: 0
        assert all((value == initial.get(key, 0)).all() for state in after["states"] for key, value in state.items())
    if name != "another shape":  # a step without the bad gradient works
        params[1].grad = None
        optimizer.step()


def reshape(optimizer: Any, p: torch.nn.Parameter) -> None:
    p.data = torch.ones(3, 5)


def put(key: str, x: Any) -> Callable[[Any, Any], None]:
    return lambda optimizer, p: optimizer.state[p].update({key: x})


# name: what spoils the optimizer's state of a parameter, the error's message
MISFITS: dict[str, tuple[Callable[[Any, torch.nn.Parameter], None], str]] = {
    "shape": (reshape, r"\w+ of parameter 1 \('b', shape \(3, 5\)\) must be of shape \(3, 5\), got"),
    "infinite step": (put("step", torch.tensor(math.inf)), r"step of parameter 1 .*finite number.* got inf"),
    "NaN step": (put("step", torch.tensor(math.nan)), r"step of parameter 1 .*finite number.* got nan"),
    "negative step": (put("step", torch.tensor(-2.0)), r"step of parameter 1 .*finite number.* got -2"),
    "step of integers": (put("step", torch.tensor(3)), r"step of parameter 1 .*must be a float32 tensor"),
    "two steps": (put("step", torch.ones(2)), r"step of parameter 1 .*must be a float32 tensor of one element"),
}


@over_kinds
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", MISFITS)
def test_the_error_names_the_parameter_whose_state_does_not_fit(build: type, backend: str, name: str) -> None:
    """By number and name, not by an index in an op's list or a file of C++ or Python."""
    spoil, message = MISFITS[name]
    params = make_params([(64, 128), (10, 10)])
    optimizer = build([{"params": [("a", params[0])]}, {"params": [("b", params[1])]}])
    train(optimizer, 1)
    spoil(optimizer, params[1])
    give_gradients(params, 9)
    before = params[0].detach().clone()
    with on(backend), pytest.raises((RuntimeError, ValueError, TypeError), match=f"^{message}") as caught:
        optimizer.step()
    assert not re.search(r"\.(h|cpp|cu|py)\b", str(caught.value))
    assert torch.equal(params[0], before)
    assert float(optimizer.state[params[0]]["step"]) == 1
