"""`python -m benchmarks.throughput`: frames per second of the collector and of its rivals, on one workload.

The contenders take turns, so that a change of the machine's mood meets them all; each run has a process tree of its
own; and each claim is checked against the counters that the envs keep.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks import counters, machine
from benchmarks.measuring import Measurement, Task
from benchmarks.report import summarize, table
from benchmarks.workloads import WORKLOADS

RIVALS = ("ideal", "sync", "async")
# One thread for torch, and none that BLAS or OpenMP start on their own.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
STARTING_SECONDS = 120
ENDING_SECONDS = 10


class ContenderError(Exception):
    """A run that gives no number, and why."""


def run_contender(task: Task) -> Measurement:
    """Runs one contender to its end.

    Raises:
        ContenderError: it failed, took too long, or left processes behind.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks._contender", json.dumps(dataclasses.asdict(task))],
            stdout=output,
            stderr=errors,
            env=os.environ | ONE_THREAD,
            start_new_session=True,
        )
        limit = STARTING_SECONDS + 3 * (task.warmup + task.seconds)
        failure = None
        try:
            if process.wait(limit) != 0:
                failure = f"exit status {process.returncode}"
            elif left_behind := _await_end(process.pid):
                failure = f"left processes behind: {', '.join(left_behind)}"
        except subprocess.TimeoutExpired:
            failure = f"not finished after {limit:.0f} s"
        finally:
            if _alive(process.pid):
                _end_group(process.pid)
            process.wait()
        if failure is not None:
            errors.seek(0)
            raise ContenderError(f"{failure}\n{errors.read()}".strip())
        output.seek(0)
        return Measurement(**json.loads(output.read().splitlines()[-1]))


def _await_end(group: int) -> list[str]:
    """Waits for the processes of a group to end; returns those that don't."""
    deadline = time.monotonic() + ENDING_SECONDS
    while (alive := _alive(group)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive


def _alive(group: int) -> list[str]:
    alive = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(f"{process.pid} {process.name()}")
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue  # It ended while we looked.
    return alive


def _end_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # It ended by itself.
        os.killpg(group, signal.SIGKILL)


def check_counts(measurement: Measurement, counted: NDArray[np.int64]) -> str | None:
    """Compares what a contender claims with what the envs counted; the text of the first mismatch, or None.

    Nothing may be delivered that no env did, and no env may have done more than was delivered and can be in flight.
    """
    for index, (delivered, steps) in enumerate(zip(measurement.delivered, counted, strict=True)):
        if not delivered <= steps <= delivered + measurement.surplus:
            return (
                f"env {index} counted {steps} steps, expected {delivered} (delivered)"
                f" to {delivered + measurement.surplus} (with the most there can be in flight)"
            )
    return None


def run_once(task: Task, repeat: int) -> dict[str, Any]:
    """One run as a result: a status, the failure if there is one, and the numbers if there are any."""
    result: dict[str, Any] = {
        "contender": task.contender,
        "repeat": repeat,
        "load_average": os.getloadavg()[0],
        "status": "failed",
        "failure": None,
    }
    counters.create(task.counters_path, task.num_envs)
    try:
        measurement = run_contender(task)
    except ContenderError as error:
        return result | {"failure": str(error)}
    steps, step_ns = counters.read(task.counters_path)
    failure = check_counts(measurement, steps)
    numbers = dataclasses.asdict(measurement)
    delivered = numbers.pop("delivered")
    return (
        result
        | numbers
        | {
            "status": "ok" if failure is None else "failed",
            "failure": failure,
            "delivered": sum(delivered),
            "counted": int(steps.sum()),
            "frames_per_s": measurement.frames / measurement.seconds,
            "frames_per_cpu_s": measurement.frames / measurement.cpu_seconds,
            "mean_step_s": float(step_ns.sum() / steps.sum()) / 1e9 if step_ns.any() else None,
        }
    )


def run_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """All runs of all contenders, in turn."""
    settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "plot")}
    settings["contenders"] = ["ours", *settings.pop("against")]
    described = machine.describe()
    print(machine.summary(described), file=sys.stderr)
    results = []
    with tempfile.TemporaryDirectory(prefix="shmcollect-benchmark-", dir="/dev/shm") as folder:
        for repeat in range(arguments.repeats):
            for contender in settings["contenders"]:
                result = run_once(_task(arguments, contender, repeat, f"{folder}/counters"), repeat)
                print(_progress(result), file=sys.stderr, flush=True)
                results.append(result)
    return {
        "machine": described,
        "settings": settings,
        "summary": summarize(settings, results),
        "results": results,
        "plot": arguments.plot and os.path.basename(arguments.plot),
    }


def _task(arguments: argparse.Namespace, contender: str, repeat: int, counters_path: str) -> Task:
    return Task(
        contender=contender,
        workload=arguments.workload,
        num_envs=arguments.num_envs,
        num_workers=arguments.num_workers,
        workers_per_process=arguments.workers_per_process,
        seconds=arguments.seconds,
        warmup=arguments.warmup,
        rollout_length=arguments.rollout_length,
        min_batch_size=arguments.min_batch_size,
        max_batch_size=arguments.max_batch_size,
        seed=1000 * repeat,
        counters_path=counters_path,
    )


def _progress(result: dict[str, Any]) -> str:
    head = f"repeat {result['repeat']}  {result['contender']:6}"
    if "frames_per_s" in result:
        counts = f"delivered {result['delivered']}, counted {result['counted']}"
        head += f"{result['frames_per_s']:12,.0f} frames/s  ({counts})"
    return head if result["status"] == "ok" else f"{head}  FAILED: {result['failure']}"


def _rivals(text: str) -> list[str]:
    names = text.split(",")
    unknown = sorted(set(names) - set(RIVALS))
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; known are {', '.join(RIVALS)}")
    return names


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.throughput", description="Frames per second of the collector and of its rivals."
    )
    parser.add_argument("--workload", choices=list(WORKLOADS), required=True)
    parser.add_argument("--num-envs", type=_positive, required=True)
    parser.add_argument("--num-workers", type=_positive, help="env workers of the collector (default: its own choice)")
    parser.add_argument("--workers-per-process", type=_positive, help="of the collector (default: its own)")
    parser.add_argument("--min-batch-size", type=_positive, help="of the collector (default: its own)")
    parser.add_argument("--max-batch-size", type=_positive, help="of the collector (default: its own)")
    parser.add_argument("--rollout-length", type=_positive, help="T of all contenders (default: the workload's)")
    parser.add_argument("--against", type=_rivals, default=list(RIVALS), metavar=",".join(RIVALS))
    parser.add_argument("--repeats", type=_positive, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a measurement, at least")
    parser.add_argument("--warmup", type=float, default=1.0, help="seconds discarded after the first batch")
    parser.add_argument("--json", metavar="FILE", help="write settings, machine and all results")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the summary")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command; 1 if any run failed."""
    arguments = _parser().parse_args(argv)
    if arguments.rollout_length is None:
        arguments.rollout_length = WORKLOADS[arguments.workload].rollout_length
    record = run_all(arguments)
    print(table(record))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n")
    if arguments.plot:
        from benchmarks.plot import draw

        draw(record, arguments.plot)
    return 0 if all(result["status"] == "ok" for result in record["results"]) else 1


if __name__ == "__main__":
    sys.exit(main())
