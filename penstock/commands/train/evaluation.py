"""What a trained model is worth: its loss on what was held out, and how it goes on with text."""

import torch
import torch.distributed as dist

from penstock.commands.train.data import Text
from penstock.commands.train.setup import Setup

VALIDATION_BATCHES = 8
SAMPLE_BYTES = 160
TEMPERATURE = 0.7


def validation_loss(setup: Setup) -> float:
    """Mean loss over the held-out part."""
    losses, rows = 0.0, 0
    for batch in setup.source.validation(setup.config.batch, VALIDATION_BATCHES):
        inputs, target = setup.share(batch)
        _, loss = setup.pipe.eval(inputs, target=target)
        losses, rows = losses + loss.item() * len(batch[0]), rows + len(batch[0])
    return losses / rows


def sample(setup: Setup) -> tuple[str, str]:
    """Held-out text, and how the model goes on: the last rank draws each byte and tells the others. Of images, nothing."""
    if not isinstance(setup.source, Text):
        return "", ""
    pipe, generator = setup.pipe, torch.Generator().manual_seed(setup.config.seed)
    window = setup.source.held_out[: setup.source.context].long()[None]  # (1, context)
    prompt = bytes(window[0].tolist()).decode(errors="replace")
    drawn = bytearray()
    for _ in range(SAMPLE_BYTES):
        logits = pipe.eval(window)
        token = torch.zeros(1, dtype=torch.long)
        if logits is not None:
            likely = torch.softmax(logits[0, -1].float().cpu() / TEMPERATURE, 0)
            token = torch.multinomial(likely, 1, generator=generator)
        if pipe.position.world.world_size > 1:
            dist.broadcast(token, src=pipe.position.counted[0][pipe.last_rank])
        window = torch.cat([window[:, 1:], token[None]], 1)
        drawn.append(int(token))
    return prompt, drawn.decode(errors="replace")
