import torch


class T:
    def fit(self, data):
        for x in data:
            self.model(x).mean().backward()
            self.opt.step()
        state = self.model.state_dict()
        torch.save(state, self.path)  # expect: WL108
