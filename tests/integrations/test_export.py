"""Compressed models under ONNX export, dynamic quantization, torch.jit, torch.fx and torch.export."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx

import memkern
from memkern import memory

# options of memkern.compress
CASES: dict[str, dict[str, Any]] = {
    "activations": {},
    "output": {"activations": "output"},
    "linear": {"activations": None, "linear": {"share": 0.5, "min_tokens": 0}},
}


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))


def texts(error: BaseException | None) -> str:
    """The messages of an exception and of all exceptions that caused it."""
    messages = []
    while error is not None:
        messages.append(str(error))
        error = error.__cause__ or error.__context__
    return "\n".join(messages)


@pytest.mark.feature("torch", "ONNX export of a compressed model names `restore`")
@pytest.mark.parametrize(
    ("case", "dynamo"), [*((case, False) for case in CASES), pytest.param("linear", True, marks=pytest.mark.full)]
)
def test_onnx_export_names_restore(case: str, dynamo: bool) -> None:
    if dynamo:
        pytest.importorskip("onnxscript")
    net, x = model(), torch.randn(8, 16)
    memkern.compress(net, **CASES[case])

    def export() -> io.BytesIO:
        file = io.BytesIO()
        program = torch.onnx.export(net, (x,), None if dynamo else file, dynamo=dynamo, verbose=False)
        if dynamo:
            assert program is not None
            program.save(file)
        return file

    with pytest.raises(Exception) as raised:  # noqa: PT011  (an exporter's own exception, whose cause is memkern's)
        export()
    assert "memkern.restore(model)" in texts(raised.value)
    with torch.no_grad():
        assert export().tell() > 0
    memkern.restore(net)
    assert export().tell() > 0


@pytest.mark.feature("torch", "`quantize_dynamic` after `restore`; before it, randomized layers refuse")
def test_dynamic_quantization_is_refused_or_right() -> None:
    quantization = pytest.importorskip("torch.ao.quantization")
    net, x = model(), torch.randn(8, 16)
    memkern.compress(net, linear={"share": 0.5, "min_tokens": 0})
    with pytest.raises(RuntimeError, match=r"memkern\.restore\(model\)"):
        quantization.quantize_dynamic(net, {torch.nn.Linear})
    memkern.restore(net)
    quantized = quantization.quantize_dynamic(net, {torch.nn.Linear})
    assert "quantized" in type(quantized[0]).__module__
    torch.testing.assert_close(quantized(x), net(x), rtol=0, atol=0.1)  # int8 steps are 1 / 127 of the largest weight
    activations = model()
    memkern.compress(activations)
    quantized = quantization.quantize_dynamic(activations, {torch.nn.Linear})
    assert "quantized" in type(quantized[0]).__module__


RECORDERS: dict[str, Callable[[torch.nn.Module, torch.Tensor], Any]] = {
    "torch.jit.trace": lambda net, x: torch.jit.trace(net, x),
    "torch.fx": lambda net, x: torch.fx.symbolic_trace(net),
    "torch.export": lambda net, x: torch.export.export(net, (x,)).module(),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit's
@pytest.mark.filterwarnings("error::UserWarning")  # of ops without an autograd function
@pytest.mark.parametrize("recorder", RECORDERS)
@pytest.mark.parametrize("case", CASES)
def test_a_recorded_program_has_the_models_output_and_gradients(recorder: str, case: str) -> None:
    net, plain, x = model(), model(), torch.randn(8, 16)
    memkern.compress(net, **CASES[case])
    if (recorder, case) == ("torch.jit.trace", "linear"):
        with pytest.raises(RuntimeError, match=r"memkern\.restore\(model\)"):
            RECORDERS[recorder](net, x)
        return
    program = RECORDERS[recorder](net, x)
    assert torch.equal(program(x), net(x))
    saved, saved_by_torch = memory.saved_bytes(lambda: program(x)), memory.saved_bytes(lambda: plain(x))
    if recorder == "torch.fx":  # its graph calls memkern's functions, which save less
        assert saved < saved_by_torch
        return
    assert saved >= saved_by_torch  # the other recorders' graphs have torch's own operators
    program(x).square().sum().backward()
    plain(x).square().sum().backward()
    recorded = dict(program.named_parameters())
    for name, p in plain.named_parameters():
        assert torch.equal(recorded[name].grad, p.grad), name


class Classifier(torch.nn.Module):
    """A RandomizedLinear, and LinearCrossEntropy on its output. Returns the loss of the target classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = memkern.nn.RandomizedLinear(16, 12, share=0.5, min_tokens=0)
        self.loss = memkern.nn.LinearCrossEntropy(12, 30, weight=torch.rand(30), label_smoothing=0.1, chunk_size=8)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss(self.layer(x), target)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_loss_is_recorded_for_any_number_of_rows() -> None:
    net, x, target = Classifier(), torch.randn(8, 16), torch.randint(30, (8,))
    target[3] = -100  # cross_entropy's ignore_index
    rows = torch.export.Dim("rows", min=2)
    exported = torch.export.export(net, (x, target), dynamic_shapes=({0: rows}, {0: rows})).module()
    traced = torch.jit.trace(net.loss, (net.layer(x).detach(), target))
    for n in (8, 5):
        expected = net(x[:n], target[:n])
        torch.testing.assert_close(exported(x[:n], target[:n]), expected)
        torch.testing.assert_close(traced(net.layer(x[:n]), target[:n]), expected)
        torch.testing.assert_close(torch.fx.symbolic_trace(net)(x[:n], target[:n]), expected)
    for program in (exported, net):
        program(x, target).backward()
    recorded = exported.get_parameter("loss.linear.weight").grad
    torch.testing.assert_close(recorded, net.loss.linear.weight.grad)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("case", CASES)
def test_scripting_needs_restore(case: str) -> None:
    net, x = model(), torch.randn(8, 16)
    memkern.compress(net, **CASES[case])
    with pytest.raises((RuntimeError, torch.jit.frontend.NotSupportedError)):
        torch.jit.script(net)
    memkern.restore(net)
    assert torch.equal(torch.jit.script(net)(x), net(x))
