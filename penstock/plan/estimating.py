"""Estimate a model's layers by counting their operations and the bytes that they keep."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from penstock.errors import PenstockError, first_line
from penstock.partition import CuttableModel
from penstock.partition.attributes import restore_attributes_afterwards
from penstock.partition.unit_times import RecordedUnit, replace_tensors_temporarily
from penstock.plan.measuring import UnitWithTensorArguments, costs_in_layer_order, parameter_bytes, record_layer_inputs
from penstock.plan.model_profile import LayerCost, ModelProfile
from penstock.rows import unwrap_tree
from penstock.torch_private import storage_key


def estimate(
    model: nn.Module,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    speed: float,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    target: Any = None,
) -> ModelProfile:
    """Return the estimated costs of the layers of `model`, which may be on the meta device, for a microbatch like the example.

    `speed`: operations a second that a rank reaches. Only products count (matrices, convolutions, attention): moving memory
    takes no time here. A layer is assumed to keep all its activations until its W.
    `loss_fn`, `target`: as in `measure`.

    Raises MismatchError for a model that cannot be cut.

        with torch.device("meta"):
            model = GPT(GPTConfig())
        layers = ps.plan.estimate(model, (torch.zeros(1, 64, dtype=torch.long),), speed=100e12)
    """
    if not speed > 0:
        raise PenstockError(f"speed={speed}: give the operations a second that a rank reaches, more than 0")
    cuttable = CuttableModel(model, None, example_args, example_kwargs)
    example = unwrap_tree((*cuttable.example, target))
    with restore_attributes_afterwards(model):
        units = record_layer_inputs(cuttable, example, loss_fn, rows=1)
        costs = []
        for unit in units:
            with replace_tensors_temporarily(unit.module, _to_meta):
                costs.append(_estimate_layer_cost(unit, speed))
        return ModelProfile.from_layers(costs_in_layer_order(cuttable, units, costs, example))


def _estimate_layer_cost(unit: RecordedUnit, speed: float) -> LayerCost:
    module = UnitWithTensorArguments(unit)
    parameters, arguments = list(unit.module.parameters()), list(map(_to_meta, module.argument_tensors()))
    parameter_keys = set(map(storage_key, parameters))
    saved_bytes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (key := storage_key(tensor)) not in parameter_keys:
            saved_bytes[key] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor), FlopCounterMode(display=False) as forward:
        output = module(arguments)
    inputs = _count_backward_operations(output, [tensor for tensor in arguments if tensor.requires_grad])
    backward_operations = _count_backward_operations(
        output, [tensor for tensor in [*arguments, *parameters] if tensor.requires_grad]
    )
    operations = forward.get_total_flops(), inputs, backward_operations - inputs
    size = sum(saved_bytes.values())
    trained, frozen = parameter_bytes(unit.module)
    output_bytes = sum(tensor.nbytes for tensor in output)
    f, i, w = (count / speed for count in operations)
    return LayerCost(unit.name, f, i, w, activation=size, keep=size, parameters=trained, output=output_bytes, frozen=frozen)


def _to_meta(tensor: Tensor) -> Tensor:
    return tensor.detach().to("meta").requires_grad_(tensor.requires_grad)


def _count_backward_operations(output: Sequence[Tensor], inputs: Sequence[Tensor]) -> int:
    """Return the number of operations of a backward with these gradients."""
    ends = [tensor for tensor in output if tensor.requires_grad]
    if not ends or not inputs:
        return 0
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(ends, inputs, [torch.ones_like(end) for end in ends], retain_graph=True, allow_unused=True)
    return int(counter.get_total_flops())


def estimate_transformers(path: Path, tokens: int, speed: float) -> ModelProfile:
    """Estimate the causal language model that a config.json of transformers describes, for rows of `tokens` tokens.

    In bfloat16. Raises PenstockError without that file, or without transformers.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except Exception as error:  # ModuleNotFoundError, or whatever a broken installation raises
        problem = f"transformers:CONFIG.json needs transformers, which cannot be imported here ({first_line(error)})"
        raise PenstockError(f"{problem}: pip install 'penstock-pipeline[transformers]'") from error
    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except Exception as error:  # of the config's, or of a broken installation, which imports each model when it is asked for
        problem = f"no causal language model can be made of {path} ({first_line(error)})"
        raise PenstockError(f"{problem}: give another config.json, or pip install 'penstock-pipeline[transformers]'") from error
    if tokens < 1:
        raise PenstockError(f"rows of {tokens} tokens are none: give 1 or more")
    rows = torch.zeros(1, tokens, dtype=torch.long)
    return estimate(model, (rows,), {"use_cache": False}, speed=speed, loss_fn=_token_loss, target=rows)


def _token_loss(output: Any, target: Tensor) -> Tensor:
    logits: Tensor = output.logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.to(logits.device).flatten())
