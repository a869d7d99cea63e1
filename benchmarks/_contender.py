"""`python -m benchmarks._contender TASK`: one run of one contender in a process tree of its own.

TASK is a `Task` as JSON; the answer is a `Measurement` as one line of JSON, the last line of the output.
"""

import dataclasses
import importlib
import json
import sys

import torch

from benchmarks.measuring import Task

MODULES = {"ours": "ours", "ideal": "ideal", "sync": "vector", "async": "vector"}


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    measurement = importlib.import_module(f"benchmarks.{MODULES[task.contender]}").run(task)
    print(json.dumps(dataclasses.asdict(measurement)))


if __name__ == "__main__":
    main()
