"""Where shard-sized tasks run: in child processes here, or elsewhere."""

from cachetool.engines.local import LocalEngine
from cachetool.engines.task import Channel, Task

__all__ = ["Channel", "LocalEngine", "Task"]
