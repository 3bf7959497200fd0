"""What 8-bit codes put on the gradient, by the class of what is coded.

The Llama-like model of saved_parity.py, trained for 300 steps. Each class of saved tensors is coded alone,
the rest is saved exactly; the error is that of all gradients together, relative to the exact one, the root mean square
over 8 batches. Bytes are those per token that the class takes in codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor, nn

import memkern
from benchmarks import machine, report
from lab.studies import study
from memkern.saved import bases, codecs
from memkern.saved.edge import Edge
from memkern.saved.needs import Need
from memkern.saved.store import Store

from .activation_parity import loss_of, train
from .saved_parity import SETTING, llama

COLUMNS = (*report.PROVENANCE, "class", "bytes_per_token", "gradient_error")
BATCHES = 8
KEYS = SETTING.width // 2  # width of keys and values
# Of a tensor: the name of the operation that made it, its dimensions, its last size.
CLASSES: dict[str, Callable[[str, int, int], bool]] = {
    "queries and keys": lambda name, dims, last: name == "AddBackward0" and dims == 4,
    "values": lambda name, dims, last: name.startswith("Mm") and last == KEYS,
    "attention's output": lambda name, dims, last: name.startswith("ScaledDotProduct"),
    "rows of norms": lambda name, dims, last: name == "EmbeddingBackward0" or (name[:3] == "Add" and dims == 3),
    "gate and up": lambda name, dims, last: name.startswith("Mm") and last == 3 * SETTING.width,
    "log-probabilities": lambda name, dims, last: name.startswith("LogSoftmax"),
    "all of them": lambda name, dims, last: True,
}


class Coded:
    """Stands for Store.codec: codes for one class, whose bytes it counts."""

    def __init__(self, belongs: Callable[[str, int, int], bool]) -> None:
        self.belongs, self.bytes = belongs, 0.0
        self.codec_of = Store.codec

    def __call__(self, store: Store, base: Edge, data: Tensor, need: Need) -> codecs.Codec | None:
        codec = self.codec_of(store, base, data, need)
        if codec is None or not self.belongs(bases.maker(base), data.dim(), data.shape[-1]):
            return None
        self.bytes += data.numel() * (1 + 4 / codecs.BLOCK_SIZE)
        return codec


def gradient(model: nn.Module, batch: tuple[Tensor, Tensor], bits: int | str) -> Tensor:
    with memkern.quantize_saved(bits):
        loss = loss_of(model, batch)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]).double()


def rows(steps: int) -> Iterator[dict[str, str]]:
    from memkern.train.data import load_corpus, step_batches

    provenance = machine.provenance("cpu")
    corpus = load_corpus([], seq_len=SETTING.seq_len)
    model = llama(0)
    train(model, corpus.train, SETTING, steps, SETTING.lr, 0)
    sizes = {"accumulation": 1, "micro_batch": SETTING.batch_size, "seq_len": SETTING.seq_len}
    batches = [batch for i in range(BATCHES) for batch in step_batches(corpus.validation, seed=1000, step=i, **sizes)]
    exact = [gradient(model, batch, "exact") for batch in batches]
    for name, belongs in CLASSES.items():
        coded = Coded(belongs)
        with mock.patch.object(Store, "codec", lambda *args, coded=coded: coded(*args)):
            found = [gradient(model, batch, 8) for batch in batches]
        square = sum(float(((a - b).norm() / b.norm()) ** 2) for a, b in zip(found, exact, strict=True))
        per_token = coded.bytes / BATCHES / (SETTING.batch_size * SETTING.seq_len)
        values = (name, f"{per_token:.0f}", f"{(square / BATCHES) ** 0.5:.2e}")
        yield study.row(provenance, COLUMNS, values)


def main(argv: list[str] | None = None) -> None:
    parser = study.parser("saved_errors", __doc__)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args(argv)
    path = args.out / "saved-errors.csv"
    study.write(path, rows(args.steps), COLUMNS, shown=3)


if __name__ == "__main__":
    main()
