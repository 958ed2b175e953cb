import torch


class Trainer:
    def resume(self, state):
        self.scheduler.load_state_dict(state["scheduler"])  # expect: WN607
