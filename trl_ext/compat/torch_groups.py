"""The timeout of process groups that a library creates without one."""

from __future__ import annotations

import datetime

from torch.distributed import distributed_c10d


def set_default_group_timeout(limit: datetime.timedelta) -> None:
    """Set the default timeout of torch.distributed's groups, the first one and those of `new_group`."""
    distributed_c10d.default_pg_timeout = limit
