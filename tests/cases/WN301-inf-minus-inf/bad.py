"""PPO-style KL penalty between two masked policies: both give -inf to an illegal move and the difference is NaN."""
import torch
import torch.nn as nn

torch.manual_seed(163)
N_MOVES = 9


class BoardPolicy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(N_MOVES, 32), nn.ReLU(), nn.Linear(32, N_MOVES))

    def forward(self, board):
        logits = self.net(board).masked_fill(board != 0, float("-inf"))
        return torch.log_softmax(logits, dim=-1)


def kl(new, old):
    gap = new - old  # <- WN301 loss
    return (old.exp() * -gap).sum(-1).mean()


def boards(step, n=16):
    b = torch.zeros(n, N_MOVES)
    if step >= 12:  # the first phase only practises openings on an empty board
        taken = torch.randint(0, N_MOVES, (n,))
        b[torch.arange(n), taken] = 1.0
    return b


policy, reference = BoardPolicy(), BoardPolicy()
reference.load_state_dict(policy.state_dict())
opt = torch.optim.Adam(policy.parameters(), lr=5e-3)
for step in range(24):
    board = boards(step)
    logp = policy(board)
    with torch.no_grad():
        ref = reference(board)
    move = (8 * torch.rand(16)).long().clamp(max=8)
    free = board.gather(1, move[:, None]).squeeze(1) == 0
    picked = logp.gather(1, move[:, None]).squeeze(1)
    reward = torch.where(move == 4, 1.0, -0.1)
    pg = -(picked[free] * reward[free]).sum() / 16
    loss = pg + 0.1 * kl(logp, ref)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 3 == 0:
        print(f"step {step} loss {loss.item():.4f}")
