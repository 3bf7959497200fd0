"""Defines the tasks: for each a model, the batch of each step, and the validation loss.

They depend on the seed and the step alone. Models have about 40,000 to 250,000 parameters, so that a run takes seconds
on one core, and most of their elements are in tensors that 8-bit optimizers code (4,096 elements or more).
"""

from __future__ import annotations

import functools
import itertools
import math
import pydoc_data
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]
TEXT = str(Path(pydoc_data.__file__).with_name("topics.py"))  # the file of Python's library that is English text
FAMILIES = ("adamw", "lion", "sgd", "muon", "lamb", "lars")  # in each, optimizers take learning rates of one range


def schedule(lr: float, step: int, steps: int) -> float:
    """Learning rate of a step: linear over the first twentieth, then a cosine to a tenth."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return lr * (step + 1) / warmup
    return lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))))


def generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * seed + step)


def rates(*first: float) -> dict[str, float]:
    """The lowest learning rate of each family's grid, given in the order of FAMILIES."""
    return dict(zip(FAMILIES, first, strict=True))


class Task:
    """Base of the tasks. ``first``: the lowest rates. ``extends``: whether a grid grows where its edge is best."""

    name = what = ""
    steps = 150
    seeds = 3
    weight_decay = 0.1
    clip: float | None = None
    weights = torch.float32
    extends = True
    first: dict[str, float]

    @property
    def compared(self) -> range:
        """The seeds of the comparison; 0 chooses the rate."""
        return range(1, self.seeds + 1)

    def model(self, seed: int) -> nn.Module:
        raise NotImplementedError

    def batch(self, seed: int, step: int) -> Batch:
        raise NotImplementedError

    def validation(self) -> Batch:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())

    def rate(self, lr: float, step: int) -> float:
        """A linear warm-up over a twentieth of the steps, then a cosine to a tenth."""
        return schedule(lr, step, self.steps)

    @torch.no_grad()
    def validation_loss(self, model: nn.Module) -> float:
        model.eval()
        inputs, targets = self.validation()
        batches = zip(inputs.split(256), targets.split(256), strict=True)
        total = sum(float(self.loss(model, batch)) * len(batch[0]) for batch in batches)
        model.train()
        return total / len(inputs)


@functools.cache
def corpus(files: tuple[str, ...] = ()) -> Any:
    from memkern.train import load_corpus
    from memkern.train.data import standard_library_files

    library = [str(file) for file in standard_library_files() if str(file) != TEXT]
    return load_corpus(files or library, seq_len=64)


class ByteGPT(Task):
    name, what = "gpt", "a byte-level GPT on Python's sources: 2 layers of width 64, 4 x 64 bytes a step"
    clip = 1.0
    first = rates(2e-3, 2e-4, 0.1, 1e-2, 1e-2, 4.0)
    files: tuple[str, ...] = ()

    def model(self, seed: int) -> nn.Module:
        from memkern.train.model import GPT

        torch.manual_seed(seed)
        return GPT(layers=2, heads=2, width=64, seq_len=64)

    def batch(self, seed: int, step: int) -> Batch:
        from memkern.train import TrainConfig

        [batch] = corpus(self.files).step(TrainConfig(seed=seed, seq_len=64), step)
        return batch

    @functools.cache  # noqa: B019  (there is one object of each task)
    def validation(self) -> Batch:
        from memkern.train import TrainConfig

        [batch] = corpus(self.files).validation_batches(TrainConfig(seq_len=64, eval_tokens=16384, micro_batch=256))
        return batch


