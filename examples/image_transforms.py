"""How do I train on folders of images, one for each domain, with transforms?

The images lie in <domain>/<class>/, in several sizes, as those of DomainNet do. They are read when
a batch needs them, resized, and turned a little in training. A function of one image, such as a
transform of torchvision.transforms.v2, stands beside the transforms of Fedquilt.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor

import fedquilt as fq
from fedquilt import transforms as T


def save_domains(folder: Path) -> None:
    """Digits in two domains, small and large, where the large ones are dark on white."""
    digits = load_digits(n_class=4)
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        image, domain = Image.fromarray((pixels * 15).astype("uint8")), "small"
        if number % 2:
            image, domain = image.resize((20, 24)).point(lambda x: 255 - x), "large"
        path = folder / domain / str(label) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)


def add_noise(image: Tensor) -> Tensor:
    return (image + 0.05 * torch.randn_like(image)).clamp(0, 1)


def main() -> None:
    first, last = [T.Resize(12), T.Grayscale()], [T.Normalize((0.4,), (0.3,))]
    model = fq.make_model("mlp", {"image_size": 12, "hidden": [32], "num_classes": 4})
    with TemporaryDirectory() as folder:
        save_domains(Path(folder))
        source = fq.load_dataset(folder)
        clients = fq.make_clients(
            source.train,
            partition="domain",
            count=4,
            groups=(source.groups_train, None),
            test_fraction=0.2,
            budgets=[1, 0.5],
            transforms=[*first, T.Rotation(15), T.ColorJitter(contrast=0.3), add_noise, *last],
            test_transforms=[*first, *last],
        )
        run = fq.train(model, torch.zeros(1, 1, 12, 12), "heterofl", clients, rounds=4, workers=0)
    print("feed the model", *run.info.transforms, run.info.normalization)
    for score in run.scores:
        print(f"width {score.width:g}: local accuracy {score.local_accuracy:.2f}")


if __name__ == "__main__":
    main()
