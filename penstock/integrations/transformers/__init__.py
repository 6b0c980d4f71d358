"""transformers' Trainer, with the model cut over ranks, and `ps.attention` for transformers' models.

`Trainer` and `TrainingArguments` are subclasses of transformers'. A script imports these instead, and torchrun starts it. See
docs/howto/trainer.md.

The mixin stands directly above transformers' Trainer in the order of classes, below those of a script.
The overrides, and what each needs of transformers (releases: `training_arguments.OLDEST_RELEASE`) and accelerate (1.15):

    _setup_devices                  makes `PartialState` from RANK, WORLD_SIZE and LOCAL_RANK. Here it sees one process for each
                                    replica, so that loaders, sums and gathers are over replicas
    should_save, should_log,        decide which process writes. Here: rank 0
    is_world_process_zero, ..
    main_process_first              runs a block on rank 0 first; here rank 0 of all ranks
    __init__                        makes `accelerator.scaler` for `fp16`. Here all ranks share one
    call_model_init                 makes a new model at the beginning of a training. Here it gets a new pipeline
    _wrap_model                     leaves anything that is not `self.model` as it is. Here it returns a `ModelView`,
                                    which a script may call without gradients
    get_batch_samples               returns the batches of one optimizer step. Here they are the microbatches of one step
    get_train_dataloader            collates by `data_collator`. With `group="planned"`, `get_batch_samples` collates
    training_step                   runs a batch and returns its loss. Here the first call runs the pipeline for all batches
    compute_loss                    not overridden. It waits where it calls its `ModelView` for the last stage's outputs
    log                             not overridden. What `compute_loss` logs, all ranks log after the step
    prediction_step                 returns losses, logits and labels of a batch. Here they come from the last stage's rank
    _get_eval_sampler, ..           share rows out to processes. Here each replica evaluates all rows
    _clip_grad_norm, _get_grad_norm take the norm of gradients that accelerate has unscaled. Here the norm is over all ranks
    create_optimizer                takes all parameters. Here those of other ranks are removed once the model is cut
    maybe_install_capturing_hooks   installs the hooks that return the routers' logits. Here before the model is cut
    _load_from_checkpoint,          load files into `self.model`; they and `_save` read no values of it
    _load_best_model
    _save                           takes a `state_dict`. Here rank 0 gets that of all ranks
    _save_optimizer_and_scheduler   writes `optimizer.pt` and `scheduler.pt`. Here in plain Trainer's form, for all ranks
    _save_rng_state                 writes `rng_state.pth`. Here one rank of each pipeline does
    _save_checkpoint                updates `state.stateful_callbacks` on the process that writes. Here on all ranks
    train, evaluation_loop          may raise on one rank. Here all ranks raise its error
    callback_handler.callbacks      has a ProgressCallback with a tqdm bar. Here the bar also shows the idle share
    _maybe_log_save_evaluate        follows each step. Here all ranks take what callbacks decided on rank 0

    attention_implementation  `attn_implementation="penstock"`: transformers' models call `ps.attention`
    training_arguments        adds the arguments of a pipeline, and refuses those that conflict with it
    trainer                   the mixin, and Trainer
    overrides                 the order of classes, and the overrides of a script that are refused
    model_view                stands in for the model where Trainer calls it
    model_call                runs `compute_loss` as far as its call of the model, and goes on when the outputs are there
    reference                 `ref_model`, which runs as the pipeline's teacher
    token_loss                the loss of a part of the tokens, for `slices` and `cp`
    loss_effects              brings what `compute_loss` logs and collects to all ranks
    grouping_collator         puts rows of similar lengths into the same microbatch
    progress_bar              the progress bar, with the idle share
    optimizer                 an optimizer whose parameters are spread over ranks
"""

from penstock.integrations.transformers.attention_implementation import register_attention
from penstock.integrations.transformers.grouping_collator import GroupingCollator
from penstock.integrations.transformers.trainer import PipelineTrainerMixin, Trainer
from penstock.integrations.transformers.training_arguments import PipelineArguments, TrainingArguments

__all__ = ["GroupingCollator", "PipelineArguments", "PipelineTrainerMixin", "Trainer", "TrainingArguments"]

register_attention()
