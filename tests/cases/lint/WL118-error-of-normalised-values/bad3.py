import torch
import torch.nn.functional as F


def distill_loss(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    s = F.layer_norm(student, student.shape[-1:])
    t = F.layer_norm(teacher, teacher.shape[-1:])
    return (s - t).pow(2).mean()  # expect: WL118
