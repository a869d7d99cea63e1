"""The command line: ``python -m shmcollect run ENV_ID`` collects from an env with a default policy, and says how fast.

Imports what it needs when it needs it: ``--help`` and a mistyped option must not wait for torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from shmcollect.errors import ConfigError, ShmcollectError

if TYPE_CHECKING:
    import gymnasium as gym
    from gymnasium.envs.registration import EnvSpec

    from shmcollect.batch import Batch

POLICIES = ("auto", "mlp", "cnn", "random")  # those of policies.py, which imports torch
FAILED, USAGE = 1, 2  # exit codes; a signal gives 128 + its number
_LONGEST_ROLLOUT = 128

_EXAMPLES = """examples:
  python -m shmcollect run CartPole-v1
  python -m shmcollect run ale_py:ALE/Pong-v5 --env-kwargs '{"frameskip": 1}' \\
      --wrap gymnasium.wrappers:AtariPreprocessing --policy cnn --num-envs 16
  python -m shmcollect run minigrid:MiniGrid-Empty-5x5-v0 --drop-obs mission --frames 200_000
  python -m shmcollect run Pendulum-v1 --sync --seed 1 --json result.json
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: Its arguments; default: those of the process.

    Returns:
        The exit code: 0, 1 for a failure, 2 for arguments that cannot work; 128 and its number for a signal, which is
        130 after Ctrl-C and 143 after SIGTERM.
    """
    arguments = _parser().parse_args(argv)
    if not sys.flags.safe_path and not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())  # as with python -m; a console script has its own folder there
    signals = _Signals()
    try:
        with signals, warnings.catch_warnings():
            warnings.showwarning = _show_warning
            _run(arguments, signals)
    except _Interrupted as interrupt:
        _say(f"interrupted by {signal.Signals(interrupt.number).name}", arguments.traceback)
        return 128 + interrupt.number
    except ConfigError as error:
        _say(str(error), arguments.traceback)
        return USAGE
    except Exception as error:
        is_ours = isinstance(error, ShmcollectError)
        _say(str(error) if is_ours else f"{type(error).__name__}: {error}", arguments.traceback)
        return FAILED
    return 0


def _say(text: str, with_traceback: bool = False) -> None:
    """One line on stderr: the text without the traceback of a child that may follow it, unless asked for."""
    if with_traceback:
        traceback.print_exc()
    print("shmcollect:", " ".join(text.partition("\n\n")[0].split()), file=sys.stderr, flush=True)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """In the place of `warnings.showwarning`."""
    _say(f"warning: {message}")


# ---- arguments


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, as for every other error, rather than the whole usage."""
        self.exit(USAGE, f"shmcollect: {message} ({self.prog} --help says more)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m shmcollect",
        description="Collect reinforcement-learning experience from Gymnasium envs through shared memory.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="collect from an env with a default policy and report the speed",
        description="Steps many copies of an env with a default policy as fast as this machine can,\n"
        "and reports how fast that was. Numbers may be written with underscores.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("env_id", metavar="ENV_ID", help="id of a Gymnasium env, or module:id to import a module first")
    run.add_argument("--num-envs", type=_positive, default=64, metavar="N", help="copies of the env (default: 64)")
    run.add_argument(
        "--num-workers", type=_positive, metavar="N", help="processes that step them (default: usable cores - 1)"
    )
    run.add_argument(
        "--frames",
        type=_positive,
        default=1_000_000,
        metavar="N",
        help="steps to collect, of all envs together, rounded up to whole rollouts (default: 1_000_000)",
    )
    run.add_argument(
        "--frames-per-batch",
        type=_positive,
        metavar="N",
        help=f"steps of a batch (default: a rollout of up to {_LONGEST_ROLLOUT} steps of every env)",
    )
    run.add_argument(
        "--rollout-length",
        type=_positive,
        metavar="T",
        help="consecutive steps of one env; a divisor of --frames-per-batch (default: the longest that fits)",
    )
    run.add_argument(
        "--sync",
        action="store_true",
        help="every batch holds equally many rollouts of every env; envs wait for each other",
    )
    run.add_argument(
        "--policy",
        choices=POLICIES,
        default="auto",
        help="mlp: two layers on the flat observation; cnn: the Nature network; random: no network; "
        "auto (default): cnn for images, else mlp",
    )
    run.add_argument(
        "--env-kwargs",
        type=_json_object,
        default={},
        metavar="JSON",
        help="arguments of the env, such as '{\"gravity\": 9}'",
    )
    run.add_argument(
        "--wrap",
        action="append",
        default=[],
        metavar="MODULE:FUNCTION",
        help="wrap every env with function(env); repeat it, the first is the innermost",
    )
    run.add_argument(
        "--drop-obs",
        action="append",
        default=[],
        metavar="NAME",
        help="leave out an entry of a Dict observation; repeatable",
    )
    run.add_argument("--seed", type=_not_negative, metavar="N", help="seed of envs and policy (default: a new one)")
    run.add_argument(
        "--json", metavar="FILE", help="write the results to a file too; - prints them instead of the table"
    )
    run.add_argument("--traceback", action="store_true", help="show tracebacks of errors")
    return parser


def _positive(text: str) -> int:
    return _integer(text, 1)


def _not_negative(text: str) -> int:
    return _integer(text, 0)


def _integer(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"expected an integer >= {least}, got {text!r}")
    return number


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value


# ---- what is run


@dataclass(frozen=True)
class WrappedEnv:
    """Makes an env in a worker and wraps it.

    Attributes:
        spec: What `gymnasium.make` makes.
        wrappers: Each called with the env so far, in order.
    """

    spec: EnvSpec
    wrappers: tuple[Callable[[Any], Any], ...]

    @property
    def id(self) -> str:
        """The env's id."""
        return self.spec.id

    def __call__(self) -> gym.Env[Any, Any]:
        """A new env."""
        import gymnasium as gym

        env = gym.make(self.spec)
        for wrapper in self.wrappers:
            env = wrapper(env)
        return env


def _find_wrapper(text: str) -> Callable[[Any], Any]:
    from shmcollect.envs import import_module

    name = f"--wrap {text}"
    module, _, path = text.partition(":")
    if not (module and path):
        raise ConfigError(f"{name}: expected module:function")
    try:
        wrapper = attrgetter(path)(import_module(module, name))
    except AttributeError as error:
        raise ConfigError(f"{name}: {error}") from error
    if not callable(wrapper):
        raise ConfigError(f"{name}: expected something to call with an env, got {wrapper!r}")
    found: Callable[[Any], Any] = wrapper
    return found


def _frames_per_batch(arguments: argparse.Namespace) -> int:
    if arguments.frames_per_batch is not None:
        return int(arguments.frames_per_batch)
    share = max(1, arguments.frames // arguments.num_envs)
    return int(arguments.num_envs * (arguments.rollout_length or min(_LONGEST_ROLLOUT, share)))


def _check_json_path(path: str | None) -> None:
    """Finds out now what would be a pity to find out after the run."""
    if path is None or path == "-":
        return
    folder = Path(path).parent
    if not folder.is_dir() or Path(path).is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"--json {path}: expected a file in a folder that can be written to")


def _run(arguments: argparse.Namespace, signals: _Signals) -> None:
    _check_json_path(arguments.json)
    from shmcollect.envs import find_spec

    spec = find_spec(arguments.env_id, f"ENV_ID {arguments.env_id}")
    spec = replace(spec, kwargs={**spec.kwargs, **arguments.env_kwargs})
    wrappers = tuple(_find_wrapper(text) for text in arguments.wrap)
    with _progress(arguments.frames) as show:
        tally = _collect(arguments, WrappedEnv(spec, wrappers) if wrappers else spec, signals, show)
    _report(arguments, tally.results())


def _collect(
    arguments: argparse.Namespace,
    create_env_fn: WrappedEnv | EnvSpec,
    signals: _Signals,
    show: Callable[[_Tally], None],
) -> _Tally:
    from shmcollect.collector import AsyncBatchedCollector
    from shmcollect.policies import make_policy

    with AsyncBatchedCollector(
        create_env_fn,
        policy_factory=partial(make_policy, arguments.policy),
        num_envs=arguments.num_envs,
        num_workers=arguments.num_workers,
        frames_per_batch=_frames_per_batch(arguments),
        rollout_length=arguments.rollout_length,
        total_frames=arguments.frames,
        sync=arguments.sync,
        seed=arguments.seed,
        drop_obs=tuple(arguments.drop_obs),
    ) as collector:
        try:
            tally = _Tally()
            show(tally)
            for batch in collector:
                signals.check()
                tally.add(batch)
                show(tally)
            tally.stats = collector.stats()
        finally:
            signals.hold()
    return tally


class _Interrupted(BaseException):
    """A signal asked the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Signals:
    """Turns the first SIGINT, SIGTERM or SIGHUP into `_Interrupted`; ignores more of them, so that cleaning up ends."""

    def __init__(self) -> None:
        self._received: int | None = None
        self._held = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup, or in a shell's background
                self._before[number] = signal.signal(number, self._handle)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # Once a signal has come the process is about to end: another one must not kill it on its last steps.
            signal.signal(number, handler if self._received is None else signal.SIG_IGN)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._received is None and not self._held:
            self._received = number
            raise _Interrupted(number)

    def check(self) -> None:
        """Raises again what was raised where Python drops exceptions, such as in a finalizer."""
        if self._received is not None:
            raise _Interrupted(self._received)

    def hold(self) -> None:
        """From now on signals come too late: everything is about to end anyway."""
        self._held = True


# ---- what is shown


class _Tally:
    """What has been collected since the collector was ready.

    Attributes:
        frames: Steps of all envs.
        seconds: Until the last batch.
        stats: Those of the collector, at the end.
    """

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self.frames = 0
        self.seconds = 0.0
        self.stats: dict[str, Any] = {}
        self._returns: list[float] = []
        self._lengths: list[float] = []

    def add(self, batch: Batch) -> None:
        self.seconds = time.monotonic() - self._started_s
        self.frames += batch.num_frames
        self._returns += [episode.episode_return for episode in batch.episodes]
        self._lengths += [episode.length for episode in batch.episodes]

    @property
    def frames_per_s(self) -> float:
        return self.frames / self.seconds if self.seconds else 0.0

    def results(self) -> dict[str, Any]:
        """The results as JSON can hold them; None where there is no number."""
        workers = self.stats["workers"]
        return {
            "frames": self.frames,
            "seconds": self.seconds,
            "frames_per_s": self.frames_per_s,
            "mean_inference_batch": self.stats["mean_inference_batch"],
            "episodes": len(self._returns),
            "mean_return": _mean(self._returns),
            "mean_length": _mean(self._lengths),
            "roles": {
                "env workers": _shares(workers),
                "inference server": _shares([self.stats["inference"]]),
                "learner": _shares([self.stats["learner"]]),
            },
        }


def _mean(values: Sequence[float]) -> float | None:
    mean = sum(values) / len(values) if values else math.nan
    return mean if math.isfinite(mean) else None


def _shares(roles: Sequence[Mapping[str, float]]) -> dict[str, float | None]:
    """The shares of their time that processes of one role worked and waited."""
    worked_s, waited_s = (sum(role[key] for role in roles) for key in ("busy_s", "waiting_s"))
    total_s = worked_s + waited_s
    return {"worked": worked_s / total_s if total_s else None, "waited": waited_s / total_s if total_s else None}


@contextlib.contextmanager
def _progress(frames: int) -> Iterator[Callable[[_Tally], None]]:
    """A live bar on stderr, if that is a terminal; gives what updates it."""
    if not sys.stderr.isatty():
        yield lambda tally: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.completed:,} of {task.total:,} frames"),
        progress.BarColumn(),
        progress.TextColumn("{task.fields[speed]:,.0f} frames/s"),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", start=False, total=frames, speed=0.0)

        def show(tally: _Tally) -> None:
            bar.start_task(task)
            bar.update(task, completed=min(tally.frames, frames), speed=tally.frames_per_s)

        yield show


def _report(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    text = json.dumps(results, indent=2, allow_nan=False)
    if arguments.json == "-":
        print(text)
        return
    if arguments.json is not None:
        Path(arguments.json).write_text(text + "\n")
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{arguments.env_id}, {arguments.num_envs} envs", box=box.SIMPLE, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in _rows(results):
        table.add_row(name, value)
    Console().print(table)


def _rows(results: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The table, as text."""
    formats = {
        "frames": ",d",
        "seconds": ",.2f",
        "frames_per_s": ",.0f",
        "mean_inference_batch": ",.1f",
        "episodes": ",d",
        "mean_return": ",.2f",
        "mean_length": ",.1f",
    }
    for key, form in formats.items():
        name = "frames/s" if key == "frames_per_s" else key.replace("_", " ")
        yield name, "-" if results[key] is None else format(results[key], form)
    for role, shares in results["roles"].items():
        worked, waited = ("-" if share is None else f"{share:.0%}" for share in shares.values())
        yield role, f"worked {worked}, waited {waited}"
