"""A callback with which transformers' Trainer saves shardtree's checkpoints, and resumes from them."""

import dataclasses
from pathlib import Path

import torch
from accelerate_checkpoints import load, random_numbers, shards, steps, tensors
from transformers import TrainerCallback, TrainerState

import shardtree as st


class Checkpoints(TrainerCallback):
    """Saves all that Trainer holds after every so many steps, once a step is logged and evaluated."""

    def __init__(self, run, every):
        self.run, self.every, self.newest = run, every, 0  # the newest step that is saved

    def on_step_begin(self, args, state, control, *, model, optimizer, lr_scheduler, **others):
        if state.global_step % self.every == 0 and state.global_step > self.newest:
            own = {"is_local_process_zero": True, "is_world_process_zero": True}  # all else is alike on all processes
            values = {"scheduler": lr_scheduler.state_dict(), "trainer": dataclasses.asdict(state) | own}
            tree = shards(tensors(model, optimizer)) | values | {"random": random_numbers()}
            steps(self.run).save(tree, state.global_step)
            self.newest = state.global_step

    on_epoch_end = on_step_begin  # before Trainer starts its data loader anew, and where no step follows

    def on_train_begin(self, args, state, control, *, model, optimizer, lr_scheduler, **others):
        if self.newest:
            lr_scheduler.load_state_dict(load(self.run, self.newest, model, optimizer)["scheduler"])

    def resume_from(self, trainer):
        """Return a folder that says where Trainer goes on, None before the first checkpoint."""
        latest = steps(self.run).latest()
        if latest is None:
            return None
        self.newest = latest.number
        by_rule = st.LoadOptions(object_rules={"random": st.objects.drop_objects})
        loaded = steps(self.run).load({"random": random_numbers()}, latest, options=by_rule)
        args, folder = trainer.args, Path(trainer.args.output_dir, "resume")
        trainer.save_model(folder)  # Trainer insists on a model there; on_train_begin loads the stored one
        if trainer.is_world_process_zero():
            TrainerState(**loaded["trainer"]).save_to_json(folder / "trainer_state.json")
        trainer.accelerator.wait_for_everyone()
        own = loaded["random"]
        if "cuda" in own and args.world_size > 1:
            own["cuda"] = [own["cuda"]] * torch.cuda.device_count()  # as Trainer has them, of which one is its own
        name = f"rng_state_{args.process_index}.pth" if args.world_size > 1 else "rng_state.pth"
        torch.save(own, folder / name)
        return str(folder)
