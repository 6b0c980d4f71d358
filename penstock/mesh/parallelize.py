"""Parallelize this rank's stages: split matrix products along `tp`, replicate along `dp` and `cp`."""

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from penstock import torch_private
from penstock.comms.wait_errors import convert_errors
from penstock.errors import MismatchError
from penstock.mesh import data_parallel, tensor_parallel
from penstock.mesh.data_parallel import broadcast_buffers
from penstock.mesh.fsdp import FSDPHooks
from penstock.mesh.position import MeshPosition
from penstock.stage.connections import StageParameter
from penstock.stage.hooks import DataParallelHooks, NoDataParallelHooks
from penstock.stage.rank_parameters import RankParameters
from penstock.stage.stage import Stage


@convert_errors("for the ranks beside it to build the pipeline")
def parallelize_stages(
    position: MeshPosition,
    modules: Mapping[int, nn.Module],
    hooks_by_stage: Mapping[int, DataParallelHooks],
    tied: Sequence[Sequence[StageParameter]],
    names: Sequence[Mapping[str, str]],
    plan: tensor_parallel.TensorParallelPlan | None,
    data_parallel_mode: str | data_parallel.ApplyDataParallel,
) -> dict[int, DataParallelHooks]:
    """Apply tensor and data parallel to this rank's stages; return the hooks of each stage.

    `modules`, `hooks_by_stage`: of this rank. `tied`: parameters that several stages share. `names`: for every stage, an
    entry's name in the stage -> in the uncut model. Raises MismatchError for a `plan` without an axis `tp` or that does not fit
    the model, and for tied parameters that would be sharded.
    """
    if position.peer_groups:
        torch_private.clear_dtensor_caches()  # they may have groups of an earlier pipeline, which a failed step has closed
    apply = data_parallel.APPLY_BY_NAME.get(data_parallel_mode) if isinstance(data_parallel_mode, str) else data_parallel_mode
    if apply is None:
        raise MismatchError(
            f"data_parallel={data_parallel_mode!r}: use 'ddp', 'fsdp' or a function of (stage, mesh) that returns the stage"
        )
    tensor_parallel.check_tensor_parallel_plan(plan, names, position)
    if tied and (position.tp is not None or (position.dp_cp_mesh is not None and apply is not data_parallel.apply_ddp)):
        parameter_names = ", ".join(names[stage][name] for stage, name in tied[0])
        raise MismatchError(
            f"parameters of several stages ({parameter_names}) can be neither sharded nor split over tp: use "
            "data_parallel='ddp' without tp, or cut the model so that each is in one stage"
        )
    if position.tp is not None or position.dp_cp_mesh is not None:
        _check_gradient_dtypes(modules, names, position.world.rank)
    hooks_of_stage = dict(hooks_by_stage)
    for stage, module in modules.items():
        if position.tp is not None and plan is not None:
            data_parallel.broadcast_from_first((*module.parameters(), *module.buffers()), position.tp.get_group())
            tensor_parallel.parallelize_stage(plan, module, names[stage], position.tp)
        if position.dp_cp_mesh is not None:
            if not isinstance(hooks_of_stage[stage], NoDataParallelHooks):
                raise MismatchError(f"stage {stage} is data parallel already: give it as it is, the mesh has an axis dp")
            owned_elsewhere = [name for group in tied for owner, name in group if owner == stage != group[0][0]]
            hooks_of_stage[stage] = data_parallel.make_data_parallel(module, position, apply, owned_elsewhere)
    if len({type(value) for value in hooks_of_stage.values() if not isinstance(value, NoDataParallelHooks)}) > 1:
        raise MismatchError(
            "data_parallel= makes DistributedDataParallel of one stage and shards another: do the same with all"
        )
    return hooks_of_stage


