"""Models and meshes with an axis `cp`; how far loss, norm and gradients are from one process that has the whole sequence."""

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import penstock as ps
from penstock.stage.dtensor import gather_full_tensor

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

ROWS, TIME, VOCABULARY = 6, 13, 17  # 13 tokens: one rank has 7, the other 6
SHAPE = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24, "vocab_size": VOCABULARY,
    "max_position_embeddings": 16,
}  # fmt: skip


def gpt() -> nn.Module:
    return ps.model.GPT(ps.model.GPTConfig(VOCABULARY, TIME, width=16, layers=2, heads=4))


def llama() -> nn.Module:
    return from_transformers("Llama", **SHAPE, num_key_value_heads=2)


def qwen2() -> nn.Module:
    return from_transformers("Qwen2", **SHAPE, num_key_value_heads=1)  # which no two ranks can share


def gpt2() -> nn.Module:
    shape = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 16}
    return from_transformers("GPT2", **shape, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)


def from_transformers(name: str, **config: Any) -> nn.Module:
    import transformers

    import penstock.integrations.transformers  # noqa: F401 - registers the attention

    kind = f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    model: nn.Module = getattr(transformers, kind)._from_config(
        getattr(transformers, f"{name}Config")(**config, use_cache=False), attn_implementation="penstock"
    )
    return model


def plan(name: str) -> dict[str, Any]:
    """What ranks along `tp` share."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if name == "gpt":
        return ps.model.GPT(ps.model.GPTConfig()).tensor_parallel()
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    styles = {**dict.fromkeys(columns, ColwiseParallel()), **dict.fromkeys(rows, RowwiseParallel())}
    return {f"model.layers.*.{part}": style for part, style in styles.items()}


CUTS = {"gpt": ["block1"], "gpt2": ["transformer.h.1"]}  # of the others "model.layers.1"
MODELS = {"gpt": gpt, "llama": llama, "qwen2": qwen2, "gpt2": gpt2}
MESHES = {  # ranks -> name, axes, further arguments, models
    2: [("cp2", {"pp": 1, "cp": 2}, {}, MODELS)],
    4: [
        ("pp2 cp2", {"pp": 2, "cp": 2}, {}, MODELS),
        ("cp2 tp2", {"pp": 1, "cp": 2, "tp": 2}, {}, ["gpt", "llama"]),
        ("cp2 dp2 fsdp", {"pp": 1, "cp": 2, "dp": 2}, {"data_parallel": "fsdp"}, MODELS),
    ],
}


def model(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]().double()


def batch(name: str) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs and target: in the last rows only the first part counts, and on the left there is padding."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(VOCABULARY, (ROWS, TIME), generator=generator)
    target = torch.randint(VOCABULARY, (ROWS, TIME), generator=generator)
    target[1::2, :3] = -100
    target[-3:, 5:] = -100
    if name != "llama":
        return {"tokens" if name == "gpt" else "input_ids": tokens}, target
    mask = torch.ones_like(tokens)
    mask[1::2, :3] = 0
    return {"input_ids": tokens, "attention_mask": mask}, target


def loss_fn(output: Any, target: Tensor) -> Tensor:
    logits = getattr(output, "logits", output)
    return cross_entropy(logits.flatten(0, 1), target.flatten())


def alone(name: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, norm and gradients of the whole batch."""
    whole, (inputs, target) = model(name), batch(name)
    loss = loss_fn(whole(*inputs.values()) if name == "gpt" else whole(**inputs), target)
    loss.backward()
    gradients = {key: parameter.grad.clone() for key, parameter in whole.named_parameters()}
    return loss.detach(), nn.utils.clip_grad_norm_(whole.parameters(), 1e9), gradients


def trained(name: str, axes: dict[str, int], **arguments: Any) -> float:
    """The largest difference to one process of loss, norm and gradients, over two schedules if there are stages."""
    loss, norm, gradients = alone(name)
    worst = 0.0
    for schedule in ("1f1b", "zb-h1") if (name, axes["pp"]) == ("gpt", 2) else ("1f1b",):
        inputs, target = batch(name)
        if "tp" in axes:
            arguments["tensor_parallel"] = plan(name)
        if axes["pp"] > 1:
            arguments["cuts"] = CUTS.get(name, ["model.layers.1"])
            arguments |= {} if name == "gpt" else {"example_kwargs": {key: value[:2] for key, value in inputs.items()}}
        mesh = ps.comms.init_mesh(**axes)
        pipe = ps.Pipeline(model(name), loss_fn, schedule, 3, ps.tokens(), mesh=mesh, **arguments)
        replica, replicas = pipe.position.replica, pipe.position.replicas
        inputs = {key: value.tensor_split(replicas)[replica] for key, value in inputs.items()}
        target = target.tensor_split(replicas)[replica]
        losses: list[Tensor] = []
        call = {} if name == "gpt" else inputs
        ours = pipe.step(*(inputs.values() if name == "gpt" else ()), **call, target=target, losses=losses)
        counts = torch.tensor([float((part != -100).sum()) for part in target.tensor_split(3)])
        mean = sum(value * count for value, count in zip(losses, counts, strict=True)) / counts.sum()
        differences = [abs(ours - loss), abs(pipe.clip_grad_norm_(1e9) - norm)]
        differences += [abs(mean - loss)] if replicas == 1 else []
        for key, parameter in pipe.named_parameters():
            differences.append((gather_full_tensor(parameter.grad) - gradients[key]).abs().max())
        _, evaluated = pipe.eval(*(inputs.values() if name == "gpt" else ()), **call, target=target)
        differences.append(abs(evaluated - loss))
        worst = max(worst, *map(float, differences))
    return worst


def largest_differences(ranks: int) -> dict[str, float]:
    """Return those of each mesh and model."""
    runs = [(mesh, name, axes, arguments) for mesh, axes, arguments, names in MESHES[ranks] for name in names]
    return {f"{mesh}, {name}": trained(name, axes, **arguments) for mesh, name, axes, arguments in runs}
