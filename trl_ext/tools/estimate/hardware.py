"""What GPUs can do, by their vendor's data sheets: the ceilings of the roofline.

Peaks are dense (the sheets' figures "with sparsity" halved), bandwidths are of one GPU, and the interconnect's is per
direction, half of what the sheets add up. Memory is what CUDA reports as the total, which is a little less than the
sheet's, as in PyTorch's messages of an allocation that failed ("has a total capacity of 79.11 GiB").

| name | peaks of bf16, tf32, fp32; memory bandwidth; interconnect |
|---|---|
| h100 | NVIDIA H100 Tensor Core GPU data sheet, SXM: 989.4, 494.7, 67 TFLOPS; 3.35 TB/s; NVLink 900 GB/s |
| h100-pcie | the same sheet, PCIe: 756, 378, 51 TFLOPS; 2 TB/s; PCIe Gen5 128 GB/s |
| h200 | NVIDIA H200 Tensor Core GPU data sheet, SXM: the H100's peaks; 4.8 TB/s; NVLink 900 GB/s |
| a100-80gb | NVIDIA A100 Tensor Core GPU data sheet, SXM: 312, 156, 19.5 TFLOPS; 2,039 GB/s; NVLink 600 GB/s |
| a100-40gb | the same sheet, SXM: 1,555 GB/s |
| l40s | NVIDIA L40S data sheet: 362.05, 183, 91.6 TFLOPS; 864 GB/s; PCIe Gen4 64 GB/s |
| l4 | NVIDIA L4 data sheet: 121, 60, 30.3 TFLOPS; 300 GB/s; PCIe Gen4 64 GB/s |
| t4 | NVIDIA T4 data sheet: 65 (float16, it has no bfloat16), 8.1 (it has no tf32), 8.1 TFLOPS; 320 GB/s; 32 GB/s |
| rtx-4060 | GeForce RTX 4060 specifications: 30.2 (twice fp32, as the 4090), 15.1, 15.1 TFLOPS; 272 GB/s; 32 GB/s |
| rtx-4080 | NVIDIA Ada architecture whitepaper, appendix A: 97.5, 48.7, 48.7 TFLOPS; 716.8 GB/s; PCIe Gen4 64 GB/s |
| rtx-4090 | NVIDIA Ada architecture whitepaper, appendix A: 165.2, 82.6, 82.6 TFLOPS; 1,008 GB/s; PCIe Gen4 64 GB/s |
"""

from __future__ import annotations

from dataclasses import dataclass

from trl_ext.registry import unknown

_TERA, _GIGA, _GIB = 1e12, 1e9, 2**30


@dataclass(frozen=True)
class Gpu:
    """A device's ceilings."""

    name: str
    memory: int  # bytes, as CUDA reports them
    bf16: float  # FLOP/s of matrix products with float32 sums
    tf32: float
    fp32: float
    bandwidth: float  # bytes/s to and from its memory
    interconnect: float  # bytes/s to the other GPUs of the machine, per direction
    # A GPU computes while Python prepares the next operation, so the slower of the two counts; a CPU does both in turn.
    asynchronous: bool = True


def _gpu(name: str, gib: float, peaks: tuple[float, float, float], bandwidth: float, both_ways: float) -> Gpu:
    """A GPU by GiB, TFLOPS (bf16, tf32, fp32), TB/s, and GB/s of the interconnect in both directions together."""
    bf16, tf32, fp32 = (peak * _TERA for peak in peaks)
    return Gpu(name, int(gib * _GIB), bf16, tf32, fp32, bandwidth * _TERA, both_ways / 2 * _GIGA)


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("h100", 79.11, (989.4, 494.7, 67.0), 3.35, 900),
        _gpu("h100-pcie", 79.11, (756.0, 378.0, 51.0), 2.0, 128),
        _gpu("h200", 139.80, (989.4, 494.7, 67.0), 4.8, 900),
        _gpu("a100-80gb", 79.15, (312.0, 156.0, 19.5), 2.039, 600),
        _gpu("a100-40gb", 39.39, (312.0, 156.0, 19.5), 1.555, 600),
        _gpu("l40s", 44.39, (362.05, 183.0, 91.6), 0.864, 64),
        _gpu("l4", 22.03, (121.0, 60.0, 30.3), 0.3, 64),
        _gpu("t4", 14.56, (65.0, 8.1, 8.1), 0.32, 32),
        _gpu("rtx-4060", 7.63, (30.2, 15.1, 15.1), 0.272, 32),
        _gpu("rtx-4080", 15.46, (97.5, 48.7, 48.7), 0.7168, 64),  # the least of a GeForce of 16 GB in such messages
        _gpu("rtx-4090", 23.64, (165.2, 82.6, 82.6), 1.008, 64),
    )
}


def gpu_by_name(name: str) -> Gpu:
    """The GPU of this name, in any case and with blanks or hyphens, such as `H100` or `RTX 4090`.

    Raises:
        UnknownName: there is none; the message has the nearest name and all names.
    """
    plain = "-".join(name.lower().replace("_", " ").replace("-", " ").split())
    if plain not in GPUS:
        raise unknown("GPU", plain, GPUS)
    return GPUS[plain]
