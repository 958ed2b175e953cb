"""A tanh recurrent net adds marked numbers with a learning rate it can follow."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Adder(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.rnn = nn.RNN(2, width, batch_first=True)
        self.write = nn.Linear(width, 1)

    def forward(self, sequence):
        states, _ = self.rnn(sequence)
        return self.write(states[:, -1]).squeeze(-1)


def adding_problem(count, length=12):
    values = torch.rand(count, length)
    marks = torch.zeros(count, length)
    picks = torch.rand(count, length).topk(2, dim=1).indices
    marks.scatter_(1, picks, 1.0)
    return torch.stack([values, marks], -1), (values * marks).sum(1)


def half_squared_error(output, wanted):
    miss = output - wanted
    energy = miss * miss
    return 0.5 * energy.mean()


torch.manual_seed(13)
loader = DataLoader(TensorDataset(*adding_problem(640)), batch_size=16, shuffle=True)
model = Adder()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = 0
for epoch in range(2):
    for sequence, total in loader:
        loss = half_squared_error(model(sequence), total)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 6 == 0:
            print("step", step, "loss", f"{loss.item():.4g}", "|write|", f"{model.write.weight.norm().item():.4g}")
        step += 1
