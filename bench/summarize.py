#!/usr/bin/env python3
"""The summary of a benchmark's JSON that is kept in bench/results: one line for each thing that was
measured, with the median of its runs and, in brackets, the least and the most. Usage, on the machine
that measured, at the commit that was measured (or with both as a second argument):
bench/summarize.py target/bench/checkpoint.json > bench/results/checkpoint.tsv"""

import json
import os
import platform
import statistics
import subprocess
import sys

# Numbers that say what was measured, not how it came out.
NAMES = {"gib", "threads", "pages_per_second", "words_per_second", "guests", "memory_mib", "images"}
# One number for each moment: too long for a summary.
SERIES = {"stages", "misses_by_second", "gap_at_ms", "epochs", "curve", "jobs"}


def shown(values):
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.4g}" if low == high else f"{middle:.4g} [{low:.4g}..{high:.4g}]"


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def measured(value, path, into):
    """Puts each number below `value` under its dotted name."""
    if isinstance(value, dict):
        for key, below in value.items():
            if key not in SERIES and key not in NAMES and not isinstance(below, str):
                measured(below, f"{path}.{key}" if path else key, into)
    elif isinstance(value, list):
        for below in value:
            measured(below, path, into)
    elif is_number(value):
        into.setdefault(path.removeprefix("repeats."), []).append(value)


def table(rows):
    """Rows with the same names become one."""
    groups = {}
    for row in rows:
        names = {key: it for key, it in row.items() if isinstance(it, str) or key in NAMES}
        groups.setdefault(json.dumps(names), []).append(row)
    lines, columns = [], []
    for names, rows in groups.items():
        numbers = {}
        for row in rows:
            measured(row, "", numbers)
        line = {key: str(it) for key, it in json.loads(names).items()}
        line |= {key: shown(values) for key, values in numbers.items()}
        columns += [key for key in line if key not in columns]
        lines.append(line)
    print("\t".join(columns))
    for line in lines:
        print("\t".join(line.get(key, "") for key in columns))


def where():
    model = next(line for line in open("/proc/cpuinfo") if line.startswith("model name"))
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    cpus = f"{os.cpu_count()} x {model.split(':')[1].strip()}"
    return f"{cpus}, {gib:.0f} GiB, Linux {platform.release()}; commit {commit}"


print(f"# {sys.argv[2] if len(sys.argv) > 2 else where()}")
result = json.load(open(sys.argv[1]))
rest = {}
for key, value in result.items():
    if isinstance(value, list) and value and isinstance(value[0], dict):
        print(f"# {key}")
        table(value)
    elif isinstance(value, dict) or isinstance(value, list):
        measured(value, key, rest)
    else:
        print(f"# {key}: {value}")
for key, values in rest.items():
    print(f"{key}\t{shown(values)}")
