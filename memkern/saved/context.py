"""``with memkern.quantize_saved(bits=8):`` what autograd saves is saved once, in 8 bits, and the rest recomputed."""

from __future__ import annotations

import threading
from typing import Any

from .offload import options_of
from .session import Session, check_bits, close_interrupted, new_session


class _Opened(threading.local):
    """The sessions that one object has opened in this thread: hooks are a thread's own."""

    def __init__(self) -> None:
        self.sessions: list[Session] = []


class quantize_saved:
    """A context in which autograd saves each value once, and in 8 bits: the same training loop, a seventh of the bytes.

    ::

        with memkern.quantize_saved(bits=8):
            loss = model(batch).loss
        loss.backward()  # inside of the block or after it

    Three rules find what need not be saved; memkern/saved/rules.py has the table of operations:

    - copies of parameters in another dtype, which autocast makes, are not saved: the parameter and its version are;
    - a value that is saved by several operations, also as a view or a cast of itself, is saved once;
    - outputs of elementwise functions, products, normalized rows, embeddings and gathers whose inputs are saved
      already are computed anew.

    What is left is stored in block-wise 8-bit codes (:func:`memkern.quantize_blockwise`, power, to the nearest) where
    the operation that uses it allows: matrix products, convolutions, attention, norms, and smooth functions whose
    result does not go through a division or a logarithm (memkern/saved/users.py). Everything else is saved as
    torch does: what other operations use, such as ``amax``, ``log`` or an autograd.Function of your own, all that needs
    no gradient, and what the last operations of the block use. Masks of two values become bits and indices fewer
    bytes, exactly.

    Args:
        bits: ``8``, or ``"exact"``: the rules without codes. Gradients then differ from torch's by rounding of the
            rows of norms at most, and in most models by nothing.
        offload: what is stored (codes, scales, exact values, inputs of checkpoints) is copied to pinned host memory on
            a stream of its own, freed on the device, and copied back before the backward pass needs it. The gradients
            have the same bits. Default False.
        offload_ahead: the newest so many bytes stay on the device, and as many are back on it before they are needed;
            as many again may be on their way to the host. Default: a 24th of what a forward pass stores, as a block of
            24 would store; :func:`memkern.compress` counts the model's blocks.

    What the last layers store is needed first and never leaves. Tensors under 256 KiB stay, and so does what somebody
    else holds, such as frozen weights and buffers. The host waits for nothing: a copy's event frees the device's
    memory. Pinned memory is used again by the next step; :func:`memkern.memory.offload_bytes` reports it, and
    :func:`memkern.memory.empty_offload_pool` frees it. On a CPU the copies are made, and save nothing.

    Bytes per element of what is left: 1.03 (codes and a scale for 128; 1.16 of sigmoid and softmax, 1.28 of tanh, whose
    distance from a limit is coded) in place of 4 or 2. Of four layers of width 512
    at 512 tokens that is .09 to .19 of torch's in fp32 and .12 to .19 under autocast; ``"exact"`` .36 to .70 and .29 to
    .44 (benchmarks/results/saved-models.csv). Relative error of the whole gradient by what alone is coded, of a small
    Llama (lab/results/saved-errors.csv): queries and keys 1.4 % (it goes through an exponential),
    log-probabilities .8 %, values and attention's output .4 %, inputs of norms .3 %, gate and up .3 %; all of them
    1.8 %. In the median over the parameter tensors of the larger models above, .1 to 1.3 %.

    In-place changes: what is stored in codes keeps the value that was saved; anything else that was changed between
    forward and backward, also a parameter by an optimizer's step, raises as in torch. With ``"exact"`` so does a change
    of an embedding's table (also by ``max_norm``, in a second call), as its rows are looked up again. Not seen are
    changes through ``.data``, as in torch, and under ``no_grad`` those of a value that no operation has saved: what is
    made of it later may be computed anew from the value before. NaN and inf survive.

    What the caller still holds when the block ends (cached keys and values, hidden states) is not held in codes beside
    it. Hooks that are open around the block get what is stored, so that under ``torch.autograd.graph.save_on_cpu()``
    codes travel; offload does nothing there. Inside of activation checkpoints nothing happens; their inputs are exact.
    Around a function of torch.compile nothing is stored in codes, as the compiler decides what is saved; inside of one,
    ``fullgraph=True`` refuses it. torch.func's transforms refuse saved-tensor hooks.

    Raises:
        ValueError: bits is neither 8 nor "exact"; an option of offload out of range.
    """

    def __init__(self, bits: int | str = 8, *, offload: bool = False, offload_ahead: int | None = None) -> None:
        check_bits(bits)
        self.bits = bits
        self.offload = options_of(offload, offload_ahead)
        self._opened = _Opened()

    def __enter__(self) -> quantize_saved:
        session = new_session(self.bits, offload=self.offload)
        session.note_leaves()
        session.enter()
        self._opened.sessions.append(session)
        return self

    def __exit__(self, *_: Any) -> None:
        close_interrupted()
        self._opened.sessions.pop().exit()
