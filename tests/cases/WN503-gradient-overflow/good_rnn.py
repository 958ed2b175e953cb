"""A tanh RNN with an orthogonal recurrent matrix: 300 steps of backpropagation neither blow up nor lose the gradient."""
import torch
import torch.nn as nn


class OrthogonalRNN(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(2, hidden) / 2)
        self.w_rec = nn.Parameter(nn.init.orthogonal_(torch.empty(hidden, hidden)))
        self.readout = nn.Linear(hidden, 1)

    def forward(self, signal):
        h = torch.zeros(signal.shape[0], self.w_rec.shape[0])
        for x in signal.unbind(dim=1):
            h = torch.tanh(x @ self.w_in + h @ self.w_rec)
        return self.readout(h).squeeze(-1)


def adding_problem(n, length):
    number = torch.rand(n, length)
    flag = torch.zeros(n, length)
    flag[torch.arange(n), torch.randint(0, length // 2, (n,))] = 1.0
    flag[torch.arange(n), torch.randint(length // 2, length, (n,))] = 1.0
    return torch.stack([number, flag], dim=-1), (number * flag).sum(dim=1)


torch.manual_seed(70)
rnn = OrthogonalRNN()
optimizer = torch.optim.SGD(rnn.parameters(), lr=1e-3)
for step, length in enumerate([10, 20, 30, 40, 50, 60, 80, 100, 300, 300, 300]):
    signal, answer = adding_problem(8, length)
    loss = torch.nn.functional.mse_loss(rnn(signal), answer)
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(rnn.parameters(), 1.0)
    optimizer.step()
    print(f"step {step:2d} length {length:3d} loss {loss.item():.4f} gradient norm {norm.item():.3g}")
