"""A process that makes a run with reporters, breaks it off past its checkpoint and goes on with it.

Arguments: the run's folder, a start policy's folder, and settings. Prints what Trackio has of its project as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rspo_toys import small_config

from rspo.config.files import apply_flags
from rspo.start import open_run

VOID = {"kind": "update", "step": 3, "success": 0.5}
"""A record that was reported after the checkpoint."""


def main() -> None:
    folder, start, *flags = sys.argv[1:]
    config = small_config(f"policy.path={start}", "env.name=rspo_toys:ParityEnv", "run.steps=4", *flags)
    for resume, steps in ((False, 2), (True, 4)):
        run = open_run(apply_flags(config, [f"run.steps={steps}"]), Path(folder), resume=resume, progress=False)
        run.train()
        if not resume:
            for reporter in run.books.tracker.reporters:
                reporter.record(VOID)
        run.close()

    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    runs = {run.id: SQLiteStorage.get_logs("rspo", run.name, run_id=run.id) for run in trackio.Api().runs("rspo")}
    print("\n" + json.dumps(runs))


if __name__ == "__main__":
    main()
