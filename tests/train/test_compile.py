"""--compile: the losses of uncompiled blocks, resumed runs, and what it is refused with."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import memkern
from memkern import OptionError, Techniques
from memkern.compiled import blocks as compiled_blocks
from memkern.compiled.blocks import is_compiled
from memkern.planner.models import resolve
from memkern.train import Corpus, Trainer, run
from memkern.train import checkpoint as checkpoints
from tests.support.train_helpers import SMALL, assert_same_run, small_run, train_by_two, trained

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def model() -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)]
    return nn.Sequential(nn.Sequential(*blocks), nn.Linear(8, 8))


# Techniques, and how far losses may be from those of uncompiled blocks: fused kernels round elsewhere, in fp32 by some
# 1e-6 a step; bf16 by 2^-9 of single values, of which a loss is a mean; 8-bit codes change gradients by a percent.
RUNS: dict[str, tuple[dict[str, Any], float]] = {
    "plain": ({}, 1e-5),
    "exact": ({"saved_bits": "exact"}, 1e-5),
    "8 bits": ({"saved_bits": 8}, 1e-4),
    "few bits": ({"activation_bits": 3}, 1e-4),
    "checkpoints": ({"checkpointing": "blocks", "saved_bits": 8}, 1e-4),
    "checkpoints in codes": ({"checkpointing": "blocks", "checkpoint_every": 2, "checkpoint_bits": 8}, 1e-4),
    "autocast": ({"precision": "bf16-mixed", "saved_bits": 8, "accumulation": 2}, 1e-3),
    "fp16": ({"precision": "fp16-mixed"}, 1e-4),
    "bf16": ({"precision": "bf16", "accumulation": 2}, 1e-3),
    "step in backward": ({"step_in_backward": True, "clip": 0.0}, 1e-5),
    "offload": ({"offload": True, "saved_bits": "exact"}, 1e-5),
    "loss in chunks": ({"loss_chunk": 64}, 1e-5),
    "part of the tokens": ({"linear_share": 0.5}, 1e-5),
}


LONG = ("exact", "fp16", "bf16", "part of the tokens")  # 15 s each: what they compile, another run compiles too


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long if n in LONG else ()) for n in RUNS])
def test_losses_are_those_of_uncompiled_blocks(corpus: Corpus, name: str) -> None:
    options, tolerance = RUNS[name]
    eager = {k: v for k, v in options.items() if k != "saved_bits"}
    plain, compiled = trained(corpus, **eager), trained(corpus, **options, compile=True)
    assert counters["stats"]["unique_graphs"] == 2  # for training and for validation, whatever the number of blocks
    assert compiled.history.train_loss == pytest.approx(plain.history.train_loss, rel=tolerance)
    validation = [[loss for _, loss in each.history.validation] for each in (compiled, plain)]
    assert validation[0] == pytest.approx(validation[1], rel=tolerance)
    assert compiled.weights().keys() == plain.weights().keys()
    assert all(map(is_compiled, compiled.model.blocks))


@pytest.mark.full
def test_saved_bytes_follow_the_options(corpus: Corpus) -> None:
    def saved(**options: Any) -> int:
        torch._dynamo.reset()
        return trained(corpus, steps=1, warmup=0, **options).history.saved_bytes or 0

    torchs = saved(compile=True)
    exact, half = saved(compile=True, saved_bits="exact"), saved(compile=True, memory_budget=0.6)
    bits = saved(compile=True, saved_bits=8)
    outside = 4 * 4 * 32 * (256 + 2 * 64 + 3)  # the loss, the head and the last norm, which are not compiled
    inputs = 2 * 4 * 4 * 32 * 64  # of the blocks
    assert (half - outside - inputs) < 0.65 * (torchs - outside - inputs)
    assert bits < half < torchs
    assert bits < 0.45 * exact < 0.32 * torchs
    checkpoint = saved(compile=True, checkpointing="blocks")
    assert checkpoint <= outside + inputs + 4096


@pytest.mark.full
@pytest.mark.parametrize("options", [{"saved_bits": 8, "accumulation": 2}, {"checkpointing": "blocks"}])
def test_a_resumed_run_repeats_every_bit(corpus: Corpus, tmp_path: Path, options: dict[str, Any]) -> None:
    config = SMALL.replace(**options, compile=True, eval_tokens=544)  # whose last batch is smaller
    straight = Trainer(config, corpus)

    def save(trainer: Trainer) -> None:
        if trainer.steps_done == 3:
            checkpoints.save(tmp_path / "run.pt", trainer.state_dict())

    run([straight], save)
    torch._dynamo.reset()  # as in another process
    state = checkpoints.load(tmp_path / "run.pt")
    assert not any("_orig_mod" in name for name in state["model"])
    resumed = Trainer(config, corpus)
    resumed.load_state_dict(state)
    run([resumed])
    assert_same_run(straight, resumed)
    with pytest.raises(OptionError, match=r"(compile|saved_bits): .*, with which the resumed run began"):
        Trainer(config.replace(compile=False, saved_bits=None), corpus).load_state_dict(state)


@pytest.mark.long  # three processes that compile
def test_a_model_of_transformers_by_the_command_line(text: Path, tmp_path: Path) -> None:
    """Saved in one process, resumed in another one, and exported; its dropout is drawn by the graphs."""
    transformers = pytest.importorskip("transformers")
    folder, saved = tmp_path / "model", tmp_path / "run.pt"
    transformers.GPT2Config(n_layer=3, n_head=2, n_embd=32, n_positions=64, vocab_size=300).save_pretrained(folder)
    flags = [*("--seq-len", "32", "--batch-size", "2", "--device", "cpu", "--eval-tokens", "320")]
    begin = ["--data", str(text), "--model", str(folder), "--from-config", "--bytes", "--compile", "--saved-bits", "8"]

    def train(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "memkern", "train", *arguments], capture_output=True, text=True, check=True
        )
        return next(line for line in done.stdout.splitlines() if line.startswith("Validation loss"))

    whole = train(*begin, *flags, "--steps", "4", "--save-every", "2", "--export", str(tmp_path / "exported"))
    train(*begin, *flags, "--steps", "4", "--save-every", "2", "--save", str(saved))
    state = checkpoints.load(saved)
    assert state["step"] == 4
    again = train("--resume", str(saved))
    assert again == whole
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "exported")
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, state["model"][name]), name


@pytest.mark.long  # two processes that compile, twice
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes(text: Path, tmp_path: Path, parallel: str) -> None:
    arguments = ["--data", str(text), *small_run(layers=2, batch_size=2, steps=4), "--batch-factor", "2"]
    found = {}
    for name, more in (("plain", []), ("compiled", ["--compile", "--saved-bits", "exact"])):
        train_by_two(*arguments, *more, "--parallel", parallel, "--save", str(tmp_path / name))
        found[name] = checkpoints.load(tmp_path / name)
    assert found["plain"]["model"].keys() == found["compiled"]["model"].keys()
    assert found["compiled"]["history"]["train_loss"] == pytest.approx(
        found["plain"]["history"]["train_loss"], rel=1e-5
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_budget": 0.5}, "memory_budget: 0.5 given; allowed: None without compile"),
        ({"compile": True, "memory_budget": 1.5}, "memory_budget: 1.5 given; allowed: None or a number above 0"),
        ({"saved_bits": 8}, "saved_bits: 8 given; allowed: None without compile"),
        ({"compile": True, "weights_on_host": "layers"}, "weights_on_host: 'layers' given; allowed: None with compile"),
        ({"compile": "blocks"}, "compile: 'blocks' given; allowed: False, True"),
    ],
)
def test_techniques_that_exclude_each_other(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Techniques(**changes)


def compiled_before(of: nn.Module, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    of[1].compile()
    return of


def without_blocks(of: nn.Module, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU())


def of_an_old_torch(of: nn.Module, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.10.0"))
    return of


def without_cxx(of: nn.Module, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    from torch._inductor import cpp_builder, exc

    def absent() -> None:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", absent)
    return of


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (compiled_before, "compile: True given; allowed: False, as 1 is compiled already"),
        (without_blocks, "compile: True given; allowed: False for a model without a list of like blocks"),
        (of_an_old_torch, r"compile: True given with saved_bits=8: memkern.compile needs torch 2\.11 or later"),
        (without_cxx, "compile: True given, and no C\\+\\+ compiler is found"),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_is_left_as_it_is(edit: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of = edit(model(), monkeypatch)
    with pytest.raises(OptionError, match=message):
        memkern.apply(of, Techniques(compile=True, saved_bits=8, linear_share=0.5, checkpointing="blocks"))
    assert not any("forward" in vars(module) for module in of.modules())
    assert {type(module) for module in of.modules()} == {nn.Sequential, nn.Linear, nn.GELU}


def test_an_applied_model_is_compiled_for_all_who_ask() -> None:
    of = model()
    memkern.apply(of, Techniques(compile=True, checkpointing="blocks"))
    keys = list(model().state_dict())
    assert list(of.state_dict()) == keys
    for refused in (
        lambda: memkern.apply(of, Techniques(compile=True)),
        lambda: resolve(of, None, torch.ones(2, 8), None, None),
        lambda: memkern.apply(of, Techniques(weights_on_host="layers")),
    ):
        with pytest.raises(OptionError, match="compile"):
            refused()


@pytest.mark.full
def test_blocks_with_a_cache_of_keys_and_values() -> None:
    """transformers' models make one by default: in a training step it is left out, in generation it is filled."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 10, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32}
    gpt = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0
        )
    )
    ids = torch.randint(64, (2, 16))
    plain = copy.deepcopy(gpt)
    memkern.apply(gpt, Techniques(compile=True, saved_bits="exact"))
    for run_ in (gpt, plain):
        run_(input_ids=ids, labels=ids).loss.backward()
    for p, expected in zip(gpt.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, expected.grad)
    # A prefix that is learned comes as a cache.
    prefix = [(torch.randn(2, 2, 3, 16, requires_grad=True), torch.randn(2, 2, 3, 16)) for _ in range(10)]
    cached = [transformers.DynamicCache(prefix, config=gpt.config) for _ in range(2)]
    logits = [m(input_ids=ids, past_key_values=c).logits for m, c in zip((gpt, plain), cached, strict=True)]
    torch.testing.assert_close(*logits)
    found, expected = (m.eval().generate(ids[:, :4], max_new_tokens=8, do_sample=False) for m in (gpt, plain))
    assert torch.equal(found, expected)
    assert counters["stats"]["unique_graphs"] == 1


def test_blocks_get_equal_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else torch compiles every block anew, and blocks that were pickled once more."""
    given = []
    monkeypatch.setattr(compiled_blocks.torch, "compile", lambda f, **options: given.append(options) or f)
    of = model()
    memkern.apply(of, Techniques(compile=True, memory_budget=1, activation_bits=2))
    assert len(given) == 1
    partitioner = given[0]["options"]["custom_partitioner_fn"]
    assert (partitioner.bits, partitioner.memory_budget, partitioner.activations) == ("exact", 1.0, 2)
    assert type(partitioner.memory_budget) is float  # 1 would be a byte
    pickle.loads(pickle.dumps(of))
    assert given == 2 * given[:1]
