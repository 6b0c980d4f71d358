"""Models, data and trainings, which plain Trainer and ours run alike."""

import os
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from torch import Tensor, nn

ROWS, TIME, WORDS = 22, 7, 19
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LAYERS = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
DECODER = {**LAYERS, "vocab_size": WORDS, "max_position_embeddings": 32, **NO_TOKENS}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT = {"n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": WORDS, "n_positions": 32, **NO_TOKENS}
GPT |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "CausalLM", {**DECODER, "num_key_value_heads": 1}),
    "gpt2": ("gpt2", "CausalLM", GPT),
    "bert": ("bert", "SequenceClassification", {**DECODER, **STILL, "pad_token_id": 0, "num_labels": 3}),
    "mixtral": (
        "mixtral",
        "CausalLM",
        {**DECODER, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
    ),
    "t5": (
        "t5",
        "Seq2SeqLM",
        {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": WORDS, "dropout_rate": 0.0,
         "decoder_start_token_id": 0},
    ),
    "vit": ("vit", "ImageClassification", {**LAYERS, **STILL, "image_size": 8, "patch_size": 4, "num_labels": 3}),
}  # fmt: skip


class Perceptron(transformers.PreTrainedModel):
    """A model that is cut in a moment, for tests in which any will do."""

    config_class = transformers.PretrainedConfig
    main_input_name = "pixel_values"

    def __init__(self) -> None:
        super().__init__(transformers.PretrainedConfig())
        self.layers = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Tanh())], nn.Linear(8, 3))
        self.post_init()

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """The loss and the logits."""
        logits = self.layers(pixel_values.flatten(1)[:, :8])
        return {"logits": logits} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def model(name: str) -> Any:
    """Always the same."""
    torch.manual_seed(7)
    if name == "perceptron":
        return Perceptron()
    kind, head, config = MODELS[name]
    return getattr(transformers, f"AutoModelFor{head}").from_config(transformers.AutoConfig.for_model(kind, **config))


def rows(name: str, count: int = ROWS, seed: int = 1) -> list[dict[str, Any]]:
    """A data set: texts of several lengths, or images."""
    draw = torch.Generator().manual_seed(seed)
    if name in ("vit", "perceptron"):
        return [{"pixel_values": torch.randn(3, 8, 8, generator=draw), "labels": number % 3} for number in range(count)]
    found = []
    for number in range(count):
        ids = torch.randint(3, WORDS, (3 + number % (TIME - 2),), generator=draw).tolist()
        labels = ids[::-1] if name == "t5" else number % 3 if name == "bert" else ids
        found.append({"input_ids": ids, "labels": labels})
    return found


def collate(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch, its texts padded to one length, one longer than the longest: so something is masked in each."""
    if "pixel_values" in batch[0]:
        return {name: torch.stack([torch.as_tensor(row[name]) for row in batch]) for name in batch[0]}
    time = 1 + max(len(row["input_ids"]) for row in batch)

    def padded(values: list[int], fill: int) -> list[int]:
        return values + [fill] * (time - len(values))

    is_text = isinstance(batch[0]["labels"], list)
    return {
        "input_ids": torch.tensor([padded(row["input_ids"], 0) for row in batch]),
        "attention_mask": torch.tensor([padded([1] * len(row["input_ids"]), 0) for row in batch]),
        "labels": torch.tensor([padded(row["labels"], -100) if is_text else row["labels"] for row in batch]),
    }


def arguments(folder: Any, kind: Any = None, **options: Any) -> Any:
    """Those of a short training; `kind`: the class."""
    plain = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "num_train_epochs": 2,
        "learning_rate": 1e-2, "weight_decay": 0.1, "warmup_steps": 2, "max_grad_norm": 0.5, "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 3,
    }  # fmt: skip
    return (kind or transformers.TrainingArguments)(**plain | options)


def train(package: Any, name: str, folder: Path, **options: Any) -> dict[str, Any]:
    """The outcome of a training by the Trainer of `package`: transformers, or ours."""
    args = arguments(folder, package.TrainingArguments, **options)
    trainer = package.Trainer(model(name), args, train_dataset=rows(name), data_collator=collate)
    trainer.train()
    return outcome(trainer, folder / "model")


def outcome(trainer: Any, folder: Path) -> dict[str, Any]:
    """What was logged, and the weights that are saved; the same on every rank."""
    trainer.save_model(str(folder))
    timed = ("runtime", "per_second", "flos", "preparation_time")
    history = [
        {key: value for key, value in entry.items() if not any(part in key for part in timed)}
        for entry in trainer.state.log_history
    ]
    files = sorted(folder.glob("*.safetensors"))
    return {"history": history, "weights": {k: v for file in files for k, v in safetensors.torch.load_file(file).items()}}


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """To the bit. A norm that overflows is NaN, which equals itself as a text alone."""
    assert repr(ours["history"]) == repr(theirs["history"])
    assert ours["weights"].keys() == theirs["weights"].keys()
    assert all(torch.equal(value, theirs["weights"][name]) for name, value in ours["weights"].items())


os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
