"""`trl-ext estimate` in a checkout that is not installed: a run's memory and time before it is started.

python scripts/estimate.py --config recipes/grpo_math_qwen2.5_math_1.5b.yaml --gpus 2 --gpu h100
"""

from __future__ import annotations

from trl_ext.tools.estimate.command import main

if __name__ == "__main__":
    main()
