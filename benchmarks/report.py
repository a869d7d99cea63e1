"""Summaries of results, and `python -m benchmarks.report RESULTS.json ... --write README.md`."""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import summary as machine_summary

BEGIN, END = "<!-- results -->", "<!-- /results -->"
METRICS = (
    "frames_per_s",
    "frames_per_cpu_s",
    "mean_inference_batch",
    "latency_p50_s",
    "latency_p99_s",
    "memory_bytes",
    "first_batch_s",
    "mean_step_s",
)
HEADINGS = (
    "contender",
    "frames/s",
    "min .. max",
    "per CPU-second",
    "inference batch",
    "latency p50",
    "p99",
    "memory",
    "first batch",
    "failed",
)

Record = dict[str, Any]
Spread = dict[str, float]


def summarize(settings: Record, results: list[Record]) -> Record:
    """Medians and spread of every metric per contender, and of our ratio to each rival.

    A ratio is taken within one repeat, between runs that were neighbours in time, before its median is. `step_time` is
    our ratio to `num_envs` steps at once, each as long as the envs measured in that run.
    """
    passed = [result for result in results if result["status"] == "ok"]
    contenders = {}
    for name in settings["contenders"]:
        own = [result for result in passed if result["contender"] == name]
        runs = sum(result["contender"] == name for result in results)
        contenders[name] = {metric: _spread([result[metric] for result in own]) for metric in METRICS}
        contenders[name]["failed"] = runs - len(own)
    ratios = {rival: _spread(_ratios(passed, rival)) for rival in settings["contenders"] if rival != "ours"}
    ratios["step_time"] = _spread(
        [
            result["frames_per_s"] * result["mean_step_s"] / settings["num_envs"]
            for result in passed
            if result["contender"] == "ours" and result["mean_step_s"] is not None
        ]
    )
    return {"contenders": contenders, "ours_over": ratios}


def _ratios(passed: list[Record], rival: str) -> list[float]:
    rates = {(result["contender"], result["repeat"]): result["frames_per_s"] for result in passed}
    repeats = sorted({repeat for _, repeat in rates})
    return [
        rates["ours", repeat] / rates[rival, repeat]
        for repeat in repeats
        if ("ours", repeat) in rates and (rival, repeat) in rates
    ]


