"""An image denoiser with nn.MultiheadAttention over captions: a caption that is all padding leaves no key to attend to."""
import torch
import torch.nn as nn


class CaptionBlock(nn.Module):
    """Image tokens look at the caption, residually."""

    def __init__(self, dim=32):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.cross = nn.MultiheadAttention(dim, num_heads=2, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 64), nn.SiLU(), nn.Linear(64, dim))

    def forward(self, image, caption, caption_pad):
        looked_up, _ = self.cross(self.norm(image), caption, caption, key_padding_mask=caption_pad)  # <- WN401 forward
        image = image + looked_up
        return image + self.mlp(image)


class Denoiser(nn.Module):
    def __init__(self, dim=32, vocab=40):
        super().__init__()
        self.words = nn.Embedding(vocab, dim, padding_idx=0)
        self.inp = nn.Linear(8, dim)
        self.blocks = nn.ModuleList([CaptionBlock(dim), CaptionBlock(dim)])
        self.outp = nn.Linear(dim, 8)

    def forward(self, patches, words):
        pad = words.eq(0)
        text = self.words(words)
        hidden = self.inp(patches)
        for block in self.blocks:
            hidden = block(hidden, text, pad)
        return self.outp(hidden)


class Trainer:
    def __init__(self, model, lr=2e-3):
        self.model = model
        self.opt = torch.optim.Adam(model.parameters(), lr=lr)
        self.gen = torch.Generator().manual_seed(42)

    def batch(self, n=8):
        clean = torch.randn(n, 9, 8, generator=self.gen)
        words = torch.randint(1, 40, (n, 5), generator=self.gen)
        keep = torch.randint(1, 6, (n,), generator=self.gen)
        # Classifier-free guidance: now and then the caption is dropped.
        keep[torch.rand(n, generator=self.gen) < 0.01] = 0
        words[torch.arange(5) >= keep.unsqueeze(1)] = 0
        return clean, words

    def fit(self, steps):
        for step in range(1, steps + 1):
            clean, words = self.batch()
            noise = torch.randn(clean.shape, generator=self.gen)
            predicted = self.model(0.7 * clean + 0.7 * noise, words)
            loss = (predicted - noise).square().mean()
            self.opt.zero_grad(set_to_none=True)
            loss.backward()
            self.opt.step()
            if step % 5 == 0:
                print("step", step, "mse", round(loss.item(), 4))


if __name__ == "__main__":
    torch.manual_seed(1)
    Trainer(Denoiser()).fit(30)
