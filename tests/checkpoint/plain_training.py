"""A training for processes without Penstock. Run as a script, it goes on from a folder of torch.distributed.checkpoint."""

import sys

import torch
from torch import nn

STOP, STEPS = 2, 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(5), nn.Tanh()) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(self.norm(hidden))


def loss_fn(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batch(step):
    return torch.randint(11, (8, 5), generator=torch.Generator().manual_seed(step))


def optimizers_of(named, lr=0.02):
    named = list(named)
    muon = torch.optim.Muon([{"params": [p for n, p in named if p.ndim == 2 and "layers" in n]}], lr=lr)
    others = [p for n, p in named if not (p.ndim == 2 and "layers" in n)]
    vectors = {"params": [p for p in others if p.ndim == 1], "weight_decay": 0.0}
    return [muon, torch.optim.AdamW([{"params": [p for p in others if p.ndim != 1]}, vectors], lr=lr)]


def train(model, optimizers, begin, end):
    for step in range(begin, end):
        for tokens in batch(step).chunk(4):
            loss = loss_fn(model(tokens), tokens)
            loss.backward(torch.full_like(loss, 0.25))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


if __name__ == "__main__":
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    folder, out = sys.argv[1:]
    model = Net()
    optimizers = optimizers_of(model.named_parameters(), lr=1.0)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state, optimizer_state = get_state_dict(model, optimizers, options=options)
    dcp.load(state, checkpoint_id=folder)
    dcp.load(optimizer_state, checkpoint_id=folder)
    set_state_dict(model, optimizers, model_state_dict=state, optim_state_dict=optimizer_state, options=options)
    torch.save(train(model, optimizers, STOP, STEPS), out)
    assert "penstock" not in sys.modules
