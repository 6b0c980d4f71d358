"""Trainer of transformers on a Ray cluster: Ray Train starts the ranks, and starts them again from the newest checkpoint.

    ray start --head                       # on the first machine; on each other one: ray start --address FIRST:6379
    python examples/ray_trainer.py --ranks 2 --storage /shared/run

`train` is the function that torchrun would run on each rank. When a rank or a machine is lost, Ray's failure policy starts all
ranks again on what is left of the cluster, and `resume_from_checkpoint` goes on from the newest checkpoint that was written
to its end, on any number of ranks. All machines see `--storage`. The call of Ray is that of `ray_train.py`, beside this file.
"""

import os
import signal
from pathlib import Path
from typing import Any

import ray_train
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import penstock as ps

SHAPE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}


class KillRank1(transformers.TrainerCallback):
    """Kills rank 1 after a step, once, to see that the training goes on."""

    def __init__(self, marker: Path, step: int) -> None:
        self.marker, self.step = marker, step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called by Trainer."""
        if state.global_step == self.step and ps.comms.current_topology().rank == 1 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(settings: dict[str, Any]) -> None:
    """On every rank; rank 0 writes what was logged to `storage/losses.txt`."""
    from penstock.integrations.transformers import Trainer, TrainingArguments

    folder = Path(settings["storage"])
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,  # the pipeline's microbatches
        max_steps=settings["steps"],
        learning_rate=1e-2,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,  # on GPUs leave it out
    )
    transformers.set_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, vocab_size=64))
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (64, 16))]
    trainer = Trainer(model, args, train_dataset=rows, callbacks=[KillRank1(folder / "died", settings["die_at"])])
    has_checkpoint = any(folder.glob("checkpoint-*/trainer_state.json"))
    trainer.train(resume_from_checkpoint=has_checkpoint or None)
    if trainer.is_world_process_zero():
        logged = [f"step {entry['step']}  loss {entry['loss']!r}" for entry in trainer.state.log_history if "loss" in entry]
        (folder / "losses.txt").write_text("\n".join(logged) + "\n")


if __name__ == "__main__":
    ray_train.run(train, __doc__, steps=6, storage="ray-trainer-run")
