"""Toy models, each odd in one way: what people come with."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import keystr, tree_flatten_with_path

import penstock as ps
from penstock.commands.train.setup import token_loss


class Batch(NamedTuple):
    """What a step is called with."""

    args: tuple[Any, ...]
    target: Any
    kwargs: Mapping[str, Any] = {}


class ModelCase(NamedTuple):
    """A model, always the same, its loss, and batches of any number of rows."""

    build: Callable[[], nn.Module]
    loss_fn: Callable[[Any, Any], Tensor]
    batch: Callable[[int, int], Batch]  # rows, seed

    def model(self) -> nn.Module:
        torch.manual_seed(7)
        return self.build()


def differing(ours: Any, expected: Any) -> list[str]:
    """The leaves that are not equal to the bit; all of them if the structure is another."""
    (mine, shape), (theirs, other) = tree_flatten_with_path(ours), tree_flatten_with_path(expected)
    if shape != other:
        return [str(shape), str(other)]
    pairs = zip(mine, theirs, strict=True)
    return [keystr(path) for (path, a), (_, b) in pairs if not (torch.equal(a, b) if isinstance(a, Tensor) else a == b)]


def tokens(rows: int, seed: int, vocabulary: int = 17, time: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(vocabulary, (rows, time + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def token_batch(rows: int, seed: int) -> Batch:
    inputs, target = tokens(rows, seed)
    return Batch((inputs,), target)


# -- small, and odd in one way ---------------------------------------------------------------------------------------


def toy(forward: Callable[..., Any], name: str = "Toy", **parts: Any) -> nn.Module:
    """A module of a class `name` with this `forward`. A part is a module, another attribute, or the shape of a parameter."""
    made: nn.Module = type(name, (nn.Module,), {"forward": forward})()
    for part, value in parts.items():
        setattr(made, part, nn.Parameter(torch.randn(value)) if isinstance(value, tuple) else value)
    return made


class LayerListNet(nn.Module):
    """No nn.Sequential: its layers are in a ModuleList."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class MLPBlock(nn.Module):
    """A residual block whose products tensor parallel shares, between a norm and dropout that it does not."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.dropout(self.down(torch.tanh(self.up(self.norm(hidden)))))


def attends(width: int, to: Callable[[Tensor], tuple[Tensor, Tensor]] = lambda x: (x, x), **options: Any) -> nn.Module:
    """torch's attention of two heads, from `x` to the keys and values that `to(x)` gives."""
    forward = lambda self, x: self.attention(x, *to(x), need_weights=False)[0]  # noqa: E731
    return toy(forward, attention=nn.MultiheadAttention(width, 2, batch_first=True, **options))


def tied(words: int, width: int, first: str = "token") -> nn.Module:
    """The matrix of the `head` is the `token` embedding's; `first` is the one that the model has first."""
    parts = {"token": nn.Embedding(words, width), "head": nn.Linear(width, words, bias=False)}
    parts["head"].weight = parts["token"].weight
    order = sorted(parts, key=lambda name: name != first)
    return toy(lambda self, tokens: self.head(torch.tanh(self.token(tokens))), **{name: parts[name] for name in order})


def has_auxiliary_loss(loss: Callable[[Tensor], Tensor], after: nn.Module | None = None) -> nn.Module:
    """Adds `loss` of what comes in, or of what the layer `after` makes of it, and hands that on."""

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.layer(hidden)
        ps.auxiliary_loss(loss(hidden))
        return hidden

    return toy(forward, layer=after or nn.Identity())


def has_unused(width: int) -> nn.Module:
    """Of two layers the forward calls one."""
    return toy(lambda self, hidden: self.used(hidden), used=nn.Linear(width, width), unused=nn.Linear(width, width))


# -- the transformer of PyTorch's pipeline tutorial ------------------------------------------------------------------


