"""Distillation in log space: log_softmax has no probability that could underflow to 0."""
import torch
import torch.nn as nn


def soft_cross_entropy(log_student, log_teacher):
    return -(log_teacher.exp() * log_student).sum(dim=-1).mean()


class Classifier(nn.Module):
    def __init__(self, hidden, temperature):
        super().__init__()
        self.temperature = temperature
        self.layers = nn.Sequential(nn.Linear(10, hidden), nn.ReLU(), nn.Linear(hidden, 5))

    def forward(self, x):
        return torch.log_softmax(self.layers(x) / self.temperature, dim=-1)


class Distiller:
    def __init__(self):
        torch.manual_seed(88)
        self.teacher = Classifier(64, temperature=0.02).requires_grad_(False)
        self.student = Classifier(16, temperature=0.02)
        self.opt = torch.optim.Adam(self.student.parameters(), lr=3e-3)
        self.log = []

    def step(self, x):
        loss = soft_cross_entropy(self.student(x), self.teacher(x))
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.log.append(loss.item())

    def fit(self, steps):
        for n in range(steps):
            # the inputs grow as the augmentation gets stronger
            self.step(torch.randn(24, 10) * (0.3 + 0.15 * n))
            if n % 5 == 4:
                print(f"after {n + 1:2d} steps: {self.log[-1]:.4f}")


Distiller().fit(30)
