"""torch on a CPU: files that are loaded to cpu:0, and Muon where bfloat16 would be emulated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.optim import _muon

from trl_ext.compat import torch_on_cpu
from trl_ext.compat.torch_on_cpu import loading_to_numbered_cpus, muon_without_emulation, orthogonalized

SETTINGS = ((_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C), _muon.DEFAULT_NS_STEPS, _muon.EPS)


@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (16, 16)])
def test_it_is_torchs_up_to_the_rounding_of_bfloat16(shape: tuple[int, int]) -> None:
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ours, torchs = orthogonalized(grad, *SETTINGS), _muon._zeropower_via_newtonschulz(grad, *SETTINGS).float()
    assert ours.dtype == torch.float32
    # 8 bits of mantissa, and the 15 products of which each adds a rounding
    assert (ours - torchs).norm() < 15 * 2**-8 * torchs.norm()
    left, values, right = torch.linalg.svd(grad.double(), full_matrices=False)
    a, b, c = SETTINGS[0]
    values = values / values.norm()
    for _ in range(SETTINGS[1]):  # what the iteration does to each singular value, by itself
        values = a * values + b * values**3 + c * values**5
    assert (ours - left * values @ right).norm() < 1e-4 * ours.norm()


@pytest.mark.parametrize("has", [True, False])
def test_it_steps_in_torchs_place_only_without_bfloat16(has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_on_cpu, "has_bfloat16_matmul", lambda: has)
    torchs = _muon._zeropower_via_newtonschulz
    grad = torch.randn(12, 40, generator=torch.Generator().manual_seed(0))
    weights = torch.zeros(12, 40, requires_grad=True)
    weights.grad = grad.clone()
    optimizer = torch.optim.Muon([weights], lr=1.0, weight_decay=0.0, momentum=0.0, adjust_lr_fn="match_rms_adamw")
    with muon_without_emulation():
        optimizer.step()
    assert _muon._zeropower_via_newtonschulz is torchs
    expected = (torchs if has else orthogonalized)(grad, *SETTINGS)
    assert torch.equal(weights.detach(), torch.zeros(12, 40).add(expected, alpha=-0.2 * 40**0.5))


def test_a_file_is_loaded_to_a_numbered_cpu_in_the_block_only(tmp_path: Path) -> None:
    torch.save(torch.arange(3), tmp_path / "three.pt")
    with loading_to_numbered_cpus(), loading_to_numbered_cpus():
        assert torch.load(tmp_path / "three.pt", map_location="cpu:0").tolist() == [0, 1, 2]
        assert torch.load(tmp_path / "three.pt", map_location="cpu").tolist() == [0, 1, 2]
    with pytest.raises(RuntimeError, match="cpu:0"):
        torch.load(tmp_path / "three.pt", map_location="cpu:0")