def _spread(values: Sequence[float | None]) -> Spread | None:
    """Median, min and max of what is known; None if nothing is."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"median": statistics.median(known), "min": min(known), "max": max(known)}


def table(record: Record) -> str:
    """The result of one command as plain text."""
    rows = _rows(record)
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([_title(record), "", *lines, "", *_remarks(record)])


def details(record: Record, folder: Path) -> str:
    """The same as markdown, with the plot; `folder` is the one of the file it goes into."""
    heading, *rows = _rows(record)
    lines = [f"### {_title(record)}", "", _markdown_row(heading), _markdown_row(["---:"] * len(heading))]
    lines += [_markdown_row(row) for row in rows]
    lines += ["", *(f"- {line}" for line in _remarks(record))]
    if record["plot"]:
        path = os.path.relpath(Path(record["folder"]) / record["plot"], folder)
        lines += ["", f"![{_title(record)}]({path})"]
    return "\n".join(lines)


def overview(records: list[Record]) -> str:
    """One markdown row per workload: frames/s as median (min .. max), and our ratio to the rivals."""
    rivals = list(dict.fromkeys(name for record in records for name in record["settings"]["contenders"]))
    lines = [
        _markdown_row(["workload", "envs", *rivals, "ours / ideal", "ours / async"]),
        _markdown_row(["---", *["---:"] * (len(rivals) + 3)]),
    ]
    for record in records:
        contenders, ratios = record["summary"]["contenders"], record["summary"]["ours_over"]
        rates = [_with_spread(contenders.get(name, {}).get("frames_per_s"), _count) for name in rivals]
        cells = [record["settings"]["workload"], str(record["settings"]["num_envs"]), *rates]
        cells += [_with_spread(ratios.get(rival), _ratio) for rival in ("ideal", "async")]
        lines.append(_markdown_row(cells))
    machines = dict.fromkeys(_conditions(record) for record in records)
    return "\n".join([*lines, "", *(f"Measured on {machine}." for machine in machines)])


def write(path: Path, records: list[Record], with_details: bool) -> None:
    """Replaces what stands between the markers in `path`.

    Raises:
        ValueError: the file lacks a marker.
    """
    text = path.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{path}: expected the markers {BEGIN} and {END}, once each and in this order")
    parts = [overview(records)]
    if with_details:
        parts += [details(record, path.resolve().parent) for record in records]
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    path.write_text(f"{before}{BEGIN}\n" + "\n\n".join(parts) + f"\n{END}{after}")


def load(path: Path) -> Record:
    """A record as `benchmarks.throughput --json` wrote it; `folder` says where, for its plot lies beside it."""
    record: Record = json.loads(path.read_text())
    return record | {"folder": str(path.resolve().parent)}


def _title(record: Record) -> str:
    settings = record["settings"]
    return (
        f"{settings['workload']}, {settings['num_envs']} envs{_options(settings)}:"
        f" {settings['repeats']} x {settings['seconds']:g} s"
    )


def _options(settings: Record) -> str:
    """What the collector was given beside its defaults."""
    options = {
        "num_workers": "{} workers",
        "workers_per_process": "{} per process",
        "min_batch_size": "batches of at least {}",
        "max_batch_size": "at most {}",
    }
    given = [form.format(settings[name]) for name, form in options.items() if settings[name] is not None]
    return "".join(f", {each}" for each in given)


def _conditions(record: Record) -> str:
    settings = record["settings"]
    return f"{machine_summary(record['machine'])}; medians of {settings['repeats']} interleaved repeats (min .. max)"


def _rows(record: Record) -> list[list[str]]:
    rows = [list(HEADINGS)]
    for name, metrics in record["summary"]["contenders"].items():
        rate = metrics["frames_per_s"]
        rows.append(
            [
                name,
                _median(rate, _count),
                "-" if rate is None else f"{_count(rate['min'])} .. {_count(rate['max'])}",
                _median(metrics["frames_per_cpu_s"], _count),
                _median(metrics["mean_inference_batch"], lambda value: f"{value:.1f}"),
                _median(metrics["latency_p50_s"], _milliseconds),
                _median(metrics["latency_p99_s"], _milliseconds),
                _median(metrics["memory_bytes"], lambda value: f"{value / 1e6:,.0f} MB"),
                _median(metrics["first_batch_s"], lambda value: f"{value:.2f} s"),
                str(metrics["failed"]),
            ]
        )
    return rows


def _remarks(record: Record) -> list[str]:
    names = {"step_time": "num_envs / measured step time"}
    lines = [
        f"ours / {names.get(name, name)}: {_with_spread(ratio, _ratio)}"
        for name, ratio in record["summary"]["ours_over"].items()
        if ratio is not None
    ]
    for name, metrics in record["summary"]["contenders"].items():
        if metrics["mean_step_s"] is not None:
            lines.append(f"{name}: mean step time {_with_spread(metrics['mean_step_s'], _milliseconds)}")
    load = " ".join(f"{value:.2f}" for value in record["machine"]["load_average"])
    return [*lines, f"load average before: {load}"]


def _markdown_row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _median(spread: Spread | None, form: Callable[[float], str]) -> str:
    return "-" if spread is None else form(spread["median"])


def _with_spread(spread: Spread | None, form: Callable[[float], str]) -> str:
    if spread is None:
        return "-"
    return f"{form(spread['median'])} ({form(spread['min'])} .. {form(spread['max'])})"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _ratio(value: float) -> str:
    return f"{value:.2f}"


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms"


def main(argv: list[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description="Writes results between the markers of markdown files."
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS.json")
    parser.add_argument("--write", nargs="+", type=Path, metavar="README.md", help="(default: print)")
    parser.add_argument("--details", action="store_true", help="also a table and the plot of each workload")
    arguments = parser.parse_args(argv)
    records = [load(path) for path in arguments.results]
    if arguments.write is None:
        print(overview(records))
    for path in arguments.write or ():
        write(path, records, arguments.details)
    return 0


if __name__ == "__main__":
    sys.exit(main())
