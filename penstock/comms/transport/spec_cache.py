"""The specs of earlier messages, by link and by the signature of their microbatch: what the next message will be like.

A microbatch whose signature is None, as in a pass of `generate` that will not come again, is described anew and forgotten.

Both ends of a channel find the same specs here, because they begin and end the same steps, and look at the same messages.
"""

from collections.abc import Hashable, Sequence

from penstock.comms.transport.message_spec import MessageSpec
from penstock.recent import RecentDict
from penstock.schedule.program import Transfer

MAX_SIGNATURES = 1024  # signatures of microbatches whose messages are remembered

LinkSpecs = dict[Hashable, MessageSpec]  # link -> spec


class StepSpecs(dict[Transfer, MessageSpec | None]):
    """The known spec of each message of a step, None if there is none; looked up at its first use."""

    def __init__(self, specs_of_microbatch: Sequence[LinkSpecs]) -> None:
        super().__init__()
        self._specs_of_microbatch = specs_of_microbatch

    def __missing__(self, transfer: Transfer) -> MessageSpec | None:
        spec = self._specs_of_microbatch[transfer.action.microbatch].get(_link(transfer))
        self[transfer] = spec
        return spec


class MessageSpecCache:
    """The message specs of one rank's channels."""

    def __init__(self) -> None:
        self._by_signature = RecentDict[Hashable, LinkSpecs](MAX_SIGNATURES)
        self._signatures: Sequence[Hashable] = ()
        self.step_specs = StepSpecs([])  # a spec that is added is remembered at the end of the step
        self.has_changed = False  # whether one was added in this step

    def begin_step(self, signatures: Sequence[Hashable]) -> None:
        """Begin a step whose microbatches have these `signatures`, the same on all ranks."""
        if signatures == self._signatures and None not in signatures:
            return
        self._signatures = signatures
        self.step_specs = StepSpecs(
            [
                {} if signature is None else self._by_signature.add(signature, self._by_signature.get(signature, {}))
                for signature in signatures
            ]
        )

    def add(self, transfer: Transfer, spec: MessageSpec) -> None:
        """Add the spec of a message of this step."""
        self.step_specs[transfer], self.has_changed = spec, True

    def end_step(self) -> None:
        """Remember the step's specs for later steps with one of its signatures."""
        if self.has_changed:
            for transfer, spec in self.step_specs.items():
                signature = self._signatures[transfer.action.microbatch]
                if spec is not None and signature in self._by_signature:
                    self._by_signature[signature][_link(transfer)] = spec
            self.has_changed = False


def _link(transfer: Transfer) -> Hashable:
    """Return the key of the transfers between the same stages, of one slice of any microbatch."""
    (kind, stage, _, slice_), *ends = transfer
    return kind, stage, slice_, *ends
