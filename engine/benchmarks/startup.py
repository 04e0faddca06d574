"""W11: what `%load_ext mlxnb` takes, and how much later the kernel "Python (MLX)" is ready than a stock one.

    python engine/benchmarks/startup.py [--starts 15] [--out DIR]

Each start is a process of its own. The two kernels are started in turn, in the order stock, ours, ours, stock; ready is the
reply to `kernel_info_request`. The paired difference of such a round cancels a drift of the machine; processor time until then is
told too, since it says nearly the same on a machine that others use. Writes startup.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import facts

ARMS = {"stock": "ipykernel_launcher", "mlxnb": "mlxnb.kernel"}
READY_WITHIN_S = 60

# In a kernel that has answered already, as a person types it: the modules of ipykernel and IPython are loaded.
LOAD = "import time as _t; _b = _t.perf_counter(); get_ipython().run_line_magic('load_ext', 'mlxnb'); _ms = (_t.perf_counter() - _b) * 1e3"


def ready_ms(module: str, folder: Path, load: bool = False) -> tuple[float, float, float]:
    """Milliseconds from the start of the process to its first reply, of them processor time, and what LOAD took there afterwards."""
    import psutil
    from jupyter_client.blocking.client import BlockingKernelClient
    from jupyter_client.connect import write_connection_file

    path, _ = write_connection_file(str(folder / "kernel.json"))
    client = BlockingKernelClient(connection_file=path)
    client.load_connection_file()
    client.start_channels()
    client.hb_channel.pause()
    # Bytecode as after any first start, in a folder of its own whatever the caller's settings are.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env |= {"PYTHONPYCACHEPREFIX": str(folder / "bytecode"), "IPYTHONDIR": str(folder / "ipython"), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    command = [sys.executable, "-Xfrozen_modules=off", "-m", module, "-f", path]
    # The request waits in the socket until the kernel is there to read it, so no polling blurs the time.
    client.kernel_info()
    began = time.perf_counter()
    process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        client.get_shell_msg(timeout=READY_WITHIN_S)
        took = (time.perf_counter() - began) * 1e3
        busy = sum(psutil.Process(process.pid).cpu_times()[:2]) * 1e3
        if not load:
            return took, busy, float("nan")
        client.execute(LOAD, user_expressions={"ms": "_ms"})
        content = client.get_shell_msg(timeout=READY_WITHIN_S)["content"]
        return took, busy, float(content["user_expressions"]["ms"]["data"]["text/plain"])
    finally:
        client.stop_channels()
        process.kill()
        process.wait()
        os.unlink(path)


def kernels(starts: int) -> dict[str, Any]:
    """The two kernels in turn. Milliseconds: medians, and the median of the rounds' own differences, of time and of processor time."""
    times: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    differences: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for arm in ARMS:  # bytecode and the file system's cache
            ready_ms(ARMS[arm], Path(scratch))
        for index in range(-(-starts // 2)):
            here: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
            for arm in ("stock", "mlxnb", "mlxnb", "stock"):
                here[arm].append(ready_ms(ARMS[arm], Path(scratch))[:2])
            for arm, found in here.items():
                times[arm] += found
            means = {arm: [statistics.mean(values) for values in zip(*found, strict=True)] for arm, found in here.items()}
            differences.append((means["mlxnb"][0] - means["stock"][0], means["mlxnb"][1] - means["stock"][1]))
            print(f"  round {index + 1}: " + ", ".join(f"{arm} {mean[0]:.0f} ms" for arm, mean in means.items()), flush=True)
    medians = {arm: statistics.median(t for t, _ in found) for arm, found in times.items()}
    return {
        "id": "W11k",
        "title": 'kernel "Python (MLX)" ready, ms more than stock',
        "median_ms": statistics.median(t for t, _ in differences),
        "processor_ms": statistics.median(cpu for _, cpu in differences),
        "medians_ms": medians,
        "runs_ms": {arm: [t for t, _ in found] for arm, found in times.items()},
        "aim_ms": 100,
    }


def load_extension(starts: int) -> dict[str, Any]:
    """`%load_ext mlxnb` in a stock kernel that is up, each in a fresh process. Milliseconds."""
    with tempfile.TemporaryDirectory() as scratch:
        costs = [ready_ms(ARMS["stock"], Path(scratch), load=True)[2] for _ in range(starts + 1)][1:]
    return {"id": "W11", "title": "%load_ext mlxnb, ms", "median_ms": statistics.median(costs), "runs_ms": costs, "aim_ms": 150}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=15, help="starts of each kernel, and loads of the extension")
    parser.add_argument("--out", type=Path, default=Path("benchmark-output"))
    options = parser.parse_args()
    results = [load_extension(options.starts), kernels(options.starts)]
    options.out.mkdir(parents=True, exist_ok=True)
    known = facts("mlxnb", "ipykernel", "ipython")
    (options.out / "startup.json").write_text(json.dumps({"facts": known, "absolute": results}, indent=1))
    for found in results:
        print(f"{found['id']}  {found['title']}: {found['median_ms']:.0f} (aim {found['aim_ms']})")
    medians = ", ".join(f"{arm} {ms:.0f} ms" for arm, ms in results[1]["medians_ms"].items())
    print(f"      medians: {medians}; processor time more: {results[1]['processor_ms']:.0f} ms")


if __name__ == "__main__":
    main()
