"""A stage that other processes have too, each for rows of its own: gradients are averaged over them once, at a step's end."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from penstock import torch_private
from penstock.mesh.gradient_presence import GradientPresence
from penstock.stage.replication import Replication
from penstock.torch_private import run_backward


class DDPReplication(Replication):
    """A stage that DistributedDataParallel holds equal; `parallel` is None as long as there is nothing to be averaged.

    Its forward is not called, since it would take the backward of each for the last of the step: this tells it which one is.
    With `wrap`, which makes it, sums travel while the rank goes on, until `finish_step`; unless it has its own hook, or
    copies them into the gradients. Without, the replicas are pipelines that know nothing of each other.
    """

    hooks_gradients = True

    def __init__(
        self,
        module: nn.Module,
        parallel: DistributedDataParallel | None,
        group: dist.ProcessGroup | None = None,
        wrap: Callable[[], Any] | None = None,
    ) -> None:
        self._module, self._group, self._wrap = module, group, wrap
        self._last: _LastBackward | None = None  # of this step
        self._take(parallel)

    def _take(self, parallel: DistributedDataParallel | None) -> None:
        self._parallel = parallel
        self._trainable = self._found()
        sums = parallel is not None and self._wrap is not None and parallel.gradient_as_bucket_view
        if parallel is not None and sums and not torch_private.has_comm_hook(parallel):
            parallel.register_comm_hook(None, self._sum)

    def _found(self) -> list[nn.Parameter]:
        left_out = torch_private.ddp_ignored_names(self._module)
        return [each for name, each in self._module.named_parameters() if each.requires_grad and name not in left_out]

    def _sum(self, _: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Begin to average `bucket`, of which the gradients are views; says that it is done, which `finish_step` makes true."""
        assert self._parallel is not None
        assert self._last is not None
        buffer, group = bucket.buffer(), self._parallel.process_group
        buffer.div_(group.size())
        self._last.sums.append(dist.all_reduce(buffer, group=group, async_op=True))
        done = torch.futures.Future[Tensor](devices=[buffer.device] if buffer.is_cuda else None)
        done.set_result(buffer)
        return done

    def begin_step(self) -> None:
        """Look whether other parameters are frozen now: DistributedDataParallel asks that only when it is made."""
        if self._wrap is not None and list(map(id, self._found())) != list(map(id, self._trainable)):
            self._take(self._wrap() if self._found() else None)

    def before_last_backward(self, ends: Sequence[Tensor] = ()) -> None:
        """The next backward makes the gradients complete, sum them.

        With `find_unused_parameters`, those that the graph's `ends` do not depend on are not waited for.
        """
        if self.backwards_match:
            self._expect(ends)

    def _expect(self, ends: Sequence[Tensor]) -> "_LastBackward":
        if self._parallel is not None:
            torch_private.prepare_ddp_last_backward(self._parallel, self.graph_ends(ends))
        unused = self._parallel is not None and self._parallel.find_unused_parameters
        self._last = _LastBackward(() if unused else self._trainable)
        return self._last

    def after_last_backward(self) -> None:
        """What the last backward did not reach gets zeros, since DistributedDataParallel waits for all of it."""
        if self._last is not None:
            self._last.complete(self._group)

    def finish_step(self, training: bool) -> None:
        """Wait for the sums; where the last backwards were not alike, sum only now."""
        if training and self._last is None and not (self._wrap is not None and self.backwards_match):
            if not self._expect(self._trainable).parameters:
                _add_zeros(self._trainable)
            self.after_last_backward()
        if self._last is not None:
            self._last.end()
        self._last = None

    def graph_ends(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """An empty tensor that depends on all of `outputs`, if that is needed."""
        wanted = self._parallel is not None and self._parallel.find_unused_parameters and len(outputs) > 0
        with torch.enable_grad():
            return (_End.apply(*outputs),) if wanted else ()  # of a parameter, too, which by itself has no graph


class _LastBackward:
    """The last one of a step: which of the `parameters` it reaches, and the sums over the replicas that it has begun."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.sums: list[Any] = []  # what to wait for
        self._arrived: set[int] = set()  # ids of parameters that have got their gradient
        self._used: GradientPresence | None = None  # which parameters have a gradient on any replica
        arrive = self._arrived.add  # the hooks know no more of this, or it would outlive its step
        self._hooks = [each.register_post_accumulate_grad_hook(lambda each: arrive(id(each))) for each in parameters]

    def complete(self, group: dist.ProcessGroup | None) -> None:
        """Give zeros to what it has not reached; those that no replica has reached get no gradient at the `end`."""
        for hook in self._hooks:
            hook.remove()
        used = [each.grad is not None for each in self.parameters]
        _add_zeros([each for each in self.parameters if id(each) not in self._arrived])
        if group is not None and self.parameters:
            self._used = GradientPresence(used, group, self.parameters[0].device)

    def end(self) -> None:
        """Wait for the sums."""
        for work in self.sums:
            work.wait()
        if self._used is not None:
            for parameter, anywhere in zip(self.parameters, self._used.on_any_replica(), strict=True):
                if not anywhere:
                    parameter.grad = None


def _add_zeros(parameters: Sequence[nn.Parameter]) -> None:
    """Add zeros to their gradients, by their ends of the graph, where DistributedDataParallel listens."""
    if parameters:
        run_backward(list(map(get_gradient_edge, parameters)), list(map(torch.zeros_like, parameters)))


class _End(torch.autograd.Function):
    """An empty tensor that depends on others."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        raise AssertionError("nothing goes back from here")
