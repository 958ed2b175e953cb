"""Instruction tuning with the prompt ignored: a prompt longer than the context leaves no answer token to train on."""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

IGNORE = -100


@dataclass
class Config:
    vocab: int = 50
    context: int = 16
    width: int = 24
    accumulate: int = 4
    updates: int = 8
    lr: float = 3e-3


class TinyLM(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.tokens = nn.Embedding(cfg.vocab, cfg.width)
        self.positions = nn.Embedding(cfg.context, cfg.width)
        self.block = nn.TransformerEncoderLayer(cfg.width, 4, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.lm_head = nn.Linear(cfg.width, cfg.vocab, bias=False)
        self.lm_head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.1)

    def forward(self, ids):
        length = ids.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.tokens(ids) + self.positions(torch.arange(length))
        return self.lm_head(self.block(hidden, src_mask=causal, is_causal=True))


def tokenize(prompt_len, answer_len, cfg, gen):
    ids = torch.randint(1, cfg.vocab, (prompt_len + answer_len,), generator=gen)
    labels = ids.clone()
    labels[:prompt_len] = IGNORE
    return ids[: cfg.context], labels[: cfg.context]


def conversations(cfg):
    gen = torch.Generator().manual_seed(77)
    while True:
        prompt = int(torch.randint(3, 11, (), generator=gen))
        if torch.rand((), generator=gen) < 0.06:
            prompt += 12  # a user who pasted a whole log file
        answer = int(torch.randint(3, 8, (), generator=gen))
        yield tokenize(prompt, answer, cfg, gen)


class SFTTrainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.model = TinyLM(cfg)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr, weight_decay=0.01)
        self.stream = conversations(cfg)

    def compute_loss(self, ids, labels):
        logits = self.model(ids[None])[0, :-1]
        return F.cross_entropy(logits, labels[1:], ignore_index=IGNORE)  # <- WN402 loss

    def train(self):
        for update in range(self.cfg.updates):
            total = 0.0
            for _ in range(self.cfg.accumulate):
                loss = self.compute_loss(*next(self.stream)) / self.cfg.accumulate
                loss.backward()
                total += loss.item()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            print({"update": update, "loss": round(total, 4)})


if __name__ == "__main__":
    torch.manual_seed(0)
    SFTTrainer(Config()).train()
