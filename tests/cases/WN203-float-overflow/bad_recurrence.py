"""A linear recurrent layer with spectral radius above one: fine on short sequences, past float32 on a long one."""
import torch
import torch.nn as nn


class LinearRNN(nn.Module):
    def __init__(self, d_in, d_state):
        super().__init__()
        self.win = nn.Linear(d_in, d_state)
        self.rec = nn.Parameter(1.35 * torch.eye(d_state) + 0.01 * torch.randn(d_state, d_state))
        self.norm = nn.LayerNorm(d_state)
        self.out = nn.Linear(d_state, 1)

    def forward(self, seq):
        state = seq.new_zeros(seq.shape[1], self.rec.shape[0])
        for x_t in seq:
            u = self.win(x_t)
            carried = state @ self.rec  # <- WN203 forward
            state = carried + u
        return self.out(self.norm(state)).squeeze(-1)


def utterance(length, batch=6):
    x = torch.randn(length, batch, 3)
    return x, x[0, :, 0]


torch.manual_seed(127)
rnn = LinearRNN(3, 8)
opt = torch.optim.AdamW(rnn.parameters(), lr=1e-3)
lengths = [12, 20, 16, 25, 18, 30, 14, 22, 28, 15, 24, 19, 320, 17, 21, 26]
for i, n in enumerate(lengths):
    x, y = utterance(n)
    loss = nn.functional.mse_loss(rnn(x), y)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(rnn.parameters(), 1.0)
    opt.step()
    print(f"utterance {i:2d} length {n:3d} loss {loss.item():.4f}")