@convert_errors("for the ranks beside it to build the pipeline")
def parallelize_teacher(
    position: MeshPosition,
    modules: Mapping[int, nn.Module],
    names: Sequence[Mapping[str, str]],
    plan: tensor_parallel.TensorParallelPlan | None,
    data_parallel_mode: str | data_parallel.ApplyDataParallel,
    hooks_of_model: Iterable[DataParallelHooks],
) -> dict[int, DataParallelHooks]:
    """Make a teacher's stages on this rank equal on all ranks that have them, and share them out as the model's are.

    `modules`, `names`: the teacher's, as in `parallelize_stages`. `hooks_of_model`: of the model's stages on this rank. Along
    `tp` a teacher that has not all parts of the `plan` is whole on every rank.
    """
    if position.tp is not None and plan is not None:
        is_divided = not tensor_parallel.missing_parts(plan, names)
        for stage, module in modules.items():
            data_parallel.broadcast_from_first((*module.parameters(), *module.buffers()), position.tp.get_group())
            if is_divided:
                tensor_parallel.parallelize_stage(plan, module, names[stage], position.tp)
    if position.dp_cp_mesh is None:
        return {stage: NoDataParallelHooks() for stage in modules}

    apply = data_parallel.APPLY_BY_NAME[data_parallel_mode] if isinstance(data_parallel_mode, str) else data_parallel_mode
    is_sharded = apply is not data_parallel.apply_ddp and any(isinstance(hooks, FSDPHooks) for hooks in hooks_of_model)
    return {
        stage: data_parallel.share_out_frozen(module, position.dp_cp_mesh, apply if is_sharded else None)
        for stage, module in modules.items()
    }


def _check_gradient_dtypes(modules: Mapping[int, nn.Module], names: Sequence[Mapping[str, str]], rank: int) -> None:
    """Raise MismatchError for a `grad_dtype`: DistributedDataParallel refuses it in a backward, DTensors drop it silently."""
    for stage, module in modules.items():
        for name, parameter in module.named_parameters():
            if parameter.grad_dtype not in (parameter.dtype, None):
                dtypes = f"{names[stage].get(name, name)} is {parameter.dtype} and has grad_dtype={parameter.grad_dtype}"
                raise MismatchError(
                    f"rank {rank}: {dtypes}, which torch's dp, cp and tp do not keep: leave parameters in float32, and give "
                    "data_parallel=lambda stage, mesh: fully_shard(stage, mesh=mesh, mp_policy=MixedPrecisionPolicy("
                    "param_dtype=torch.bfloat16, reduce_dtype=torch.float32))"
                )


def begin_gathering_parameters(stages: Sequence[Stage]) -> None:
    """Begin a step of data parallelism: gather the parameters of the first of `stages`, which are in the order of their use."""
    hooks_in_order = [stage.data_parallel for stage in stages]
    with convert_errors("for the replicas to begin the step"):
        for hooks in hooks_in_order:
            hooks.begin_step()
            hooks.in_use = hooks_in_order
        for hooks in hooks_in_order[:1]:
            hooks.prefetch_parameters()


def match_backwards(stages: Sequence[Stage], same_on_replicas: bool) -> None:
    """Tell the hooks of `stages`, which run in this step, in their order, whether replicas run the same backwards."""
    in_use = [stage.data_parallel for stage in stages]
    for hooks in in_use:
        hooks.backwards_match, hooks.in_use = same_on_replicas, in_use


def finish_gradient_averaging(
    stages: Iterable[Stage], parameters: RankParameters, position: MeshPosition, training: bool
) -> None:
    """Wait until gradients are averaged over replicas; in training, sum partial ones along `tp`, and broadcast buffers."""
    with convert_errors("for the replicas to average the gradients"):
        for stage in stages:
            stage.data_parallel.finish_step(training)
        if position.tp is not None and training:
            tensor_parallel.sum_partial_gradients(parameters.parameters())
        if position.dp_cp_mesh is not None and training:
            for stage in stages:
                broadcast_buffers(stage.module, position.dp_cp_mesh.get_group())
