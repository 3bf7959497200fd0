"""Finds the model to plan for: a built-in name, a transformers configuration or folder, or a module with inputs."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ..compiled.blocks import is_compiled
from ..optim.dtensor.shards import is_dtensor
from ..techniques.options import not_allowed, refused
from .built_in import MODELS, built_in
from .inputs import Inputs, is_language_model, text_config
from .shards import output_layer

SEQ_LEN = 2048  # tokens of a sequence by default, where the model has so many positions
Batch = dict[str, Any] | tuple[Any, ...]
Loss = Callable[[nn.Module, Any], Tensor]


def model_output_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a module: its output's ``loss``, the output itself where it is one number, else the output's sum."""
    output = model(**batch) if isinstance(batch, Mapping) else model(*batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        tensors = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
        loss = tensors[0] if tensors[0].numel() == 1 else tensors[0].sum()
    return loss


@dataclasses.dataclass
class ConfiguredModel:
    """A transformers model, given by its configuration.

    padded: whether sequences end in padding, which an attention mask marks.
    """

    name: str
    config: Any
    seq_len: int
    loss: Loss = model_output_loss
    padded: bool = False

    @property
    def loss_code(self) -> str:
        """The expression for the loss in the printed loop. (Training needs no cache of keys and values.)"""
        return f"model(**batch{', use_cache=False' if self.is_language_model else ''}).loss"

    def build(self, dtype: torch.dtype, empty: bool = True) -> nn.Module:
        """The model in a dtype. empty: without initial values, which fake tensors cannot have."""
        from transformers.initialization import no_init_weights

        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with no_init_weights() if empty else contextlib.nullcontext():
                model = self.inputs.cls(self.config).train()
            model.tie_weights()
            return model
        finally:
            torch.set_default_dtype(default_dtype)

    def empty(self, dtype: torch.dtype) -> nn.Module:
        """The model without values, in a dtype, on the device of the ``torch.device`` block around the call.

        It is built on the meta device first, as transformers builds what it loads, as some models compute with values
        while they are built. On the meta device they do that on the CPU; fake tensors have no values.
        """
        with _disable_current_modes(), torch.device("meta"):
            model = self.build(dtype)
        copies: dict[int, Tensor] = {}
        for module in model.modules():
            owners: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
            for tensors in owners:
                for name, x in tensors.items():
                    if isinstance(x, Tensor):
                        target = dtype if isinstance(x, nn.Parameter) else x.dtype
                        tensors[name] = copies.setdefault(id(x), _empty_like(x, target))
        return model

    @functools.cached_property
    def inputs(self) -> Inputs:
        return Inputs(self.config, self.seq_len, self.padded)

    @functools.cached_property
    def depth(self) -> int | None:
        """The number of blocks, where all are alike; the first and the last may be unlike the others."""
        depth = _number(self.config, "num_hidden_layers")
        if depth is None or len(set(getattr(self.config, "layer_types", None) or ())) > 1 or not self._are_alike(depth):
            return None
        try:  # where it follows from another number, transformers raises, or sets that one to what is nearest
            is_free = all(self.with_depth(n).config.num_hidden_layers == n for n in (depth, depth + 1))
        except NotImplementedError:
            return None
        return depth if is_free else None

    def with_depth(self, depth: int) -> ConfiguredModel:
        """The same model with another number of blocks."""
        config = copy.deepcopy(self.config)
        config.num_hidden_layers = depth
        return dataclasses.replace(self, config=config)

    def _are_alike(self, depth: int) -> bool:
        """Whether all blocks but the first and the last have the same parameters: not so where some are dense, and some
        have experts."""
        with _disable_current_modes(), torch.device("meta"):
            model = self.build(torch.float32)
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
        shapes = [[[(n, p.shape) for n, p in b.named_parameters()] for b in m if b is not None] for m in lists]
        return all(of_block == of_list[1] for of_list in shapes for of_block in of_list[1:-1])

    @property
    def tokens(self) -> int:
        return self.inputs.patches + 1 if self.inputs.takes_images else self.seq_len

    @property
    def attention(self) -> float:
        """Operations of attention in a forward pass for each pair of tokens of a sequence, all layers together."""
        heads, width = (_number(self.config, name) for name in ("num_attention_heads", "hidden_size"))
        if heads is None or width is None or self.depth is None:
            return 0.0
        width = heads * (getattr(self.config, "head_dim", None) or width // heads)
        operations = 2.0 if self.is_language_model else 4.0  # per pair and channel; causal masks leave half of them
        return self.depth * width * operations

    @property
    def is_language_model(self) -> bool:
        return is_language_model(self.inputs.name)

    def batch(self, size: int) -> Batch:
        """Inputs and labels of ``size`` sequences."""
        return self.inputs.batch(size)


@dataclasses.dataclass
class ModuleWithInputs:
    """A module with example inputs, whose first dimension is the batch's."""

    name: str
    model: nn.Module
    example: Batch
    loss: Loss = model_output_loss
    is_language_model: bool = False
    depth: None = None
    attention: float = 0.0

    def build(self, dtype: torch.dtype) -> nn.Module:
        """A copy without values, with fp32 weights in a dtype, on the device of the ``torch.device`` block around.

        Tensors that are attributes of a module, neither parameters nor buffers, are constants with their values.
        """
        tensors = [*self.model.parameters(), *self.model.buffers()]
        empty = {id(x): _empty_like(x, dtype) for x in tensors}
        with _disable_current_modes():
            return copy.deepcopy(self.model, empty).train()

    empty = build

    @property
    def loss_code(self) -> str:
        """The expression for the loss in the printed loop; ``loss_fn`` is a function of the user."""
        if self.loss is model_output_loss and isinstance(self.example, dict) and "labels" in self.example:
            return "model(**batch).loss"
        return "loss_fn(model, batch)  # yours"

    @property
    def _batched(self) -> list[Tensor]:
        """The example's tensors that have a dimension: the first is taken to be the batch."""
        return [x for x in tree_leaves(self.example) if isinstance(x, Tensor) and x.dim()]

    @property
    def tokens(self) -> int:
        """Tokens per sequence: the size of the example's other dimensions where it holds indices, else 1."""
        first = self._batched[0]
        return math.prod(first.shape[1:]) if not first.is_floating_point() else 1

    def batch(self, size: int) -> Batch:
        """The example with ``size`` sequences: floats are zeros, indices are its own, repeated."""
        rows = self._batched[0].shape[0]

        def with_size(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if not x.dim() or x.shape[0] != rows:
                return torch.zeros_like(x) if x.is_floating_point() else x.clone()
            if x.is_floating_point():
                return torch.zeros(size, *x.shape[1:], dtype=x.dtype)
            return x[torch.arange(size) % rows]

        return tree_map(with_size, self.example)


Source = ConfiguredModel | ModuleWithInputs


def _number(config: Any, name: str) -> int | None:
    """A configuration's number; None where it has none, or one for each layer."""
    try:
        value = getattr(config, name, None)
    except Exception:  # transformers' own, where layers differ
        return None
    return value if isinstance(value, int) else None


def _empty_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty tensor like ``x``, in ``dtype`` where that is fp32: a model may be in half precision already."""
    empty = torch.empty_strided(x.shape, x.stride(), dtype=dtype if x.dtype == torch.float32 else x.dtype)
    return nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty


def set_dropout(config: Any, rate: float) -> None:
    """Sets every dropout rate of a transformers configuration."""
    for name, value in vars(config).items():
        if isinstance(value, float) and ("dropout" in name or "pdrop" in name or name.endswith("_drop")):
            setattr(config, name, rate)


def positions(config: Any) -> int | None:
    """The length of the longest sequence that a transformers configuration allows; None without a limit."""
    count = getattr(config, "max_position_embeddings", None)
    if not isinstance(count, int) or count < 1:  # -1, in XLNet's and others'
        return None
    # RoBERTa numbers positions from padding_idx + 1 on.
    if config.model_type in ("roberta", "camembert", "xlm-roberta", "longformer"):
        count -= config.pad_token_id + 1
    return count


def resolve(
    model: Any, seq_len: int | None, inputs: Any, loss: Loss | None, dropout: float | None, attention_mask: bool = False
) -> Source:
    """Finds what to plan for.

    Raises:
        OptionError: a name that is neither built in nor a folder, a sequence that is longer than the model's
            positions, a module without example inputs, one that is compiled or has DTensors, an attention mask for what
            takes none.
        TypeError: another kind of model.
    """
    if isinstance(model, nn.Module):
        _check_module(model)
        if attention_mask:
            raise not_allowed("attention_mask", True, "False for a module, whose inputs= have a mask or not")
        batch = dict(inputs) if isinstance(inputs, Mapping) else inputs
        batch = batch if isinstance(batch, (dict, tuple)) else (batch,)
        if not any(isinstance(x, Tensor) and x.dim() for x in tree_leaves(batch)):
            raise not_allowed("inputs", inputs, "a batch (tensor, tuple or dict) that the module takes")
        has_head = hasattr(model, "base_model") and output_layer(model) is not None
        is_causal = has_head and any(is_language_model(cls.__name__) for cls in type(model).__mro__)
        return ModuleWithInputs(type(model).__name__, model, batch, loss or model_output_loss, is_causal)
    if isinstance(model, (str, Path)):
        name = str(model)
        if name in MODELS:
            config = built_in(name)
        elif Path(name).is_dir():
            from transformers import AutoConfig

            with refused("model", f"{name!r} given; allowed: a folder with the config.json of a transformers model"):
                config = AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
        else:
            raise not_allowed("model", name, f"a folder with a transformers model, or {', '.join(MODELS)}")
    elif hasattr(model, "model_type") and hasattr(model, "to_dict"):
        name, config = model.model_type, model
    else:
        raise TypeError(
            "model must be a name, a folder, a transformers configuration or a torch.nn.Module, got "
            f"{type(model).__name__}"
        )
    config = copy.deepcopy(config)
    if dropout is not None:
        set_dropout(config, dropout)
    # Decoders make their inputs from labels with these tokens; classifiers find a sequence's end by the padding.
    for token in ("decoder_start_token_id", "pad_token_id"):
        if getattr(config, token, None) is None:
            setattr(config, token, 0)
    config = text_config(config)
    source = ConfiguredModel(name, config, seq_len or 0, loss or model_output_loss, attention_mask)
    if attention_mask and not source.inputs.takes_mask:
        raise not_allowed("attention_mask", True, f"False for {source.inputs.name}, which takes no tokens with a mask")
    if not source.inputs.takes_images:
        if seq_len is None:
            return dataclasses.replace(source, seq_len=min(SEQ_LEN, positions(config) or SEQ_LEN))
        check_length(config, seq_len)
    return source


def _check_module(model: nn.Module) -> None:
    """Raises OptionError for a module that has nothing to train, or that is compiled or sharded already."""
    name = type(model).__name__
    if not any(p.requires_grad for p in model.parameters()):
        raise not_allowed("model", name, "a module with parameters that require gradients")
    if any(map(is_compiled, model.modules())):
        allowed = "a module before it is compiled: techniques with compile=True count that"
        raise not_allowed("model", name, allowed)
    if any(map(is_dtensor, model.parameters())):
        allowed = "a module before fully_shard, which devices= counts"
        raise not_allowed("model", f"{name} with parameters that are DTensors", allowed)


def check_length(config: Any, seq_len: Any) -> None:
    """Raises OptionError for a sequence that is longer than the model's positions."""
    limit = positions(config)
    allowed = "a whole number, 1 or more" if limit is None else f"1 to {limit}, the model's positions"
    if not isinstance(seq_len, int) or seq_len < 1 or (limit is not None and seq_len > limit):
        raise not_allowed("seq_len", seq_len, allowed)
