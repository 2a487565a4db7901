"""HeteroFL's Transformer (Diao et al., ICLR 2021, Tables 3 and 6): masked words of WikiText-2.

A plain module that knows nothing of federated learning. Scaling is put around it by the method.
It hides tokens itself, as the public code does: drawn anew in every forward, also in evaluation,
from PyTorch's default generator, so that a seed settles it. The loss is meant for all positions,
not only for hidden ones: the targets are the tokens themselves.

    level                    a          b          c          d          e
    33,278 tokens   19,263,486  9,107,710  4,435,326  2,200,510  1,108,446
    33,279          19,263,999  9,107,967  4,435,455  2,200,575  1,108,479

The first row is WikiText-2's vocabulary. The paper's sizes in MB (73.49, 34.74, 16.92, 8.39, 4.23)
are the second: its vocabulary has a word for unknown ones besides the one in the text.

In the public code all layers of the encoder start alike, being copies of one. Here each is drawn.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedquilt.models.heterofl import initialize
from fedquilt.models.initialization import reinitialize
from fedquilt.models.nefl import scale_widths


class SmallLinear(nn.Linear):
    """A linear layer whose weights start small."""

    def reset_parameters(self) -> None:
        """Draws weights from N(0, 0.02²); the bias is 0."""
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)


class Attention(nn.Module):
    """Self-attention of several heads, each layer of its own."""

    def __init__(self, dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, heads * head_dim)
        self.k = nn.Linear(dim, heads * head_dim)
        self.v = nn.Linear(dim, heads * head_dim)
        self.o = nn.Linear(heads * head_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """What every token hears from all."""
        q, k, v = (
            layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )  # (batch, heads, tokens, head_dim)
        heard = F.scaled_dot_product_attention(q, k, v)
        return self.o(heard.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class EncoderLayer(nn.Module):
    """Attention and a perceptron with shortcuts, each sum normalized."""

    def __init__(self, dim: int, heads: int, head_dim: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(dim, heads, head_dim)
        self.norm1 = nn.LayerNorm(dim)
        self.linear1 = SmallLinear(dim, hidden)
        self.linear2 = SmallLinear(hidden, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens of the same size."""
        x = self.norm1(x + self.dropout(self.attention(x)))
        inner = self.linear2(self.dropout(F.gelu(self.linear1(x))))
        return self.norm2(x + self.dropout(inner))  # type: ignore[no-any-return]


class MaskedTransformer(nn.Module):
    """An encoder that hides some of its tokens and says for every position which token was there.

    Tokens are 0 to ``num_classes`` − 1; hidden ones are read as one more. ``length`` is how many
    positions are known, ``mask_rate`` the share of tokens that are hidden. ``width`` narrows
    tokens, heads and perceptrons; the number of heads stays.
    """

    def __init__(
        self,
        num_classes: int = 33278,
        length: int = 64,
        dim: int = 256,
        hidden: int = 512,
        layers: int = 4,
        heads: int = 8,
        dropout: float = 0.2,
        mask_rate: float = 0.15,
        width: float = 1.0,
    ) -> None:
        super().__init__()
        counts = (num_classes, length, layers)
        if min(counts) < 1:
            raise ValueError(
                f"num_classes, length and layers are at least 1, got {', '.join(map(str, counts))}"
            )
        if heads < 1 or dim % heads:
            raise ValueError(
                f"heads share the dim equally, got dim {dim} and {heads} heads; choose a dim that "
                "is a multiple of heads"
            )
        if not 0 <= mask_rate <= 1:
            raise ValueError(f"mask_rate is a fraction in [0, 1], got {mask_rate}")
        dim, head_dim, hidden = scale_widths((dim, dim // heads, hidden), width)
        self.mask_rate = mask_rate
        self.embedding = nn.Embedding(num_classes + 1, dim)
        self.positions = nn.Embedding(length, dim)
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Sequential(
            *(EncoderLayer(dim, heads, head_dim, hidden, dropout) for _ in range(layers))
        )
        self.decoder = nn.Sequential(
            nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim), nn.Linear(dim, num_classes)
        )
        initialize(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, length, classes) for tokens (batch, length)."""
        if tokens.shape[1] > self.positions.num_embeddings:
            raise ValueError(
                f"the net knows {self.positions.num_embeddings} positions, got "
                f"{tokens.shape[1]} tokens a text; cut texts, or make it with a larger length"
            )
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(self.mask_tokens(tokens)) + self.positions(places)
        return self.decoder(self.layers(self.dropout(self.norm(x))))  # type: ignore[no-any-return]

    def mask_tokens(self, tokens: Tensor) -> Tensor:
        """The tokens, of which some are replaced by the one that stands for all hidden ones."""
        hidden = torch.rand(tokens.shape, device=tokens.device) < self.mask_rate
        return tokens.masked_fill(hidden, self.embedding.num_embeddings - 1)

    def reset_parameters(self) -> None:
        """Draws all initial values again."""
        reinitialize(self)
        initialize(self)
