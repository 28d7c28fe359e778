"""train_accelerate.py sharded by FSDP2 on CPUs, where Accelerate itself takes DDP; RUN STEPS, as the script.

With FOLDER in the environment, what `Accelerator.save_state` writes goes there beside each checkpoint.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import accelerate
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

SCRIPTS = Path(__file__).parents[2] / "docs" / "scripts"


class Sharding(accelerate.Accelerator):  # type: ignore[misc]
    """Accelerate's own FSDP2, although the processes have no GPUs."""

    def shard(self) -> None:
        """Say that this job is under FSDP2; other calls of Accelerate's set it back."""
        self.state.distributed_type = DistributedType.FSDP
        self.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=10
        )

    def prepare(self, *objects: Any) -> Any:
        self.shard()
        return super().prepare(*objects)

    def end_training(self) -> None:
        if "FOLDER" in os.environ:
            self.shard()
            self.save_state(os.environ["FOLDER"])
        super().end_training()


if __name__ == "__main__":
    accelerate.Accelerator = Sharding
    sys.path.insert(0, str(SCRIPTS))
    runpy.run_path(str(SCRIPTS / "train_accelerate.py"), run_name="__main__")
