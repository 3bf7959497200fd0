"""python -m tests.support.saved_attributes [2.10=FOLDER ...]: writes tests/fixtures/saved-attributes.csv.

One row for every tensor that a node of torch's autograd saves, from the derivatives.yaml that torch has in torchgen,
with the decision of memkern.saved.users and the versions of torch that save it. A FOLDER has the torchgen of
another version, as ``unzip torch-2.10.0-*.whl 'torchgen/*'`` writes it (the wheels for macOS are the smallest).
What a version that is not named saves stays in the file.
"""

from __future__ import annotations

import csv
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from memkern.saved import users

PATH = Path(__file__).parents[1] / "fixtures" / "saved-attributes.csv"
COLUMNS = ("node", "attribute", "saved", "decision", "why", "torch")
HERE = ".".join(torch.__version__.split(".")[:2])
_TENSORS = ("at::Tensor", "::std::optional<at::Tensor>", "at::TensorList", "::std::vector<at::Tensor>")
WHY = {
    "product": "an error stays relative to the whole product",
    "smooth": "bounded derivative; coded unless a division, a logarithm or an unknown operation follows",
    "shape": "its shape alone is used",
    "linear": "used exactly; passes the gradient on",
    "singular": "not in the table: exact, and so is what it was made of, back to the last product",
}


def derivatives(folder: Path | None = None) -> Iterator[tuple[str, str, str]]:
    """Node, attribute, and whether it is an argument or a result. folder: of another torchgen than the installed."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("torchgen", "autograd")]:
        del sys.modules[name]
    added = [] if folder is None else [str(folder)]
    sys.path[:0] = added
    try:
        packaged = Path(importlib.import_module("torchgen").__path__[0]) / "packaged"
        added.append(str(packaged))
        sys.path.insert(0, str(packaged))
        load = importlib.import_module("autograd.load_derivatives").load_derivatives
    finally:
        sys.path[:] = [path for path in sys.path if path not in added]
    assert folder is None or packaged.is_relative_to(folder)
    native = packaged / "ATen" / "native"
    files = packaged / "autograd" / "derivatives.yaml", native / "native_functions.yaml", native / "tags.yaml"
    for by_key in load(*map(str, files))[0].values():
        for info in by_key.values():
            for kind, saved in (("argument", info.all_saved_inputs), ("result", info.all_saved_outputs)):
                for each in saved:
                    if info.op and each.nctype.type.cpp_type() in _TENSORS:
                        yield info.op, str(each.nctype.name), kind


def decision(node: str, attribute: str) -> tuple[str, str]:
    row = users.USERS.get(node, users.UNKNOWN_USER)
    if attribute in row.coded:
        return "coded", WHY[row.kind]
    if attribute in row.shape:
        return "any codes", WHY["shape"]
    if row.kind in ("product", "smooth"):
        return "exact", "statistics, masks and indices" if node in users.USERS else WHY["singular"]
    return "exact", WHY[row.kind]


def rows(folder: Path | None = None) -> list[tuple[str, ...]]:
    return sorted({(node, name, kind, *decision(node, name)) for node, name, kind in derivatives(folder)})


def read() -> list[tuple[str, ...]]:
    with PATH.open(newline="") as file:
        return [tuple(row[c] for c in COLUMNS) for row in csv.DictReader(file)]


def _sorted(versions: set[str]) -> str:
    return " ".join(sorted(versions, key=lambda version: [int(part) for part in version.split(".")]))


def main(*others: str) -> None:
    found: dict[tuple[str, ...], tuple[str, ...]] = {}
    versions: dict[tuple[str, ...], set[str]] = {}
    named = {HERE: None} | {version: Path(folder) for version, _, folder in (o.partition("=") for o in others)}
    for row in read() if PATH.exists() else []:
        found[row[:2]], versions[row[:2]] = row[:3], set(row[5].split()) - named.keys()
    for version, folder in named.items():
        for row in rows(folder):
            found[row[:2]] = row[:3]
            versions.setdefault(row[:2], set()).add(version)
    with PATH.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for key in sorted(found):
            if versions[key]:
                writer.writerow((*found[key], *decision(*key), _sorted(versions[key])))


if __name__ == "__main__":
    main(*sys.argv[1:])
