"""Fine-tune a causal model of transformers on padded text, over two ranks: DataLoader, labels, attention mask.

python examples/finetune.py                              # starts the two ranks itself
torchrun --nproc-per-node 2 examples/finetune.py         # or these, on any number of machines
python examples/finetune.py --plain                      # one process without Penstock, to compare: the same losses

What Penstock adds to the loop is marked with `# +`: three lines.
"""

import argparse
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import penstock as ps

TEXTS = ["the water runs down the pipe", "and turns the wheel", "which turns the stone", "that grinds the grain into flour"] * 8
IGNORED = -100  # the label of what counts nothing


def collate(texts: list[str]) -> dict[str, Tensor]:
    """Bytes as tokens, padded to one length, with the mask and the labels that say so."""
    tokens = [torch.tensor(list(text.encode())) for text in texts]
    ids = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(tensor) for tensor in tokens], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}


def next_token_loss(output: Any, labels: Tensor) -> Tensor:
    """The mean over all tokens that count."""
    return nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def counted(labels: Tensor) -> Tensor:
    """How many they are: microbatches with more of them weigh more in the batch's mean."""
    return ps.tokens(IGNORED)(labels[:, 1:])


def model_and_batches() -> tuple[nn.Module, DataLoader[Any]]:
    """Here a small model with random weights; yours is `AutoModelForCausalLM.from_pretrained(..)`."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=256, use_cache=False))
    return model, DataLoader(TEXTS, batch_size=8, collate_fn=collate)  # type: ignore[arg-type]


def train(epochs: int) -> list[float]:
    """On every rank, over the pipeline."""
    model, batches = model_and_batches()
    example = {name: value[:2] for name, value in next(iter(batches)).items() if name != "labels"}
    pipe = ps.Pipeline(model, next_token_loss, "1f1b", 4, counted, example_kwargs=example)  # +
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)  # + `pipe.` instead of `model.`
    losses = []
    for _ in range(epochs):
        for batch in batches:
            loss = pipe.step(target=batch.pop("labels"), **batch)  # + instead of forward, loss and backward
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def plain(epochs: int) -> list[float]:
    """The same in one process, without a pipeline."""
    model, batches = model_and_batches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(epochs):
        for batch in batches:
            loss = next_token_loss(model(**{name: value for name, value in batch.items() if name != "labels"}), batch["labels"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--plain", action="store_true")
    given = parser.parse_args()
    if given.plain:
        found = plain(given.epochs)
    elif "RANK" in os.environ:
        found = train(given.epochs)
    else:
        found = ps.launch(train, 2, given.epochs)[0]
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(f"step {step}  loss {loss:.5f}" for step, loss in enumerate(found)))
