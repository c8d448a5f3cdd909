"""A worker without a model, for tests of the engine: what it does is told by the job's class.

It speaks the same protocol as the real one and imports no torch.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from app.engine.worker import loop

CRASH, HANG_LOADING, FAIL, DEAF, EXIT, SLOW = 1, 2, 3, 4, 5, 6
STEP_S, SLOW_STEP_S = 0.02, 0.4


class StubSession:
    def __init__(self, spec: Any) -> None:
        self.spec = spec
        self.ready = False
        time.sleep(float(os.environ.get("STUB_LOAD_S", "0.05")))

    def prepare(self, job: Any, report: Any, check: Any) -> None:
        if self.spec.backend == "blr-torch" and job.class_id == HANG_LOADING:
            time.sleep(1000)
        if not self.ready and self.spec.backend == "compiled":
            report("compiling", expected_s=1.0)
            time.sleep(float(os.environ.get("STUB_COMPILE_S", "0")))
        report("warming")
        time.sleep(float(os.environ.get("STUB_WARM_S", "0.02")))
        check()
        self.ready = True

    def run(self, job: Any, report: Any, check: Any) -> dict[str, Any]:
        self.prepare(job, report, check)
        report("ready", load_s=0.1, compile_s=0.0, warmup_s=0.1, weights_bytes=4, parameters=1)
        step_s = SLOW_STEP_S if job.class_id == SLOW else STEP_S
        for index in range(1, job.steps + 1):
            if not (self.spec.backend == "blr-torch" and job.class_id == DEAF):
                check()
            time.sleep(step_s)
            report("step", index=index, total=job.steps, seconds=step_s, memory_mib=1.0)
            if self.spec.backend == "blr-torch" and index == 3:
                if job.class_id == CRASH:
                    os.kill(os.getpid(), signal.SIGKILL)
                if job.class_id == FAIL:
                    raise MemoryError("tried to allocate 5 GiB")
                if job.class_id == EXIT:
                    print("something is wrong", file=__import__("sys").stderr, flush=True)
                    os._exit(3)
        report("decoding")
        return {"images": [b""], "top": None, "report": {"pid": os.getpid()}}


def main() -> None:
    loop._open = StubSession  # type: ignore[assignment]
    loop.main()
