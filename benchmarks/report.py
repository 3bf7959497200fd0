"""The results' CSV files: rows are written and read here, and tables are made of them."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path

from rich.table import Table

from .harness import Result

PROVENANCE = ("date", "commit", "dirty", "hardware", "python", "torch", "memkern")
COLUMNS = (*PROVENANCE, *(field.name for field in fields(Result)))
# heading, column of the CSV, format; {unit} and {state} are filled by headings()
TIMES = (
    ("ms", "ms_median", ".2f"),
    ("share of copy bandwidth", "copy_share", ".0%"),
    ("memkern's time / its", "ratio_to_memkern", ".3f"),
)
BYTES = (
    ("B/{unit} moved", "bytes_per_param", ".2f"),
    ("{state} B/{unit}", "state_bytes_per_param", ".3f"),
    ("temporary B/{unit}", "temp_bytes_per_param", ".2f"),
)
OPTIMIZER_TOPICS = ("optim", "host", "layerwise", "muon")

Row = dict[str, str]


def headings(topic: str, shown: Sequence[tuple[str, str, str]]) -> list[str]:
    """The tables' headings. An optimizer's figures are per parameter, all others per element of the input."""
    unit, state = ("param", "state") if topic in OPTIMIZER_TOPICS else ("element", "saved")
    return [heading.format(unit=unit, state=state) for heading, *_ in shown]


def topic_of(path: Path) -> str:
    """The topic of a results file, whose name is TOPIC_HARDWARE.csv."""
    return path.stem.rpartition("_")[0]


def rows(provenance: dict[str, str], results: Iterable[Result]) -> list[Row]:
    """Results as the CSV has them: text, five significant digits, empty where nothing was measured."""

    def text(value: object) -> str:
        if value is None:
            return ""
        return f"{value:.5g}" if isinstance(value, float) else str(value)

    return [provenance | {name: text(value) for name, value in asdict(r).items()} for r in results]


def append(path: Path, new: Sequence[Row], columns: Sequence[str] = COLUMNS) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerows(new)


def table(heads: Sequence[str], alignment: str, rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown. alignment: "l" or "r" for each column."""
    rule = "|".join({"l": "---", "r": "---:"}[letter] for letter in alignment)
    first, *others = ("| " + " | ".join(cells) + " |" for cells in (heads, *rows))
    return "\n".join([first, f"|{rule}|", *others])


def read(path: Path) -> list[Row]:
    """All rows of a results file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def latest(path: Path) -> dict[str, list[Row]]:
    """The rows of each case's last run, by case; contenders of different runs are never compared."""
    all_rows = read(path)
    last = {row["case"]: row["date"] for row in all_rows}
    return {
        case: [row for row in all_rows if row["case"] == case and row["date"] == date] for case, date in last.items()
    }


def figures(row: Row, shown: Sequence[tuple[str, str, str]]) -> list[str]:
    def figure(column: str) -> float:
        value = float(row[column])
        return 1 / value if column == "ratio_to_memkern" else value  # tables have memkern's time over the contender's

    return [format(figure(column), form) if row.get(column) else "" for _, column, form in shown]


def title(rows: Sequence[Row], topic: str) -> str:
    """The case, its size, and the copy bandwidth of each run that it was measured in."""
    rates = [f"{float(rate):.0f}" for rate in dict.fromkeys(row["copy_rate_gbps"] for row in rows) if rate]
    bandwidth = f", copy bandwidth {' and '.join(rates)} GB/s" if rates else ""
    unit = "parameters" if topic in OPTIMIZER_TOPICS else "elements"
    return f"{rows[0]['case']}: {int(rows[0]['numel']) / 1e6:.3g} M {unit}{bandwidth}"


