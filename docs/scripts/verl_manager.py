"""verl's checkpoint manager for FSDP2, with shardtree's checkpoints in the place of a file for each rank."""

from pathlib import Path

from torch.distributed.checkpoint import state_dict as states
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.workers.engine.fsdp import transformer_impl

import shardtree as st
from shardtree.interop.dtensor import from_dtensors, to_dtensors


class ShardtreeManager(FSDPCheckpointManager):
    """Saves on any number of ranks what another number loads; what verl has saved loads on as many as then."""

    def held(self):
        return {
            "model": states.get_model_state_dict(self.model),
            "optimizer": states.get_optimizer_state_dict(self.model, self.optimizer),
            "scheduler": self.lr_scheduler.state_dict() if self.lr_scheduler else None,
            "rng": st.ShardedObject("rng", self.get_rng_state(), (self.world_size,), (self.rank,)),
        }

    def shards(self):
        return st.from_local(from_dtensors(self.held()), st.Mesh(data=self.world_size), st.P(), self.rank)

    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None):
        st.save(self.shards(), local_path, overwrite=True)  # a run that was killed here comes by again
        if self.rank == 0:
            self.register_checkpoint(local_path, max_ckpt_to_keep)

    def load_checkpoint(self, local_path, hdfs_path=None, del_local_after_load=False):
        if local_path is None or not Path(local_path, "metadata.json").exists():
            super().load_checkpoint(local_path, hdfs_path, del_local_after_load)
            return
        by_rule = st.LoadOptions(object_rules={"rng": st.objects.drop_objects})
        loaded = to_dtensors(st.load(self.shards(), local_path, options=by_rule), like=self.held())
        states.set_model_state_dict(self.model, loaded["model"])
        states.set_optimizer_state_dict(self.model, self.optimizer, loaded["optimizer"])
        if self.lr_scheduler:
            self.lr_scheduler.load_state_dict(loaded["scheduler"])
        self.load_rng_state(loaded["rng"])


transformer_impl.FSDPCheckpointManager = ShardtreeManager  # the name under which verl's engine makes its manager
