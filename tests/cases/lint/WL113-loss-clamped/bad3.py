import torch


class T:
    def step(self):
        return torch.clamp_max(self.loss, 5.0)  # expect: WL113
