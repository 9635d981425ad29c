"""``--run-dir D``: a process in the place of a training, for the contract of executors. ``behave`` in run.json:

end | fail (exit code 1) | die (kill -9 of itself) | wait (until SIGTERM, then it ends by itself) | stubborn (ignores
SIGTERM, and has a child that does so too)
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

directory = Path(sys.argv[sys.argv.index("--run-dir") + 1])
run = json.loads((directory / "run.json").read_text())
behave = run["behave"]
LIMIT_SECONDS = 600


def end(code: int) -> None:
    (directory / "exit.json").write_text(json.dumps({"code": code, "attempt": run["attempt"]}))
    print("the last line", flush=True)
    sys.exit(code)


def stop(number: int, frame: object) -> None:
    print("stopped politely", flush=True)
    end(130)


if behave == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", child])
else:
    signal.signal(signal.SIGTERM, stop)
print(f"attempt {run['attempt']} of {os.environ['EVENKEEL_RUN_ID']} begins", flush=True)
(directory / "begun").touch()
if behave == "die":
    os.kill(os.getpid(), signal.SIGKILL)
if behave in ("wait", "stubborn"):
    time.sleep(LIMIT_SECONDS)
end(1 if behave == "fail" else 0)