class DecoderModel(nn.Module):
    """Decoder layers in a ModuleDict between an embedding and a head; what a stage does not have is None."""

    def __init__(self, layers: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(17, 8)
        self.layers = nn.ModuleDict(
            {str(number): nn.TransformerDecoderLayer(8, 2, 16, dropout, batch_first=True) for number in range(layers)}
        )
        self.norm = nn.LayerNorm(8)
        self.output = nn.Linear(8, 17)

    def forward(self, tokens):
        hidden = self.tok_embeddings(tokens) if self.tok_embeddings else tokens
        for layer in self.layers.values():
            hidden = layer(hidden, hidden)
        hidden = self.norm(hidden) if self.norm else hidden
        return self.output(hidden).clone() if self.output else hidden


def by_hand(model: DecoderModel, stage: int, stages: int) -> DecoderModel:
    """The tutorial's way: what belongs to other stages is deleted."""
    keep = torch.arange(len(model.layers)).tensor_split(stages)[stage].tolist()
    for name in list(model.layers):
        if int(name) not in keep:
            del model.layers[name]
    if stage > 0:
        model.tok_embeddings = None
    if stage < stages - 1:
        model.norm = model.output = None
    return model


# -- skips -----------------------------------------------------------------------------------------------------------


class UNet(nn.Module):
    """Two levels down and up; what went down joins what comes up."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = _convolutions(1, 4), _convolutions(4, 6), _convolutions(6, 8)
        self.up2, self.join2 = nn.ConvTranspose2d(8, 6, 2, stride=2), _convolutions(12, 6)
        self.up1, self.join1 = nn.ConvTranspose2d(6, 4, 2, stride=2), _convolutions(8, 4)
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, image):
        first = self.down1(image)
        second = self.down2(functional.max_pool2d(first, 2))
        bottom = self.middle(functional.max_pool2d(second, 2))
        up = self.join2(torch.cat([second, self.up2(bottom)], dim=1))
        up = self.join1(torch.cat([first, self.up1(up)], dim=1))
        return self.head(up)


def _convolutions(inputs: int, outputs: int) -> nn.Sequential:
    layers = [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


def image_batch(rows: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch((torch.randn(rows, 1, 8, 8, generator=generator),), torch.randint(3, (rows, 8, 8), generator=generator))


class EncoderDecoder(nn.Module):
    """Every decoder layer looks at what the encoder made: memory, masks and numbers are needed in several stages."""

    def __init__(self, dropout: float = 0.0, decoders: int = 3) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(17, 8), nn.Embedding(17, 8)
        shape = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "dropout": dropout, "batch_first": True}
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(**shape) for _ in range(2))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(**shape) for _ in range(decoders))
        self.head, self.dropout = nn.Linear(8, 17), dropout
        self.register_buffer("bias", torch.linspace(-1, 1, 17), persistent=False)

    def forward(self, source, target, length, scale=1.0):
        padding = source == 0  # boolean
        time = target.shape[1]
        causal = torch.full((time, time), float("-inf"), device=target.device).triu(1)
        memory = self.source(source)
        for layer in self.encoder:
            memory = layer(memory, src_key_padding_mask=padding)
        hidden = functional.dropout(self.target(target) * scale, self.dropout, self.training)
        for layer in self.decoder:
            hidden = layer(hidden, memory, tgt_mask=causal, memory_key_padding_mask=padding)
        return {"logits": self.head(hidden) + self.bias, "length": length, "scale": scale}


def translation_batch(rows: int, seed: int) -> Batch:
    (source, _), (target, following) = tokens(rows, seed, time=5), tokens(rows, seed + 100, time=4)
    source = torch.cat([1 + source % 16, torch.zeros_like(source[:, :2])], dim=1)  # two of padding
    return Batch((source, target), following, {"length": torch.arange(rows) % 3 + 2})


def translation_loss(output: dict[str, Any], target: Tensor) -> Tensor:
    """Over the first `length` tokens of each row."""
    logits, length = output["logits"], output["length"]
    counted = torch.arange(logits.shape[1])[None] < length[:, None]
    value = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
    return (value * counted).sum() / counted.sum()


# -- tied ------------------------------------------------------------------------------------------------------------


class TiedModel(nn.Module):
    """One matrix is the embedding, the head, and (`owners` 3) what a layer in the middle looks at as well."""

    def __init__(self, owners: int = 2, layers: int = 4) -> None:
        super().__init__()
        self.owners = owners
        self.token, self.position = nn.Embedding(17, 8), nn.Embedding(6, 8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(layers))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 17, bias=False)
        self.head.weight = self.token.weight
        if owners == 3:
            self.again = nn.Linear(8, 17, bias=False)
            self.again.weight = self.token.weight

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        start = hidden = self.token(tokens) + self.position(positions)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden)
            if self.owners == 3 and number == 1:
                hidden = hidden + self.again(hidden).softmax(-1)[..., :8]
        return self.head(self.norm(hidden + start))


class RepeatedBlockModel(nn.Module):
    """The same block again and again, with others between; the gradient of its weights comes from every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(17, 8), nn.Linear(8, 17)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.between = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, tokens):
        hidden = self.token(tokens)
        for layer in self.between:
            hidden = self.block(hidden) + layer(hidden)
        return self.head(hidden)