class FineTune(ByteGPT):
    """Fine-tunes bf16 weights, except in 32-bit originals, at rates so small that bf16 rounds most updates away."""

    name, what = "fine-tune", "the trained GPT goes on with English text, in bf16 weights at small rates"
    weights = torch.bfloat16
    extends = False
    first = rates(5e-6, 5e-7, 1e-3, 5e-5, 5e-5, 5e-2)
    files = (TEXT,)

    def model(self, seed: int) -> nn.Module:
        model = super().model(0)
        model.load_state_dict(self._trained())
        return model

    @functools.cache  # noqa: B019
    def _trained(self) -> dict[str, Tensor]:
        """The GPT's weights after 400 steps of torch's AdamW, rounded to bf16."""
        task = ByteGPT()
        task.steps = 400
        model = task.model(0)
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
        for step in range(task.steps):
            optimizer.param_groups[0]["lr"] = task.rate(4e-3, step)
            optimizer.zero_grad()
            task.loss(model, task.batch(0, step)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return {name: x.bfloat16().float() for name, x in model.state_dict().items()}


class Grams(nn.Module):
    """Predicts the next byte: a hash of the 2, 3 and 4 bytes before it each chooses one of ``rows`` rows of a table."""

    def __init__(self, rows: int = 8192, dim: int = 8) -> None:
        super().__init__()
        self.rows = rows
        self.table = nn.Embedding(3 * rows, dim)
        self.inner = nn.Linear(3 * dim, 192)
        self.act = nn.GELU()
        self.out = nn.Linear(192, 256)

    def forward(self, context: Tensor) -> Tensor:
        hashed = torch.zeros_like(context[:, 0])
        indices = []
        for i in range(4):  # hashes of the last 1, 2, 3 and 4 bytes
            hashed = (hashed * 257 + context[:, 3 - i] + 1) * 40503 % 1_000_003
            if i:
                indices.append(hashed % self.rows + (i - 1) * self.rows)
        rows = self.table(torch.stack(indices, 1)).flatten(1)
        return self.out(self.act(self.inner(rows)))


class RareRows(Task):
    name, what = (
        "rows",
        "the next byte from hashed 2-, 3- and 4-grams: 24,576 rows, at most 768 touched a step",
    )
    first = rates(5e-3, 5e-4, 1.0, 1e-2, 2e-2, 8.0)

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return Grams()

    @staticmethod
    def _windows(text: Tensor, starts: Tensor) -> Batch:
        windows = text[starts[:, None] + torch.arange(5)].long()
        return windows[:, :4], windows[:, 4]

    def batch(self, seed: int, step: int) -> Batch:
        text = corpus().train
        return self._windows(text, torch.randint(len(text) - 4, (256,), generator=generator(seed, step)))

    @functools.cache  # noqa: B019
    def validation(self) -> Batch:
        text = corpus().validation
        return self._windows(text, torch.arange(8192) * (len(text) - 4) // 8192)


@functools.cache
def digits() -> tuple[Batch, Batch]:
    """scikit-learn's 1,797 digits of 8 x 8 pixels: those for training, and every fifth for validation."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    y = torch.tensor(labels)
    last = torch.arange(len(x)) % 5 == 4
    return (x[~last], y[~last]), (x[last], y[last])


class Digits(Task):
    name, what = (
        "digits",
        "a convolutional net with BatchNorm on scikit-learn's digits, shifted and with noise",
    )
    weight_decay = 0.01
    first = rates(1e-3, 1e-4, 0.05, 1e-2, 1e-2, 4.0)
    size = 32

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        widths = (1, 32, 48, 64)
        layers: list[nn.Module] = []
        for i, o in itertools.pairwise(widths):
            stride = 2 if i == 32 else 1
            layers += [nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.SiLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

    @staticmethod
    def augmented(images: Tensor, random: torch.Generator) -> Tensor:
        """Each image shifted by up to 2 pixels in both directions, with noise of a quarter of the values' range."""
        n = len(images)
        padded = F.pad(images, (2, 2, 2, 2), value=-1.0)
        down, right = torch.randint(5, (2, n, 1, 1), generator=random)
        rows, columns = down + torch.arange(8)[:, None], right + torch.arange(8)
        shifted = padded[torch.arange(n)[:, None, None], 0, rows, columns].unsqueeze(1)
        return shifted + 0.5 * torch.randn(images.shape, generator=random)

    def batch(self, seed: int, step: int) -> Batch:
        (images, labels), _ = digits()
        random = generator(seed, step)
        chosen = torch.randint(len(images), (self.size,), generator=random)
        return self.augmented(images[chosen], random), labels[chosen]

    @functools.cache  # noqa: B019
    def validation(self) -> Batch:
        """Two augmented copies of each image."""
        _, (images, labels) = digits()
        return self.augmented(images.repeat(2, 1, 1, 1), generator(2**20, 0)), labels.repeat(2)


class LargeBatch(Digits):
    """Trains on equally many images in batches of 1, 8 or 64 times 16; the rate is tuned at 1 and scaled for others."""

    families = ("adamw", "sgd", "lamb", "lars")
    first = rates(5e-4, 5e-5, 0.02, 1e-2, 5e-3, 2.0)

    def __init__(self, factor: int) -> None:
        self.factor = factor
        self.name = f"batch-x{factor}"
        self.size = 16 * factor
        self.steps = 320 // factor
        self.what = f"the digits in batches of {self.size}"

    def scaled(self, family: str, lr: float) -> float:
        """The rule of large batches: the square root for Adam and LAMB, linear for SGD and LARS."""
        scale = self.factor if family in ("sgd", "lars") else math.sqrt(self.factor)
        return float(f"{lr * scale:.5g}")  # rounded as in the results, so that a run can be repeated from them


class Outliers(Task):
    name, what = (
        "outliers",
        "regression, squared error, on targets whose noise exceeds x with a probability that falls as x^-1.5",
    )
    seeds, steps = 5, 200
    first = rates(5e-4, 5e-5, 1e-4, 2.5e-3, 5e-3, 1.0)

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        layers = [nn.Linear(64, 192), nn.GELU(), nn.Linear(192, 192), nn.GELU(), nn.Linear(192, 1)]
        return nn.Sequential(*layers)

    @staticmethod
    @functools.cache
    def teacher() -> Batch:
        random = generator(2**20, 1)
        return torch.randn(64, 16, generator=random) / 4, torch.randn(16, 1, generator=random) / 2

    def examples(self, n: int, random: torch.Generator) -> Batch:
        first, second = self.teacher()
        inputs = torch.randn(n, 64, generator=random)
        return inputs, torch.tanh(inputs @ first) @ second

    def batch(self, seed: int, step: int) -> Batch:
        random = generator(seed, step)
        inputs, targets = self.examples(64, random)
        cauchy = torch.tan(math.pi * (torch.rand(targets.shape, generator=random) - 0.5))
        return inputs, targets + cauchy.sign() * cauchy.abs() ** (1 / 1.5)

    @functools.cache  # noqa: B019
    def validation(self) -> Batch:
        """Examples whose targets have no noise."""
        return self.examples(8192, generator(2**20, 2))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        ByteGPT(), RareRows(), Digits(), FineTune(), LargeBatch(1), LargeBatch(8), LargeBatch(64), Outliers(),
    )
}  # fmt: skip
