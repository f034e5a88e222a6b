"""A process that runs what it is told to in forked children, which send themselves a signal at a chosen moment.

Moments are counted: each file or folder that is opened for writing, made, renamed, brought to the disk, cut or removed
below the run's folder, each batch that is generated and each optimiser step. A file whose data had not been brought to
the disk may lose them with the machine, so SIGKILL at an fsync cuts the file in half before.

Reads jobs as JSON, one a line, and answers each with the exit code and, if the child lived to tell, the moments.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import traceback
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rspo_toys import small_config

from rspo.cli import main as rspo
from rspo.engines import TransformersEngine
from rspo.models.agent import Agent
from rspo.runs.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from rspo.start import open_run

WRITES = {"os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.truncate", "shutil.rmtree"}


class Moments:
    """Counts moments and sends a signal to the process at one of them."""

    def __init__(self, folder: Path, at: int | None, number: int) -> None:
        self.folder = folder
        self.at = at
        self.number = number
        self.names: list[str] = []
        self.is_on = True

    def now(self, name: str, path: Path | None = None) -> None:
        if not self.is_on:
            return
        self.names.append(name)
        if len(self.names) - 1 == self.at:
            if path is not None and path.is_file() and self.number == signal.SIGKILL:
                self.is_on = False
                os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), self.number)

    def install(self) -> None:
        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            is_write = event in WRITES or (event == "open" and str(arguments[1])[:1] in ("w", "a", "x"))
            if is_write and self.is_on and str(arguments[0]).startswith(str(self.folder)):
                self.now(f"{event} {Path(str(arguments[0])).relative_to(self.folder)}")

        sys.addaudithook(hook)
        fsync, generate, step = os.fsync, TransformersEngine.generate, Agent.step

        def counted_fsync(descriptor: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            self.now(f"fsync {path.relative_to(self.folder)}", path)
            fsync(descriptor)

        def counted_generate(engine: TransformersEngine, prompts: Any) -> Any:
            self.now("generate")
            return generate(engine, prompts)

        def counted_step(agent: Agent) -> None:
            self.now("optimizer step")
            step(agent)

        os.fsync, TransformersEngine.generate, Agent.step = (  # type: ignore[method-assign]
            counted_fsync,
            counted_generate,
            counted_step,
        )


@lru_cache
def loaded(path: str) -> Checkpoint:
    return load_checkpoint(Path(path), small_config(), has_critic=False)


def child(job: dict[str, Any], answer: int) -> int:
    """Do a job: "train" a run in `folder` with `config` flags of `method`, `resume`d or not; "save" the checkpoint
    `source` at `target` below `folder`; or run "rspo" with `arguments`. `at`: the moment of the signal `number`.
    `file_limit`: bytes that a file may have."""
    folder = Path(job["folder"])
    moments = Moments(folder, job.get("at"), job.get("number", signal.SIGKILL))
    moments.install()
    if job.get("file_limit"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_limit"], job["file_limit"]))
    code = 0
    if job["do"] == "train":
        config = small_config(*job["config"], method=job["method"])
        trainer = open_run(config, folder, resume=job["resume"], progress=False)
        trainer.train()
        trainer.close()
    elif job["do"] == "save":
        checkpoint = loaded(job["source"])
        save_checkpoint(folder / job["target"], checkpoint.agent, checkpoint.state)
    else:
        code = rspo(job["arguments"])
    os.write(answer, json.dumps(moments.names).encode())
    return code


def main() -> None:
    # Started in the background of a shell, this process and its children would be deaf to SIGINT, as they should.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    import_module("rspo.runs.plots")  # for all children
    for line in sys.stdin:
        job = json.loads(line)
        if job["do"] == "save":
            loaded(job["source"])  # here once, and not in each child
        readable, writable = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(readable)
                with open(job["output"], "w", encoding="utf-8") as file:
                    os.dup2(file.fileno(), 1)
                    os.dup2(file.fileno(), 2)
                os._exit(child(job, writable))
            except BaseException:
                traceback.print_exc()
                os._exit(99)
        os.close(writable)
        with os.fdopen(readable, "rb") as pipe:
            moments = pipe.read()
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        print(json.dumps({"code": code, "moments": json.loads(moments or b"[]")}), flush=True)


if __name__ == "__main__":
    main()
