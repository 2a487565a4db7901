"""The nets of ADDS (Gong et al., Sec. 4.1.3 and Table 2): two for images, and an LSTM for text.

Plain modules that know nothing of federated learning. There is no public code; the sizes are those
of the table, and what it leaves open is settled so that its figures come out:

    parameters      convolutions        linear           both  normalization
    VGG                  369,216     5,308,478      5,677,694            896    62 classes
    MobileNet            444,544     9,502,782      9,947,326          2,944    62 classes
                                     9,441,282      9,885,826                    2 classes

    MACs            convolutions        linear           both
    VGG               29,352,960     5,306,368     34,659,328    28×28
    MobileNet        114,978,304     9,500,672    124,478,976    112×112, 62 classes
                                     9,439,232    124,417,536     2 classes

The table's VGG (369.22K, 5.31M, 5.68M; 29.37M, 34.68M) is this one, where rectified numbers count
one each. Its MobileNet (444.63K, 9.50M, 9.95M; 114.96M, 124.46M) was counted with 62 classes, and
is this one but for 86 parameters and 18 K MACs, 0.02 % of the convolutions, that no reading
explains. Initial values are PyTorch's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedquilt.models.initialization import reinitialize
from fedquilt.models.nefl import scale_widths

DENSE = (1024, 1024)


def make_separable(channels: int, size: int) -> list[nn.Module]:
    """A 3×3 convolution of every channel by itself, and one of 1×1 across channels."""
    return [
        nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False),
        nn.Conv2d(channels, size, 1, bias=False),
    ]


class ConvNet(nn.Module):
    """3×3 convolutions that are normalized and pooled, and three linear layers.

    The order is ReLU-Conv-BN, so each layer but the first rectifies what it is given; images are
    not rectified, for those that are standardised would lose their dark half. Pooling rounds up:
    28×28 becomes 14, 7 and 4. ``is_separable`` is MobileNet's (Howard et al., 2017), where all
    convolutions but the first are separable; between their two halves is nothing.
    """

    def __init__(
        self,
        channels: Sequence[int],
        in_channels: int,
        num_classes: int,
        image_size: int,
        width: float = 1.0,
        *,
        is_separable: bool = False,
    ) -> None:
        super().__init__()
        counts = (in_channels, num_classes, image_size)
        if min(counts) < 1:
            raise ValueError(
                "in_channels, num_classes and image_size are at least 1, got "
                f"{', '.join(map(str, counts))}"
            )
        layers: list[nn.Module] = []
        before = in_channels
        for size in scale_widths(channels, width):
            if not layers:
                layers.append(nn.Conv2d(before, size, 3, padding=1, bias=False))
            elif is_separable:
                layers += [nn.ReLU(), *make_separable(before, size)]
            else:
                layers += [nn.ReLU(), nn.Conv2d(before, size, 3, padding=1, bias=False)]
            layers += [nn.BatchNorm2d(size), nn.MaxPool2d(2, ceil_mode=True)]
            before, image_size = size, (image_size + 1) // 2
        self.features = nn.Sequential(*layers)
        layers, before = [nn.Flatten()], before * image_size**2
        for size in (*scale_widths(DENSE, width), num_classes):
            layers += [nn.ReLU(), nn.Linear(before, size)]
            before = size
        self.classifier = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.classifier(self.features(x))  # type: ignore[no-any-return]

    def reset_parameters(self) -> None:
        """Draws all initial values again."""
        reinitialize(self)


class VGG(ConvNet):
    """The net of FEMNIST: three convolutions, for images of 28×28."""

    def __init__(
        self,
        in_channels: int = 1,
        num_classes: int = 62,
        image_size: int = 28,
        width: float = 1.0,
    ) -> None:
        super().__init__((64, 128, 256), in_channels, num_classes, image_size, width)


class MobileNet(ConvNet):
    """The net of FedCelebA: five convolutions, four of them separable, for images of 112×112."""

    def __init__(
        self,
        in_channels: int = 3,
        num_classes: int = 2,
        image_size: int = 112,
        width: float = 1.0,
    ) -> None:
        channels = (64, 128, 256, 512, 512)
        super().__init__(channels, in_channels, num_classes, image_size, width, is_separable=True)


class TextLSTM(nn.Module):
    """A class for each text: an embedding, an LSTM of two layers, and two linear layers.

    By default the net of Shakespeare: the token that follows 80 others, of which 32 numbers are
    known each. The class is read off the last state of each direction. A net of one direction may
    also predict the next token at ``every_position``: logits are (batch, length, classes) then.
    One of two directions has read that token before, so this is refused.

    ``vocabulary`` is how many tokens there are to read, as many as classes if it is None.
    ``vectors`` are known embeddings, one row a token, as GloVe's for Sentiment140; no reset draws
    them again. ``frozen`` embeddings are not trained. The paper names no layer between the LSTM
    and the classes; without one (``head`` units) nothing is left to cut where recurrent layers and
    what they read stay whole.
    """

    def __init__(
        self,
        num_classes: int = 80,
        vocabulary: int | None = None,
        embedding: int = 32,
        hidden: int = 256,
        head: int = 256,
        *,
        bidirectional: bool = True,
        every_position: bool = False,
        vectors: Tensor | Sequence[Sequence[float]] | None = None,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        vocabulary = num_classes if vocabulary is None else vocabulary
        sizes = (num_classes, vocabulary, embedding, hidden, head)
        if min(sizes) < 1:
            raise ValueError(
                "num_classes, vocabulary, embedding, hidden and head are at least 1, got "
                f"{', '.join(map(str, sizes))}"
            )
        if bidirectional and every_position:
            raise ValueError(
                "a bidirectional LSTM has read the token that follows each position; set "
                "bidirectional = false to predict at every_position"
            )
        given = None if vectors is None else torch.as_tensor(vectors).detach().float().clone()
        if given is not None and given.shape != (vocabulary, embedding):
            raise ValueError(
                f"vectors are {vocabulary}×{embedding}, the vocabulary by the embedding, got "
                f"{'×'.join(map(str, given.shape))}"
            )
        self.every_position, self.has_vectors = every_position, given is not None
        self.embedding = nn.Embedding(vocabulary, embedding, _weight=given)
        self.embedding.weight.requires_grad_(not frozen)
        self.lstm = nn.LSTM(
            embedding, hidden, num_layers=2, batch_first=True, bidirectional=bidirectional
        )
        self.head = nn.Linear(hidden * (1 + bidirectional), head)
        self.classifier = nn.Linear(head, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits for tokens (batch, length)."""
        outputs, (last, _) = self.lstm(self.embedding(tokens))
        if not self.every_position:  # last: (layers and directions, batch, hidden)
            outputs = torch.cat((last[-2], last[-1]), 1) if self.lstm.bidirectional else last[-1]
        return self.classifier(F.relu(self.head(outputs)))  # type: ignore[no-any-return]

    def reset_parameters(self) -> None:
        """Draws all initial values again, but for vectors that were given."""
        if not self.has_vectors:
            self.embedding.reset_parameters()
        for layer in (self.lstm, self.head, self.classifier):
            layer.reset_parameters()
