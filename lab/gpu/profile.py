"""ncu over the hot kernels: time, bytes, share of the DRAM's peak, issue slots, stalls, occupancy; a line for each."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator

from .hot import GROUPS
from .parts import tool
from .runner import ROOT

SECTIONS = (
    "SpeedOfLight",
    "WarpStateStats",
    "SchedulerStats",
    "Occupancy",
    "LaunchStats",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis_Tables",
)
METRICS = {
    "gpu__time_duration.sum": "time",
    "dram__bytes_read.sum": "read",
    "dram__bytes_write.sum": "written",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue_slots_percent",
    "smsp__issue_active.avg.per_cycle_active": "issued_per_cycle",
    "smsp__inst_executed.sum": "instructions",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy_percent",
    "launch__registers_per_thread": "registers",
    "launch__grid_size": "blocks",
}
STALL = "smsp__average_warps_issue_stalled_"
EXTRA = ("dram__bytes_read.sum", "dram__bytes_write.sum", "smsp__inst_executed.sum")


def command(group: str) -> list[str]:
    """At the clocks that training has: at ncu's default, the base clock, other units may bound a kernel."""
    ncu = [
        str(tool("ncu")),
        "--clock-control",
        "none",
        "--csv",
        "--page",
        "raw",
        "--profile-from-start",
        "off",
        "--target-processes",
        "all",
    ]
    for section in SECTIONS:
        ncu += ["--section", section]
    return [*ncu, "--metrics", ",".join(EXTRA), sys.executable, "-m", "lab.gpu.hot", group]


def number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def rows(lines: Iterable[str]) -> Iterator[dict[str, object]]:
    """Of ncu's table: a header, a line of units, a line for each kernel; its own messages begin with ==."""
    table = csv.reader(line for line in lines if line.startswith('"'))
    header = next(table, None)
    if header is None:
        return
    units = next(table, [])
    for row in table:
        values = dict(zip(header, row, strict=False))
        found: dict[str, object] = {"kernel": values.get("Kernel Name", "")}
        for metric, unit in zip(header, units, strict=False):
            value = number(values.get(metric, ""))
            if value is None:
                continue
            if metric in METRICS:
                found[METRICS[metric]] = f"{value} {unit}" if unit and "%" not in unit else value
            elif metric.startswith(STALL) and value >= 0.1:
                found[f"stalled {metric.removeprefix(STALL).split('_per_')[0]}"] = value
        yield found


def profile(group: str) -> int:
    """A process of ncu, whose lines are read as they come. Returns 1 if it fails or there are no rows."""
    process = subprocess.Popen(
        command(group),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )

    def lines() -> Iterator[str]:
        for line in process.stdout or ():
            if not line.startswith('"'):
                print(line.rstrip(), flush=True)  # what ncu and the program say
            yield line

    count = 0
    for row in rows(lines()):
        count += 1
        print(json.dumps({"group": group, **row}), flush=True)
    return int(process.wait() != 0 or count == 0)


def main() -> int:
    if "--plan" in sys.argv:
        for group in GROUPS:
            print(f"would run: {' '.join(command(group))}")
        return 0
    codes = [profile(group) for group in GROUPS]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
