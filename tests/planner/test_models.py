"""memkern.plan of transformers' configurations: inputs for each task, traces of a step, and models that raise."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkern
from memkern.planner.fake_step import trace
from memkern.planner.inputs import Inputs, architecture
from memkern.planner.models import resolve
from memkern.techniques.options import OptionError, Techniques
from tests.support.planned_models import predictor_of

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
TEXT = SIZES | {"vocab_size": 100, "max_position_embeddings": 64}
T5 = {"d_model": 32, "num_layers": 2, "num_heads": 2, "d_kv": 16, "d_ff": 64, "vocab_size": 100}
SOUND = SIZES | {"conv_dim": (32, 32), "conv_kernel": (10, 3), "conv_stride": (5, 2), "vocab_size": 20}
SOUND |= {"num_conv_pos_embedding_groups": 2}
WHISPER = {"d_model": 32, "vocab_size": 100, "encoder_layers": 2, "decoder_layers": 2, "max_source_positions": 50}
for side in ("encoder", "decoder"):
    WHISPER |= {f"{side}_attention_heads": 2, f"{side}_ffn_dim": 64}
WHISPER |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0)
CONVNEXT: dict[str, Any] = {"hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1], "image_size": 32}
IMAGE = SIZES | {"image_size": 32, "patch_size": 16}


def bert(task: str) -> Any:
    return transformers.BertConfig(**TEXT, architectures=[f"BertFor{task}"])


TASKS = (
    "MaskedLM", "TokenClassification", "QuestionAnswering", "MultipleChoice", "NextSentencePrediction", "PreTraining",
)  # fmt: skip
CASES: dict[str, Callable[[], Any]] = {
    **{task: functools.partial(bert, task) for task in TASKS},
    "BertModel": lambda: transformers.BertConfig(**TEXT, architectures=["BertModel"]),
    "T5": lambda: transformers.T5Config(**T5),
    "DeBERTa-v2": lambda: transformers.DebertaV2Config(**TEXT),
    "Longformer": lambda: transformers.LongformerConfig(**TEXT, attention_window=16, pad_token_id=1),
    "XLNet": lambda: transformers.XLNetConfig(d_model=32, n_layer=2, n_head=2, d_inner=64, vocab_size=100),
    "Mixtral": lambda: transformers.MixtralConfig(**TEXT, num_key_value_heads=1, num_local_experts=4),
    "ConvNeXt": lambda: transformers.ConvNextConfig(**CONVNEXT, drop_path_rate=0.1),
    "wav2vec2": lambda: transformers.Wav2Vec2Config(**SOUND),
    "Whisper": lambda: transformers.WhisperConfig(**WHISPER),
    "XLM": lambda: transformers.XLMConfig(emb_dim=32, n_layers=2, n_heads=2, n_words=100),
    "SwitchTransformers": lambda: transformers.SwitchTransformersConfig(**T5, num_experts=4),
    "GIT": lambda: transformers.GitConfig(**TEXT, vision_config=IMAGE),
    "SigLIP2": lambda: transformers.Siglip2Config(
        vision_config=SIZES | {"patch_size": 16, "num_patches": 196},
        text_config=TEXT,
        architectures=["Siglip2ForImageClassification"],
    ),
    "CLIP": lambda: transformers.CLIPConfig(text_config=TEXT, vision_config=IMAGE, architectures=["CLIPModel"]),
}


@pytest.mark.parametrize("case", CASES)
def test_inputs_are_what_a_real_step_takes(case: str) -> None:
    """A planned batch, filled with values, gives a loss and gradients."""
    config = CASES[case]()
    source: Any = resolve(config, 32, None, None, None)
    model = source.build(torch.float32, empty=False)
    batch = source.batch(2)
    for name, x in batch.items():
        if isinstance(x, Tensor) and x.is_floating_point():
            batch[name] = torch.randn_like(x)
    source.loss(model, batch).backward()
    assert any(p.grad is not None for p in model.parameters())


TIERS: list[Any] = [(), pytest.mark.long, pytest.mark.full, pytest.mark.long]  # marks of four cases in a row


@pytest.mark.parametrize("case", [pytest.param(c, marks=TIERS[i % 4]) for i, c in enumerate(CASES)])
def test_a_step_is_traced(case: str) -> None:
    source: Any = resolve(CASES[case](), 32, None, None, None)
    single, double = (trace(source, Techniques(micro_batch=size), "cpu") for size in (1, 2))
    assert 0 < single.saved < double.saved
    assert trace(source, Techniques(precision="bf16"), "cpu").saved < single.saved


def planned(model: nn.Module, device: str = "cpu", **options: Any) -> memkern.planner.Plan:
    return memkern.plan(model, inputs=torch.ones(2, 8), memory="1GiB", device=device, **options)


def test_a_model_with_batch_normalization_is_planned_for_with_two_sequences() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    plan = planned(model, batch_size=2)
    assert {p.techniques.micro_batch for p in plan.alone.values()} == {2}
    assert "2 examples; time against" in str(plan)
    assert plan.recommended is not None
    assert plan.recommended.techniques.micro_batch == 2
    with pytest.raises(OptionError, match="more than 1 value per channel"):
        planned(model)


def test_a_configuration_without_an_architecture_has_a_default_class() -> None:
    assert architecture(transformers.BertConfig()) == "BertForSequenceClassification"
    assert architecture(transformers.T5Config()) == "T5ForConditionalGeneration"
    assert architecture(transformers.WhisperConfig()) == "WhisperForConditionalGeneration"
    assert Inputs(transformers.Llama4Config().get_text_config(), 8).name == "Llama4ForCausalLM"
    with pytest.raises(OptionError, match=r"model: 'dac' given; allowed: a type that transformers has for text"):
        memkern.plan(transformers.DacConfig(), memory="8GiB", seq_len=32, device="cpu")


class Stubborn(nn.Module):
    """A model whose forward pass needs a tensor's value, or which does not run under bf16 autocast."""

    def __init__(self, needs: str) -> None:
        super().__init__()
        self.needs = needs
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.needs == "values":
            x = x[: int(x.sum().item())]
        if self.needs == "fp32" and torch.is_autocast_enabled("cpu"):
            raise NotImplementedError("no kernel for bf16\nsecond line")
        for block in self.blocks:
            x = block(x)
        return x


