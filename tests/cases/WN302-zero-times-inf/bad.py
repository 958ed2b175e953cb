"""Distillation with masked classes: the student's log-probability is -inf where the teacher's is 0, and 0 * -inf is NaN."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def soft_cross_entropy(student_logits, teacher_probs, allowed):
    logits = student_logits.masked_fill(~allowed, float("-inf"))
    log_p = F.log_softmax(logits, dim=-1)
    weighted = teacher_probs * log_p  # <- WN302 loss
    return -weighted.sum(-1).mean()


def make_batch(step):
    x = torch.randn(16, 10)
    allowed = torch.ones(16, 6, dtype=torch.bool)
    if step >= 8:
        # from here on each sample belongs to a region with its own list of labels
        allowed[:, 4:] = x[:, :1] > -1.5
    raw = torch.stack([x[:, i] + x[:, i + 1] for i in range(6)], dim=1)
    teacher = F.softmax(raw.masked_fill(~allowed, float("-inf")), dim=-1)
    return x, teacher, allowed


def main():
    torch.manual_seed(173)
    student = nn.Sequential(nn.Linear(10, 20), nn.GELU(), nn.Linear(20, 6))
    opt = torch.optim.AdamW(student.parameters(), lr=1e-2)
    for step in range(25):
        x, teacher, allowed = make_batch(step)
        loss = soft_cross_entropy(student(x), teacher, allowed)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 2 == 0:
            print(f"step {step:02d} | loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
