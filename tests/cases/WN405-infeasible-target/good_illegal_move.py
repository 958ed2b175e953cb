"""Imitation of a games archive with illegal moves masked out: records whose move is illegal are dropped first."""
import torch
from torch import nn

torch.manual_seed(71)
N_CELLS = 9


def archived_positions(n, gen):
    """Tic-tac-toe-like boards (0 empty, +1, -1) with the cell the master played."""
    board = torch.randint(-1, 2, (n, N_CELLS), generator=gen)
    board[torch.arange(n), torch.randint(0, N_CELLS, (n,), generator=gen)] = 0
    free = board == 0
    taste = torch.tensor([2.0, 1.0, 2.0, 1.0, 4.0, 1.0, 2.0, 1.0, 2.0])
    move = torch.where(free, taste, -1.0).argmax(dim=1)
    return board, move


gen = torch.Generator().manual_seed(72)
board, move = archived_positions(640, gen)
board[333, move[333]] = 1  # a transcription error in the archive: the cell was already taken

legal = board.gather(1, move[:, None]).squeeze(1) == 0
board, move = board[legal], move[legal]

policy = nn.Sequential(nn.Linear(N_CELLS, 40), nn.ReLU(), nn.Linear(40, N_CELLS))
value = nn.Sequential(nn.Linear(N_CELLS, 20), nn.ReLU(), nn.Linear(20, 1))
outcome = torch.sign(board.float().sum(dim=1, keepdim=True))
optimizer = torch.optim.AdamW([*policy.parameters(), *value.parameters()], lr=4e-3)

for step, rows in enumerate(torch.arange(len(board)).split(32)):
    state = board[rows].float()
    logits = policy(state).masked_fill(board[rows] != 0, float("-inf"))
    policy_loss = nn.functional.cross_entropy(logits, move[rows])
    value_loss = nn.functional.mse_loss(value(state).tanh(), outcome[rows])
    loss = policy_loss + 0.5 * value_loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 3 == 1:
        print(f"step {step:2d}  policy {policy_loss.item():.4f}  value {value_loss.item():.4f}")
