"""make gpu-check: on a CUDA machine, the test suite on the device, then the suites `kernels` and `trainer`.

Everything that they leave goes into one flat folder, bench/results/<device>/:

    gpu_check.txt    device, driver, versions, and how each stage ended
    tests.txt        pytest's output (its end, where it is long)
    kernels.json, kernels.md, kernels.png, trainer.json, trainer.md, trainer.png: the suites' reports

Each stage has a time limit and a process of its own; it is first asked to stop, so that tests and kernels still write
what they found. A stage that fails or runs out of time does not keep the next from running; the exit status is 1 then.
Nothing is installed or downloaded: the Python that runs this needs torch with CUDA, triton, transformers, and for the
tests pytest and hypothesis.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from .report import RESULTS, environment, folder_name, machine

ROOT = Path(__file__).parent.parent
FOR_TESTS = ("pytest", "hypothesis")
GRACE = 30.0
"""Seconds between being asked to stop and being killed."""
TAIL = 200_000
"""Characters of a stage's output that are kept."""


@dataclass(frozen=True)
class Stage:
    """What is run, for how many seconds at most, and the file for its output (None: it goes to the terminal only)."""

    name: str
    command: tuple[str, ...]
    limit: float
    log: str | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    import torch

    if not torch.cuda.is_available():
        built = "" if torch.version.cuda or torch.version.hip else f" (torch {torch.__version__} is built without CUDA)"
        print(f"gpu-check needs a CUDA device, and {sys.executable} sees none{built}.", file=sys.stderr)
        print("Give another Python with PYTHON=..., or run `make test` and `make bench` on this CPU.", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    folder = (options.out or RESULTS / folder_name(device)).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"gpu-check on {machine(device)}; everything goes to {folder}", flush=True)
    facts, outcomes = environment(device), {}
    if missing := missing_packages():
        names = " ".join(missing)
        print(f"The tests are left out: {sys.executable} has no {' and no '.join(missing)}.", flush=True)
        print(f"For the next time: {sys.executable} -m pip install {names} pytest-xdist", flush=True)
        outcomes["tests"] = f"not run: needs {names}"
    planned = stages(options, folder, with_tests=not missing)
    for stage in planned:
        for file in folder.glob(f"{stage.name}.*"):
            file.unlink()  # an earlier run's must not pass for this one's
    outcomes |= {stage.name: "not run: gpu-check was stopped before" for stage in planned}
    write(folder, facts, outcomes)
    for stage in planned:
        outcomes[stage.name] = run(stage, folder)
        write(folder, facts, outcomes)
    print(summary(facts, outcomes))
    return 0 if all(outcome.startswith("passed") for outcome in outcomes.values()) else 1


def stages(options: argparse.Namespace, folder: Path, *, with_tests: bool) -> list[Stage]:
    """What will be run, in order."""
    bench = (sys.executable, "-m", "bench")
    where = ("--device", "cuda", "--out", str(folder))
    found = [
        Stage("kernels", (*bench, "kernels", *where), options.kernels_seconds),
        Stage("trainer", (*bench, "trainer", *where), options.trainer_seconds),
    ]
    if with_tests:
        # Workers compile kernels side by side. A limit on failures leaves the benchmark its time and the log readable.
        parallel = ("-n", str(min(8, os.cpu_count() or 1))) if find_spec("xdist") else ()
        pytest = (sys.executable, "-m", "pytest", "-q", "--maxfail=25", "--durations=15", *parallel)
        pytest = (*pytest, "--continue-on-collection-errors", "--tb=short")
        pytest = (*pytest, "-p", "no:cacheprovider", *options.tests)
        found.insert(0, Stage("tests", pytest, options.tests_seconds, "tests.txt"))
    return [stage for stage in found if stage.limit > 0]


def missing_packages() -> list[str]:
    """Of what the tests need."""
    return [name for name in FOR_TESTS if find_spec(name) is None]


def run(stage: Stage, folder: Path) -> str:
    """Run a stage; how it ended, in words that begin with "passed" if it did."""
    print(f"\n== {stage.name}, at most {stage.limit:.0f} s: {' '.join(stage.command)}", flush=True)
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    variables.pop("TRITON_INTERPRET", None)  # the kernels themselves are to run
    if stage.name == "tests":
        variables.setdefault("OMP_NUM_THREADS", "1")
    began = time.perf_counter()
    output = folder / stage.log if stage.log else None
    with open(output or os.devnull, "wb") as file:
        with _heeding_interrupts():
            process = subprocess.Popen(
                stage.command, cwd=ROOT, env=variables, start_new_session=True,
                stdout=file if output else None, stderr=subprocess.STDOUT if output else None,
            )  # fmt: skip
        late = _wait(process, stage.limit)
    seconds = time.perf_counter() - began
    if output:
        text = output.read_text(encoding="utf-8", errors="replace")
        output.write_text(text[-TAIL:], encoding="utf-8")
        print("\n".join(text.splitlines()[-40:]), flush=True)
    ended = "passed" if process.returncode == 0 else f"failed (exit status {process.returncode})"
    return f"{'stopped at its time limit' if late else ended} after {seconds:.0f} s"


@contextmanager
def _heeding_interrupts() -> Iterator[None]:
    """Processes started in the block can be interrupted, also where this one was started in the background of a shell,
    which makes it and its children deaf to SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _wait(process: subprocess.Popen[bytes], limit: float) -> bool:
    """Wait for a process; True if it had to be stopped. No child of it is left behind."""
    late = False
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        late = True
        # As a Ctrl-C to the stage itself: pytest then still writes its report, and stops its workers.
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return late


def summary(facts: Mapping[str, object], outcomes: Mapping[str, str]) -> str:
    """Machine, versions and outcomes, a line each."""
    versions = facts["versions"]
    assert isinstance(versions, dict)
    lines = {"machine": facts["machine"], "date": facts["date"], "python": facts["python"], **versions, **outcomes}
    width = max(len(name) for name in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


def write(folder: Path, facts: Mapping[str, object], outcomes: Mapping[str, str]) -> None:
    """The summary and what the driver says, as they are so far."""
    (folder / "gpu_check.txt").write_text(f"{summary(facts, outcomes)}\n\n{nvidia_smi()}\n", encoding="utf-8")


def nvidia_smi() -> str:
    """What the driver says of the devices."""
    try:
        return subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=30, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi: {error}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: bench/results/<device>")
    for name, seconds in (("tests", 420), ("kernels", 450), ("trainer", 180)):
        parser.add_argument(
            f"--{name}-seconds", type=float, default=seconds, metavar="S", help="0: leave it out; default: %(default)s"
        )
    parser.add_argument("tests", nargs="*", metavar="PYTEST", help="files and options for pytest; default: all tests")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
