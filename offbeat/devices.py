"""Where a worker computes. Imports torch, so the control plane never imports this."""

import torch


def device_of(setting: str) -> torch.device:
    """The device that the setting names; `auto` takes CUDA where there is one."""
    if setting == "auto":
        setting = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(setting)