def test_a_technique_that_a_model_does_not_run_with_is_ruled_out() -> None:
    plan = planned(Stubborn("fp32"))
    reason = "techniques, precision=bf16-mixed: the model's step raises NotImplementedError: no kernel for bf16"
    assert plan.ruled_out == {"bf16 autocast": reason.removeprefix("techniques, ")}
    assert "bf16 autocast: not with this model. precision=bf16-mixed" in str(plan)
    assert plan.recommended is not None
    assert plan.recommended.techniques.precision != "bf16-mixed"
    with pytest.raises(OptionError, match="precision=bf16-mixed: the model's step raises"):
        planned(Stubborn("fp32"), techniques={"precision": "bf16-mixed"})


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.long)])
def test_a_step_that_depends_on_values_is_one_error(device: str) -> None:
    with pytest.raises(OptionError, match=r"model: a plain training step raises on fake tensors(?s:.)*; allowed: "):
        planned(Stubborn("values"), device)


class Constants(nn.Module):
    """Tensors that are neither parameters nor buffers, one of which is a size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.columns, self.count = nn.Linear(8, 8), torch.tensor([0, 2, 5]), torch.tensor(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[:, self.columns].tanh()[:, : int(self.count)].exp()


def test_tensors_that_are_attributes_keep_their_values() -> None:
    source = resolve(Constants(), None, torch.ones(2, 8), None, None)
    shapes = {shape for _, *shapes in trace(source, Techniques(micro_batch=3), "cpu").operators for shape in shapes}
    assert {(3, 3), (3, 2)} <= shapes


CHUNKED = {  # whether the logits are the output layer's of the last hidden states
    "GPT2LMHeadModel": True, "OPTForCausalLM": True, "CohereForCausalLM": False, "BertLMHeadModel": False,
    "BertForMaskedLM": False,
}  # fmt: skip


@pytest.mark.parametrize("name", CHUNKED)
def test_a_loss_in_chunks_is_only_for_models_whose_loss_it_is(name: str) -> None:
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**TEXT, pad_token_id=0, bos_token_id=0, eos_token_id=0))
    ids = torch.zeros(2, 16, dtype=torch.long)
    predictor = predictor_of(model, {"input_ids": ids, "labels": ids})
    assert predictor.takes_chunks == CHUNKED[name]
    if predictor.takes_chunks:
        head = model.get_output_embeddings()
        head.__class__ = type("Adapted", (nn.Linear,), {"forward": lambda self, x: 2 * nn.Linear.forward(self, x)})
        assert not predictor_of(model, {"input_ids": ids, "labels": ids}).takes_chunks
    else:
        with pytest.raises(OptionError, match="loss_chunk: 64 given; allowed: None for a model that is no"):
            predictor.predict(Techniques(loss_chunk=64))
