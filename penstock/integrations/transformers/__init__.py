"""Trainer of transformers, with the model cut over ranks, and `ps.attention` for their models.

`Trainer` and `TrainingArguments` are subclasses of theirs: a script imports these instead, and is started by torchrun. See
docs/howto/trainer.md.

What they override, and what each override needs of transformers (releases: `arguments.OLDEST_RELEASE`) and accelerate (1.15):

    _setup_devices                  makes `PartialState`, from RANK, WORLD_SIZE and LOCAL_RANK of the environment: here one
                                    process for each replica, so that loaders, sums and gathers are those of these processes
    should_save, should_log,        decide which rank writes: rank 0
    is_world_process_zero, ..
    main_process_first              waits for rank 0 of all ranks
    create_accelerator_and_postprocess  makes `accelerator.scaler` for `fp16`: here one that all ranks share
    call_model_init                 a new model, called at the beginning of a training: here it gets a new pipeline
    _wrap_model                     whatever is not `self.model` is left as it is: here a `ModelView` of it
    get_batch_samples               the batches of one optimizer step, before they are trained: here its microbatches
    get_train_dataloader            collates by `data_collator`: with `group="planned"`, `get_batch_samples` does
    training_step                   once for each of them, gives its loss: here the first call runs the pipeline
    compute_loss                    not overridden; called with a `ModelView`, which gives it the last stage's outputs
    prediction_step                 losses, logits and labels of one batch: here from the last stage's rank, on every rank
    _get_eval_sampler, ..           with replicas each evaluates all rows
    _clip_grad_norm, _get_grad_norm the norm over all ranks, of gradients that accelerate has unscaled
    create_optimizer                of all parameters; those of other ranks are taken out once the model is cut
    maybe_install_capturing_hooks   installs what hands the routers' logits on: here before the model is cut
    _load_from_checkpoint,          load files into `self.model`; they and `_save` read no values of it
    _load_best_model
    _save                           takes a `state_dict`: here all ranks' together, on rank 0
    _save_optimizer_and_scheduler   `optimizer.pt` and `scheduler.pt` as plain Trainer has them
    _save_rng_state                 `rng_state.pth`, written by one rank of a pipeline
    _save_checkpoint                updates `state.stateful_callbacks` on the process that writes: here on all ranks
    train, evaluation_loop          what one rank raises in them is raised by all
    callback_handler.callbacks      has a ProgressCallback, whose `training_bar` is tqdm's: here one that shows the idle share
    _maybe_log_save_evaluate        after each step: what callbacks decided on rank 0 holds for all

    attention           `attn_implementation="penstock"`: their models call `ps.attention`
    arguments           the arguments a pipeline adds, and those that cannot be beside it
    trainer             the mixin, and Trainer
    model_view          what stands for the model where Trainer calls it; the loss that is `compute_loss`
    grouping_collator   rows of like lengths share a microbatch
    progress            the progress bar, with the idle share
    optimizer           the state of an optimizer that is spread over ranks
"""

from penstock.integrations.transformers.arguments import PipelineArguments, TrainingArguments
from penstock.integrations.transformers.attention import register_attention
from penstock.integrations.transformers.grouping_collator import GroupingCollator
from penstock.integrations.transformers.trainer import PipelineTrainerMixin, Trainer

__all__ = ["GroupingCollator", "PipelineArguments", "PipelineTrainerMixin", "Trainer", "TrainingArguments"]

register_attention()
