"""Where and when a benchmark ran."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import torch


def describe() -> dict[str, str | int]:
    """Processor, cores, load, torch, GPU and date."""
    info = Path("/proc/cpuinfo")
    names = (
        [x.split(":", 1)[1].strip() for x in info.read_text().splitlines() if x.startswith("model name")]
        if info.exists()
        else []
    )
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else -1,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "date": datetime.now(UTC).date().isoformat(),
    }
