"""What makes a plan fast does not change it: traces of few blocks, cached results of fake tensors' operations."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memkern.planner import fake_step
from memkern.planner.fake_mode import FakeMode
from memkern.planner.models import resolve
from memkern.planner.trace import peaks
from memkern.techniques.options import Techniques


@pytest.fixture(scope="module", params=["GPT2", "Llama"])
def source(request: pytest.FixtureRequest) -> Any:
    import transformers

    sizes = {"vocab_size": 500, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 14}
    head = {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM"}[request.param]
    return resolve(getattr(transformers, f"{request.param}Config")(**sizes, architectures=[head]), 64, None, None, None)


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation_bits": 3},
        {"checkpointing": "blocks", "checkpoint_every": 2},
        {"checkpointing": "blocks", "checkpoint_every": 3},
        {"precision": "bf16", "checkpointing": "blocks", "checkpoint_bits": 8, "loss_chunk": 128},
    ],
    ids=str,
)
def test_peaks_of_few_blocks_are_extrapolated_to_all(source: Any, changes: dict[str, Any]) -> None:
    """Also where a block's results are freed in the next one, by which the first block is unlike the others."""
    techniques = Techniques(micro_batch=4, **changes)
    fake_step.trace(source.with_depth(2), techniques, "cpu")  # fills caches
    traces, more_blocks = fake_step.traces(source, techniques, "cpu")
    assert len(traces) == 2
    whole_model_trace = fake_step.trace(source, techniques, "cpu")
    for free in (False, True):
        actual = peaks(traces, more_blocks, free_gradients=free, unit=64)
        expected = peaks([whole_model_trace], 0, free_gradients=free, unit=64)
        assert [sum(actual[phase].values()) for phase in expected] == [sum(x.values()) for x in expected.values()]
    assert fake_step.static_bytes(source, techniques, "cpu") == fake_step._static_bytes(source, techniques, "cpu")


def described(x: Any) -> Any:
    """Shape, strides, offset, dtype, device and bytes of each tensor."""
    if isinstance(x, (tuple, list)):
        return [*map(described, x)]
    return (x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, x.untyped_storage().nbytes())


def test_cached_results_are_what_fake_tensor_mode_makes() -> None:
    aten = torch.ops.aten
    calls = [
        lambda x, i: x @ x.t(),
        lambda x, i: x.split(2, 1),
        lambda x, i: torch.cat([x, x[1:]]),
        lambda x, i: aten.native_dropout(x, 0.5, True),
        lambda x, i: x.t().reshape(-1)[3:].view(-1, 3),
        lambda x, i: (x * 2, x * True, x.double() * 2.0),
        lambda x, i: (x + i, x > i, x.new_zeros(3), torch.arange(5)),
        lambda x, i: x.expand(4, *x.shape),
        lambda x, i: (x.add_(1), x.t().copy_(x.t()), x.index_put_((i,), x[i]), x),
    ]
    for call in calls:
        with FakeTensorMode():
            expected = described(call(torch.empty(6, 4), torch.ones(4, dtype=torch.long)))
        for _ in range(3):  # the first call makes the results, later ones look them up
            with FakeMode():
                x = torch.empty(6, 4)
                actual = call(x, torch.ones(4, dtype=torch.long))
            assert described(actual) == expected
    with FakeMode():
        x = torch.empty(6, 4)
        for _ in range(2):
            first, second = x.split(3)
            assert first.untyped_storage()._cdata == second.untyped_storage()._cdata == x.untyped_storage()._cdata
            first.add_(1)
            assert x.sin() is not x


def test_cached_results_have_the_default_dtype() -> None:
    for dtype in (torch.float32, torch.float64):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with FakeMode():
                assert {torch.zeros(3).dtype, (torch.arange(3) / 2).dtype} == {dtype}
        finally:
            torch.set_default_dtype(before)


def test_shortened_loops_need_the_memory_of_whole_ones(monkeypatch: pytest.MonkeyPatch, source: Any) -> None:
    def traced(is_shortened: bool) -> Any:
        monkeypatch.setattr(FakeMode, "shortens_loops", is_shortened)
        return fake_step.trace(source.with_depth(2), Techniques(micro_batch=2, loss_chunk=32), "cpu")

    traced(True)  # fills caches
    shortened, whole_model_trace = traced(True), traced(False)
    assert len(shortened.operators) < len(whole_model_trace.operators)
    options: dict[str, Any] = {"free_gradients": True, "unit": 64}
    assert peaks([shortened], 0, **options) == peaks([whole_model_trace], 0, **options)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("Qwen2Moe", {"num_experts": 4, "decoder_sparse_step": 2, "shared_expert_intermediate_size": 64}),
        ("DeepseekV3", {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16}),
        ("LongcatFlash", {"n_routed_experts": 8, "zero_expert_num": 2, "moe_topk": 2, "ffn_hidden_size": 64}),
    ],
)
def test_a_model_whose_blocks_are_not_alike_is_counted_whole(kind: str, sizes: dict[str, Any]) -> None:
    """Experts are in every other block, or in all but the first three; or a block counts as two layers."""
    import transformers

    sizes |= {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 512, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 4, "num_hidden_layers": 6, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
    config = getattr(transformers, f"{kind}Config")(**sizes, architectures=[f"{kind}ForCausalLM"])
    source: Any = resolve(config, 16, None, None, None)
    techniques = Techniques()
    assert len(fake_step.traces(source, techniques, "cpu")[0]) == 1
    assert fake_step.static_bytes(source, techniques, "cpu") == fake_step._static_bytes(source, techniques, "cpu")


def test_a_model_that_cannot_have_fewer_blocks_is_counted_whole() -> None:
    """Longformer's encoder-decoder has a window for each block."""
    import transformers

    sizes: dict[str, Any] = {"d_model": 32, "vocab_size": 100, "attention_window": [16] * 6}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 6, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 32}
    source: Any = resolve(transformers.LEDConfig(**sizes), 16, None, None, None)
    assert fake_step.static_bytes(source, Techniques(), "cpu").count == sum(
        p.numel() for p in source.build(torch.float32).parameters()
    )
