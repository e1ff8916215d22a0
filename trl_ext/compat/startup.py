"""What comes first in a process: the clock of a run, messages that mislead on a CPU, and how many cores are used."""

import logging
import os
import sys

import psutil

START = psutil.Process().create_time()  # a run's wall-clock time includes imports, the base policy and validation


def silence_misleading_messages() -> None:
    """Have libraries say nothing of what a CPU does not have, or need; to be called before they are imported."""
    logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)  # Triton is for GPUs
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # a kernel that has no gradient
    if not any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/kfd")) and sys.platform == "linux":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it detected no GPU


def use_all_cores() -> None:
    """Undo the limit of one core that `accelerate launch` sets by OMP_NUM_THREADS=1 if the variable is unset."""
    import torch

    if _launcher_set_threads() and not torch.cuda.is_available():
        cores = psutil.cpu_count(logical=False) or 1
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _launcher_set_threads() -> bool:
    """Whether `accelerate launch` set OMP_NUM_THREADS=1; the user's value would be in the launcher's environment."""
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ  # `accelerate launch` sets it
    if not launched or os.environ.get("OMP_NUM_THREADS") != "1":
        return False
    try:
        launcher = psutil.Process().parent()
        return launcher is None or "OMP_NUM_THREADS" not in launcher.environ()
    except psutil.Error:
        return True


def on_cpu_ranks() -> bool:
    """Whether this is one of several processes without a GPU, which Accelerate does not detect by itself."""
    import torch

    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.accelerator.is_available()
