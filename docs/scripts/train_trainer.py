"""transformers' Trainer, shardtree's checkpoints: `torchrun --nproc-per-node=4 train_trainer.py RUN STEPS`."""

import os
import sys

import torch
from trainer_checkpoints import Checkpoints
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

run, steps, ranks = sys.argv[1], int(sys.argv[2]), int(os.environ.get("WORLD_SIZE", "1"))


class Print(TrainerCallback):
    """Prints each step's loss."""

    def on_log(self, args, state, control, logs, **others):
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step} loss {logs['loss']!r}", flush=True)


args = TrainingArguments(
    output_dir=f"{run}/trainer",
    max_steps=steps,
    per_device_train_batch_size=12 // ranks,
    learning_rate=0.01,
    lr_scheduler_type="constant_with_warmup",
    warmup_steps=8,
    logging_steps=1,
    save_strategy="no",
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
)
torch.manual_seed(0)
tokens = torch.randint(64, (72, 16), generator=torch.Generator().manual_seed(7))
size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
config = LlamaConfig(vocab_size=64, attention_dropout=float(os.environ.get("DROPOUT", "0")), **size)
checkpoints = Checkpoints(run, every=4)
trainer = Trainer(
    LlamaForCausalLM(config),
    args,
    train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
    callbacks=[Print, checkpoints],
)
trainer.train(resume_from_checkpoint=checkpoints.resume_from(trainer))
