"""Fine-tune by Trainer of transformers, the model cut over the ranks; evaluate, save the best, go on.

torchrun --nproc-per-node 2 examples/trainer.py
python examples/trainer.py                       # one process: the same numbers
python examples/trainer.py --plain               # transformers' own Trainer: the same again

What Penstock changes in the script is marked with `# +`: two lines.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import EarlyStoppingCallback, LlamaConfig, LlamaForCausalLM

from penstock import model as text  # whose own source is what is learned
from penstock.integrations.transformers import Trainer, TrainingArguments  # + instead of transformers'

LENGTHS = range(24, 40)  # bytes of a line
SHAPE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}


def lines() -> list[dict[str, list[int]]]:
    """Lines of a text, bytes as tokens."""
    source = Path(str(text.__file__)).read_bytes()
    starts = range(0, 64 * len(LENGTHS), len(LENGTHS))
    texts = [list(source[start : start + LENGTHS[number % len(LENGTHS)]]) for number, start in enumerate(starts)]
    return [{"input_ids": value, "labels": value} for value in texts]


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Padded to one length, with the mask and the labels that say so."""
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones(len(row["input_ids"])) for row in rows], batch_first=True).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def accuracy(found: transformers.EvalPrediction) -> dict[str, float]:
    """The share of tokens that are told right."""
    told, wanted = found.predictions.argmax(-1)[:, :-1], found.label_ids[:, 1:]
    return {"accuracy": float((told == wanted)[wanted != -100].mean())}


def train(trainer_class: Any, arguments_class: Any, folder: str) -> list[dict[str, float]]:
    """What is logged."""
    rows, settings = lines(), {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 2}
    args = arguments_class(
        folder,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,  # the pipeline's microbatches
        num_train_epochs=2,
        learning_rate=1e-2,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        **settings,
    )
    transformers.set_seed(0)
    trainer = trainer_class(
        LlamaForCausalLM(LlamaConfig(**SHAPE, vocab_size=256)),
        args,
        data_collator=collate,
        train_dataset=rows[8:],
        eval_dataset=rows[:8],
        compute_metrics=accuracy,
        callbacks=[EarlyStoppingCallback(2)],
    )
    trainer.train()
    trainer.save_model(f"{folder}/best")  # on every rank: each has its part of the model
    return trainer.state.log_history if trainer.is_world_process_zero() else []


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=str(Path(tempfile.gettempdir()) / "penstock-trainer"))
    parser.add_argument("--plain", action="store_true")
    given = parser.parse_args()
    classes: tuple[Any, Any] = (
        (transformers.Trainer, transformers.TrainingArguments) if given.plain else (Trainer, TrainingArguments)
    )  # +
    for entry in train(*classes, given.folder):
        told = {name: f"{entry[name]:.5f}" for name in ("loss", "grad_norm", "eval_loss", "eval_accuracy") if name in entry}
        if told:
            print(f"step {entry['step']}", *(f"{name} {value}" for name, value in told.items()))
