"""An embedding that stays stable under 8-bit optimizers, and the attribute that gives it 32-bit states."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

MARK = "optimizer_state_bits"
"""A module with this attribute (on itself or its class) asks for so many bits in its parameters' optimizer states.

It is the module's and not the Parameter's, because copy.deepcopy drops a Parameter's attributes.
"""


def state_bits_of(module: nn.Module) -> int | None:
    """MARK's value on a module or its class; not what a wrapper's ``__getattr__`` finds in the wrapped module."""
    bits = vars(module).get(MARK)
    return getattr(type(module), MARK, None) if bits is None else bits


class StableEmbedding(nn.Embedding):
    r"""torch.nn.Embedding with Xavier-uniform weights, a layer norm behind it, and 32-bit optimizer states.

    ``y = layer_norm(weight[input])``, weight ~ U(-a, a) with ``a = sqrt(6 / (num_embeddings + embedding_dim))``, the
    row of ``padding_idx`` zero. Input: integers of any shape; output: one more dimension, embedding_dim.

    Arguments as for torch.nn.Embedding. state_dict: ``weight``, ``norm.weight`` and ``norm.bias``.

    A row has a gradient in few steps, and gradients of different rows differ by orders of magnitude, where the error
    of 8-bit states is largest; :func:`memkern.optim.param_groups` gives this module's parameters ``state_bits=32``.

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861), section 2.3.
    """

    optimizer_state_bits = 32

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        options = (num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        super().__init__(*options, _weight, _freeze, device, dtype)
        self.norm = nn.LayerNorm(embedding_dim, device=self.weight.device, dtype=self.weight.dtype)

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)
        self._fill_padding_idx_with_zero()

    def forward(self, input: Tensor) -> Tensor:
        return self.norm(super().forward(input))