def case_table(case_rows: Sequence[Row], topic: str) -> Table:
    """A case's table for the terminal: the figures, the spread, and the notes below."""
    notes = [f"{row['contender']}: {row['note']}" for row in case_rows if row["note"]]
    table = Table(
        title=title(case_rows, topic),
        title_justify="left",
        caption="\n".join(notes) or None,
        caption_justify="left",
    )
    table.add_column("", no_wrap=True)
    for heading in headings(topic, TIMES + BYTES):
        table.add_column(heading, justify="right")
    table.add_column("p20 to p80, ms", justify="right", no_wrap=True)
    for row in case_rows:
        spread = f"{float(row['ms_p20']):.2f} to {float(row['ms_p80']):.2f}" if row["ms_p20"] else "absent"
        style = "bold cyan" if row["contender"].startswith("memkern") else ""
        table.add_row(row["contender"], *figures(row, TIMES + BYTES), spread, style=style)
    return table


def conditions(rows: Sequence[Row]) -> str:
    """A run's provenance in one line: what its figures depend on."""
    commits = {row["commit"] + (" with changes" if row["dirty"] == "yes" else "") for row in rows}
    return "; ".join(
        (
            rows[0]["hardware"],
            ", ".join(sorted({row["peer"] for row in rows if row["peer"]})),
            "commit " + ", ".join(sorted(commits)),
            ", ".join(sorted({row["date"][:10] for row in rows})),
        )
    )


def markdown(paths: Iterable[Path], only: Sequence[str] = (), root: str = "", without: Sequence[str] = ()) -> str:
    """The table of docs/benchmarks.md: the conditions of each results file, and a line per case and contender.

    A file's times are columns beside the bytes, which are the same in all. ``only``: the cases to show, by the
    beginning of their names; default all. ``root``: what links begin with. ``without``: contenders not to show.
    """
    by_case: dict[str, dict[str, dict[str, Row]]] = {}  # case -> contender -> hardware
    lines, machines = [], []
    for path in sorted(paths):
        topic = topic_of(path)
        cases = {n: rows for n, rows in latest(path).items() if not only or n.startswith(tuple(only))}
        if not cases:
            raise KeyError(f"no case of {path} begins with {' or '.join(map(repr, only))}")
        shown = [row for rows in cases.values() for row in rows if row["contender"] not in without]
        lines.append(f"- {conditions(shown)} ([all figures]({root}benchmarks/results/{path.name}))")
        machines.append(shown[0]["hardware"])
        for row in shown:
            by_case.setdefault(row["case"], {}).setdefault(row["contender"], {})[row["hardware"]] = row
    names = [f"{name.split(',')[0].split('(')[0]}: " if len(machines) > 1 else "" for name in machines]
    heads = headings(topic, BYTES) + [name + head for name in names for head in headings(topic, TIMES)]
    table_rows = []
    for contenders in by_case.values():
        rows = [row for by_hardware in contenders.values() for row in by_hardware.values()]
        table_rows.append([f"**{title(rows, topic)}**", *[""] * len(heads)])
        for contender, by_hardware in contenders.items():
            cells = figures(next((row for row in by_hardware.values() if row["ms_median"]), {}), BYTES)
            for name in machines:
                measured = by_hardware.get(name)
                absent = ["absent" if measured else "", "", ""]
                cells += figures(measured, TIMES) if measured and measured["ms_median"] else absent
            table_rows.append([contender, *cells])
    return "\n".join([*lines, "", table(["", *heads], "l" + "r" * len(heads), table_rows)])


def fill_markers(page: str, results: dict[str, list[Path]], root: str = "") -> str:
    """The text with each `<!-- bench:TOPIC: CASE; CASE -->` ... `<!-- /bench -->` holding its topic's table.

    Without cases (`<!-- bench:TOPIC -->`) all of the topic's are shown. `not CONTENDER` among them leaves one out.
    """

    def replaced(match: re.Match[str]) -> str:
        topic, named = match[1], [name.strip() for name in (match[2] or "").split(";") if name.strip()]
        without = [name.removeprefix("not ") for name in named if name.startswith("not ")]
        only = [name for name in named if not name.startswith("not ")]
        if not results.get(topic):
            raise KeyError(f"no results for bench:{topic}; run python -m benchmarks --only {topic}")
        head = match[0].split("-->")[0]
        return f"{head}-->\n{markdown(results[topic], only, root, without)}\n<!-- /bench -->"

    return re.sub(r"<!-- bench:(\w+)(?::([^>]*?))? -->.*?<!-- /bench -->", replaced, page, flags=re.DOTALL)
