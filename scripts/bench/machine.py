"""What kind of machine a benchmark ran on, and how busy it was."""

import os
import platform
from pathlib import Path

BF16_FLAGS = ("avx512_bf16", "amx_bf16")


def machine() -> dict[str, object]:
    """The processor, its instructions for bfloat16, and the load before the benchmark."""
    path = Path("/proc/cpuinfo")
    info = dict(
        [part.strip() for part in line.split(":", 1)]
        for line in (path.read_text() if path.exists() else "").splitlines()
        if ":" in line
    )
    flags = info.get("flags", "").split()
    return {
        "processor": info.get("model name", platform.processor()),
        "cores": os.cpu_count(),
        "bf16": [flag for flag in BF16_FLAGS if flag in flags],
        "load_before": round(os.getloadavg()[0], 2),
    }
