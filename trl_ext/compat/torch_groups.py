"""The time limit of process groups that a library makes without naming one."""

from __future__ import annotations

import datetime

from torch.distributed import distributed_c10d


def set_default_group_timeout(limit: datetime.timedelta) -> None:
    """Have `torch.distributed.new_group` take this limit, which it reads from the module (`_get_default_timeout`)."""
    distributed_c10d.default_pg_timeout = limit
