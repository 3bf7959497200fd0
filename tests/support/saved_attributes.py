"""python -m tests.support.saved_attributes: writes tests/fixtures/saved-attributes.csv.

One row for every tensor that a node of torch's autograd saves, from the derivatives.yaml that torch has in torchgen,
with the decision of memkern.compression.users. Run it with a new torch; what an older one saved stays in the file.
"""

from __future__ import annotations

import csv
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torchgen

from memkern.compression import users

PATH = Path(__file__).parents[1] / "fixtures" / "saved-attributes.csv"
COLUMNS = ("node", "attribute", "saved", "decision", "why")
_TENSORS = ("at::Tensor", "::std::optional<at::Tensor>", "at::TensorList", "::std::vector<at::Tensor>")
WHY = {
    "product": "an error stays relative to the whole product",
    "smooth": "bounded derivative; coded unless a division, a logarithm or an unknown operation follows",
    "shape": "its shape alone is used",
    "linear": "used exactly; passes the gradient on",
    "singular": "not in the table: exact, and so is what it was made of, back to the last product",
}


def derivatives() -> Iterator[tuple[str, str, str]]:
    """Node, attribute, and whether it is an argument or a result."""
    packaged = Path(torchgen.__file__).parent / "packaged"
    sys.path.insert(0, str(packaged))
    try:
        load = importlib.import_module("autograd.load_derivatives").load_derivatives
    finally:
        sys.path.remove(str(packaged))
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


def rows() -> list[tuple[str, ...]]:
    return sorted({(node, name, kind, *decision(node, name)) for node, name, kind in derivatives()})


def read() -> list[tuple[str, ...]]:
    with PATH.open(newline="") as file:
        return [tuple(row[c] for c in COLUMNS) for row in csv.DictReader(file)]


def main() -> None:
    known = {row[:2]: row for row in (read() if PATH.exists() else [])}
    known = {key: (*row[:3], *decision(*key)) for key, row in known.items()} | {
        row[:2]: row for row in rows()
    }
    with PATH.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(known[key] for key in sorted(known))


if __name__ == "__main__":
    main()
