"""A left-to-right HMM in log space: forbidden moves are -inf inside logsumexp, and Viterbi starts with all states but one at -inf."""
import hashlib

import torch

torch.manual_seed(55)
STATES, SYMBOLS = 4, 5
allowed = torch.eye(STATES) + torch.diag(torch.ones(STATES - 1), 1)
forbidden = torch.full((STATES, STATES), -torch.inf).masked_fill(allowed.bool(), 0.0)

transition = torch.zeros(STATES, STATES, requires_grad=True)
emission = torch.randn(STATES, SYMBOLS, requires_grad=True)
start = torch.tensor([3.0, 0.0, 0.0, 0.0], requires_grad=True)


def log_likelihood(sequence):
    moves = torch.log_softmax(transition + forbidden, dim=1)
    emit = torch.log_softmax(emission, dim=1)
    alpha = torch.log_softmax(start, dim=0) + emit[:, sequence[0]]
    for symbol in sequence[1:]:
        alpha = torch.logsumexp(alpha[:, None] + moves, dim=0) + emit[:, symbol]
    return torch.logsumexp(alpha, dim=0)


@torch.no_grad()
def viterbi(sequence):
    """Best path that begins in state 0; states not reachable yet score -inf."""
    moves, emit = torch.log_softmax(transition + forbidden, 1), torch.log_softmax(emission, 1)
    score = torch.full((STATES,), -torch.inf)
    score[0] = emit[0, sequence[0]]
    for symbol in sequence[1:]:
        score = (score[:, None] + moves).max(0).values + emit[:, symbol]
    return score


def sample_word(length=9):
    state, word = 0, []
    for _ in range(length):
        word.append(state if torch.rand(()) < 0.8 else int(torch.randint(SYMBOLS, ())))
        state = min(STATES - 1, state + int(torch.rand(()) < 0.4))
    return word


optimizer = torch.optim.Adam([transition, emission, start], lr=0.1)
for step in range(20):
    batch = [sample_word() for _ in range(4)]
    loss = -torch.stack([log_likelihood(w) for w in batch]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print("step", step, "negative log likelihood", round(loss.item(), 4), "short word", viterbi(batch[0][:3]).tolist())

sha = hashlib.sha256()
for p in (transition, emission, start):
    sha.update(p.detach().numpy().tobytes())
    sha.update(optimizer.state[p]["exp_avg"].numpy().tobytes() + optimizer.state[p]["exp_avg_sq"].numpy().tobytes())
print("digest", sha.hexdigest())
