"""Two small models with their data, made here: what methods of distributed optimisation are compared on.

    placement fit examples/fit_models.py:cnn --cluster 8xV100-nvlink --methods sync,local_sgd:period=8 --until loss=0.5

Each function returns the model and all its samples; the model's output is the loss, the mean over samples. Run by
itself this file fits both with SGD on one device.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES, SIDE = 10, 12
LETTERS = 32  # of a sample


class SmallCnn(nn.Module):
    """Two convolutions and a linear layer: 2,698 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.head = nn.Linear(16 * (SIDE // 4) ** 2, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.features(images).flatten(1)), labels)


class CharTransformer(nn.Module):
    """One block of causal attention over the letters of a text."""

    def __init__(self, letters: int, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.letter, self.place = nn.Embedding(letters, width), nn.Embedding(LETTERS, width)
        self.attention_norm, self.wide_norm, self.last_norm = (nn.LayerNorm(width) for _ in range(3))
        self.queries_keys_values, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, letters)

    def forward(self, letters: Tensor, following: Tensor) -> Tensor:
        states = self.letter(letters) + self.place.weight
        split = self.queries_keys_values(self.attention_norm(states)).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = split.transpose(1, 3).unbind(2)  # each [samples, heads, letters, width of a head]
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        states = states + self.mixed(attended.transpose(1, 2).flatten(2))
        states = states + self.wide(self.wide_norm(states))
        return functional.cross_entropy(self.head(self.last_norm(states)).flatten(0, 1), following.flatten())


def cnn(samples: int = 4096, noise: float = 2.0, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A CNN on images 1 x 12 x 12: of each class a smooth pattern, moved by up to a pixel, under noise."""
    torch.manual_seed(seed)
    patterns = functional.interpolate(torch.randn(CLASSES, 1, 4, 4), size=SIDE, mode="bilinear")
    labels = torch.randint(CLASSES, (samples,))
    images = patterns[labels]
    moves = torch.randint(-1, 2, (samples, 2)).tolist()
    images = torch.stack(
        [image.roll((down, right), (1, 2)) for image, (down, right) in zip(images, moves, strict=True)]
    )
    return SmallCnn(), (images + noise * torch.randn(images.shape), labels)


def char_transformer(seed: int = 0) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A transformer that foretells the next letter of this project's licence; a sample is 32 letters in a row."""
    text = (Path(__file__).resolve().parent.parent / "LICENSE").read_text(encoding="utf-8")
    known = sorted(set(text))
    letters = torch.tensor([known.index(letter) for letter in text])
    torch.manual_seed(seed)
    begins = torch.randperm(len(letters) - LETTERS)[:4096]
    windows = letters.unfold(0, LETTERS + 1, 1)[begins]
    return CharTransformer(len(known)), (windows[:, :-1], windows[:, 1:])


def main() -> None:
    """The loss of both at the start, and after 60 mini-batches of 32 samples."""
    for make, rate in ((cnn, 0.1), (char_transformer, 0.5)):
        model, data = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        losses = []
        for chosen in torch.arange(61 * 32).view(61, 32):
            loss = model(*(each[chosen] for each in data))
            optimizer.zero_grad(), loss.backward(), optimizer.step()
            losses.append(loss.item())
        print(f"{make.__name__}: loss {losses[0]:.2f}, after 60 updates {losses[-1]:.2f}")


if __name__ == "__main__":
    main()
