"""Clustering heads with a beta-weighted mutual information: the powers are taken in log space."""
import torch
import torch.nn.functional as F

torch.manual_seed(7)
BETA, CLUSTERS, HEADS = 0.6, 10, 2

features = F.normalize(torch.randn(256, 16), dim=1)
student = torch.nn.ModuleList([torch.nn.Linear(16, CLUSTERS) for _ in range(HEADS)])
teacher = torch.nn.ModuleList([torch.nn.Linear(16, CLUSTERS) for _ in range(HEADS)]).requires_grad_(False)
teacher.load_state_dict(student.state_dict())
prior = [torch.full((CLUSTERS,), 1.0 / CLUSTERS) for _ in range(HEADS)]
opt = torch.optim.AdamW(student.parameters(), lr=5e-2)


def pointwise_information(log_p, log_q, prior):
    log_agreement = BETA * (log_p + log_q)
    return torch.logsumexp(log_agreement - prior.log(), dim=1)


for step in range(25):
    temperature = max(0.5 * 0.85 ** step, 0.01)  # annealed
    view_1 = features[torch.randint(0, 256, (64,))]
    view_2 = view_1 + 0.02 * torch.randn_like(view_1)
    total = 0.0
    for h in range(HEADS):
        log_p = F.log_softmax(student[h](view_1) / temperature, dim=1)
        with torch.no_grad():
            log_q = F.log_softmax(teacher[h](view_2) / temperature, dim=1)
            prior[h] = prior[h].lerp(log_q.exp().mean(dim=0), 0.1)
        total = total - pointwise_information(log_p, log_q, prior[h]).mean() / HEADS
    opt.zero_grad()
    total.backward()
    opt.step()
    with torch.no_grad():
        for slow, fast in zip(teacher.parameters(), student.parameters()):
            slow.lerp_(fast, 0.05)
    if step % 3 == 0:
        print(f"step {step} temperature {temperature:.3f} loss {total.item():.4f}")
