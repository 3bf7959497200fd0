"""SPECS: each optimizer's formula and test cases, a file each, which the tests of all optimizers read.

It imports nothing but torch and memkern, so that tests/build/installed.py runs where there is nothing else. Muon, whose
step is two ops and products of matrices, has tests of its own (tests/optim/test_muon.py).
"""

from .adam import ADAM, ADAMW
from .lamb import LAMB
from .lars import LARS
from .lion import LION
from .sgd import SGD
from .spec import EIGHT, FormulaOptimizer, OptimizerSpec, Options

SPECS: dict[str, OptimizerSpec] = {spec.name: spec for spec in (ADAM, ADAMW, LION, LAMB, LARS, SGD)}
"""By the class's name, in the order of fixtures/hashes.json."""

OPTIMIZERS = [*(spec.cls for spec in SPECS.values()), *(spec.cls8bit for spec in SPECS.values())]
EIGHT_BIT = [spec.cls8bit for spec in SPECS.values()]
LAYERWISE = [cls for spec in SPECS.values() if spec.op.has_trust_ratios for cls in (spec.cls, spec.cls8bit)]


def spec_of(cls: type) -> OptimizerSpec:
    """The spec of a class with 32- or 8-bit states."""
    return SPECS[cls.__name__.removesuffix("8bit")]


def cases(field: str) -> dict[str, tuple[OptimizerSpec, Options]]:
    """The cases in one field of all optimizers' specs (variants, parity or of_timm), by name."""
    return {
        f"{spec.name}, {name}" if name else spec.name: (spec, options)
        for spec in SPECS.values()
        for name, options in getattr(spec, field).items()
    }


__all__ = [
    "EIGHT",
    "EIGHT_BIT",
    "LAYERWISE",
    "OPTIMIZERS",
    "SPECS",
    "FormulaOptimizer",
    "OptimizerSpec",
    "Options",
    "cases",
    "spec_of",
]
