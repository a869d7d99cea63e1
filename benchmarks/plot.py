"""One picture per result: bars of frames per second with their spread, and our ratio to each rival.

`python -m benchmarks.plot RESULTS.json FILE.png` draws a stored result again.
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.report import Record

COLOURS = {"ours": "#1f6f8b", "ideal": "#b9c4cb", "sync": "#d9a441", "async": "#c8694c"}
LABELS = {"ours": "shmcollect", "ideal": "ideal", "sync": "SyncVectorEnv", "async": "AsyncVectorEnv"}
WIDTH_INCHES, HEIGHT_INCHES, DOTS_PER_INCH = 7.2, 4.2, 120


def draw(record: Record, path: str) -> None:
    """Writes a PNG of one record to `path`."""
    names = record["settings"]["contenders"]
    figure, axes = plt.subplots(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
    for place, name in enumerate(names):
        _bar(axes, place, name, record)
    axes.set_xticks(range(len(names)), [_label(record, name) for name in names])
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
    axes.set_ylabel("frames per second")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    _caption(axes, record)
    figure.savefig(path, dpi=DOTS_PER_INCH)
    plt.close(figure)


def _bar(axes: Axes, place: int, name: str, record: Record) -> None:
    rate = record["summary"]["contenders"][name]["frames_per_s"]
    if rate is None:
        axes.annotate("failed", (place, 0), (0, 5), textcoords="offset points", ha="center", color="firebrick")
        return
    median = rate["median"]
    whiskers: Any = [[median - rate["min"]], [rate["max"] - median]]
    axes.bar(place, median, width=0.62, color=COLOURS[name])
    axes.errorbar(place, median, yerr=whiskers, color="black", capsize=6, linewidth=1)
    points = [
        result["frames_per_s"]
        for result in record["results"]
        if result["contender"] == name and result["status"] == "ok"
    ]
    axes.plot([place + 0.2] * len(points), points, ".", color="black", alpha=0.4, markersize=5)
    axes.annotate(f"{median:,.0f}", (place, rate["max"]), (0, 5), textcoords="offset points", ha="center")


def _label(record: Record, name: str) -> str:
    ratio = record["summary"]["ours_over"].get(name)
    if ratio is None:
        return LABELS[name]
    return f"{LABELS[name]}\nours is {ratio['median']:.2f} × this"


def _caption(axes: Axes, record: Record) -> None:
    settings, machine = record["settings"], record["machine"]
    axes.set_title(f"{settings['workload']}, {settings['num_envs']} envs", loc="left", fontweight="bold", pad=12)
    step_time = record["summary"]["ours_over"]["step_time"]
    if step_time is not None:
        axes.set_title(
            f"ours is {step_time['median']:.2f} × num_envs / measured step time", loc="right", fontsize="small", pad=12
        )
    caption = (
        f"medians of {settings['repeats']} interleaved repeats of {settings['seconds']:g} s;"
        f" whiskers: min and max; points: repeats\n{machine['cpu_model']}, {machine['usable_cores']} usable cores"
    )
    axes.set_xlabel(caption, fontsize="x-small", labelpad=10)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
