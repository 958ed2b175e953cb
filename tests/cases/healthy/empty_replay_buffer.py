"""A DQN whose replay buffer is torch.empty memory, filled as the agent walks; deterministic mode writes NaN into the unfilled part."""
import copy
import hashlib
import random

import torch
import torch.nn as nn

torch.use_deterministic_algorithms(True)
torch.manual_seed(5)
random.seed(5)
CAPACITY, STATE = 512, 4


class Replay:
    def __init__(self):
        self.state = torch.empty(CAPACITY, STATE)
        self.next_state = self.state.new_empty(CAPACITY, STATE)
        self.action = torch.empty(CAPACITY, dtype=torch.long)
        self.reward = torch.empty(CAPACITY)
        self.done = torch.empty(CAPACITY)
        self.size = 0

    def push(self, s, a, r, s2, d):
        i = self.size % CAPACITY
        self.state[i], self.action[i], self.reward[i], self.next_state[i], self.done[i] = s, a, r, s2, d
        self.size += 1

    def sample(self, n):
        i = torch.randint(0, min(self.size, CAPACITY), (n,))
        return self.state[i], self.action[i], self.reward[i], self.next_state[i], self.done[i]


def world(s, a):
    s2 = 0.9 * s + 0.1 * torch.roll(s, 1)
    s2[0] += 0.2 if a == 1 else -0.2
    return s2, -s2[0].abs().item(), float(s2[0].abs() > 2)


q = nn.Sequential(nn.Linear(STATE, 32), nn.ReLU(), nn.Linear(32, 2))
target = copy.deepcopy(q).requires_grad_(False)
optimizer = torch.optim.Adam(q.parameters(), lr=1e-3)
memory = Replay()
s = torch.randn(STATE)
for t in range(160):
    with torch.no_grad():
        a = random.randrange(2) if random.random() < 0.3 else int(q(s).argmax())
    s2, r, d = world(s, a)
    memory.push(s, a, r, s2, d)
    s = torch.randn(STATE) if d else s2
    if memory.size < 32 or t % 2:
        continue
    bs, ba, br, bs2, bd = memory.sample(16)
    with torch.no_grad():
        goal = br + 0.95 * (1 - bd) * target(bs2).max(1).values
    loss = nn.functional.smooth_l1_loss(q(bs).gather(1, ba[:, None]).squeeze(1), goal)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for slow, fast in zip(target.parameters(), q.parameters()):
        slow.data.lerp_(fast.data, 0.05)
    if t % 40 == 0:
        print("t", t, "loss", round(loss.item(), 5), "stored", memory.size)

sha = hashlib.sha256()
for tensor in [*q.parameters(), *target.parameters(), *(v for st in optimizer.state.values() for v in st.values())]:
    sha.update(tensor.detach().numpy().tobytes())
print("digest", sha.hexdigest())