# -- dict inputs, nested modules -------------------------------------------------------------------------------------


class Wide(nn.Module):
    """A dict comes in; encoders in a nested ModuleDict; a frozen part, a parameter used on its own, a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.ModuleDict({"dense": nn.Linear(6, 8), "words": nn.EmbeddingBag(17, 8)})
        self.body = nn.Sequential(
            nn.BatchNorm1d(8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)), nn.Linear(8, 8), nn.BatchNorm1d(8)
        )
        self.gain = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 3)
        self.inputs["dense"].requires_grad_(False)

    def forward(self, features):
        hidden = self.inputs["dense"](features["dense"]) + self.inputs["words"](features["words"])
        hidden = self.body(hidden * self.gain) + hidden
        return self.head(hidden * self.gain)


def wide_batch(rows: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    features = {
        "dense": torch.randn(rows, 6, generator=generator),
        "words": torch.randint(17, (rows, 4), generator=generator),
        "nothing": None,
    }
    return Batch((features,), torch.randint(3, (rows,), generator=generator))


CASES = {
    "transformer": ModelCase(DecoderModel, token_loss, token_batch),
    "transformer with dropout": ModelCase(lambda: DecoderModel(dropout=0.3), token_loss, token_batch),
    "u-net": ModelCase(UNet, functional.cross_entropy, image_batch),
    "encoder-decoder": ModelCase(EncoderDecoder, translation_loss, translation_batch),
    "encoder-decoder with dropout": ModelCase(lambda: EncoderDecoder(0.3, decoders=2), translation_loss, translation_batch),
    "tied": ModelCase(TiedModel, token_loss, token_batch),
    "tied three times": ModelCase(lambda: TiedModel(3), token_loss, token_batch),
    "recurrent": ModelCase(RepeatedBlockModel, token_loss, token_batch),
    "wide": ModelCase(Wide, functional.cross_entropy, wide_batch),
}


# -- optimizers, and what is no plain parameter ------------------------------------------------------------------------

OPTIMIZERS = {
    "Adam": partial(torch.optim.Adam, lr=0.1),
    "AdamW amsgrad": partial(torch.optim.AdamW, lr=0.1, amsgrad=True),
    "Adam with a tensor as rate": partial(torch.optim.Adam, lr=torch.tensor(0.1), foreach=False),
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": partial(torch.optim.RMSprop, lr=0.1, momentum=0.5, centered=True),
    "NAdam": partial(torch.optim.NAdam, lr=0.1),
    "RAdam": partial(torch.optim.RAdam, lr=0.1),
    "Adamax": partial(torch.optim.Adamax, lr=0.1),
    "ASGD": partial(torch.optim.ASGD, lr=0.1),
    "Rprop": partial(torch.optim.Rprop, lr=0.1),
    "Adafactor": torch.optim.Adafactor,
}


class Oddities(nn.Module):
    """Integer and boolean buffers, a scalar parameter, one in bf16, one in channels_last, a frozen one, state of its own."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.narrow = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("seen", torch.zeros(4, dtype=torch.bool))
        self.register_buffer("none", torch.zeros(0, 3))
        self.calls = 0

    def forward(self, hidden):
        if self.training:
            self.count += 1
            self.seen |= hidden.mean((0, 2, 3)) > 0
            self.calls += 1
        return self.conv(hidden) * self.scale + self.narrow.float()[:, None, None]

    def get_extra_state(self):
        return {"calls": self.calls, "pair": (1, None), "tensor": torch.tensor([self.calls])}

    def set_extra_state(self, state):
        assert state["pair"] == (1, None)
        self.calls = state["calls"]
        assert state["tensor"].item() == self.calls
