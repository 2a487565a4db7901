"""How do I train a language model of Hugging Face over clients of three sizes?

A small GPT-2 is made from a configuration, with random weights, and learns to go on with a text.
Needs ``pip install transformers``. The loss shifts the tokens by one. Perplexity is an own metric.
"""

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import fedquilt as fq

TEXT = "one fish two fish red fish blue fish black fish blue fish old fish new fish " * 30
LENGTH = 16


@fq.metric(higher_is_better=False, name="perplexity-per-letter")
def perplexity(output: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """How many letters the model hesitates between."""
    logits, following = output["logits"][:, :-1], tokens[:, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten()).exp()


def main() -> None:
    letters = sorted(set(TEXT))
    tokens = torch.tensor([letters.index(letter) for letter in TEXT])
    passages = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    data = ({"input_ids": passages}, passages)
    clients = fq.make_clients(data, test=data, count=3, budgets=[1, 0.5, 0.25])
    config = GPT2Config(
        vocab_size=len(letters),
        n_positions=LENGTH,
        n_embd=32,
        n_layer=1,
        n_head=2,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    run = fq.train(
        model,
        {"input_ids": passages[:1]},
        fq.HeteroFL(fq.LocalTraining(optimizer="adamw", lr=0.01, epochs=1), fraction=1.0),
        clients,
        rounds=3,
        loss="next-token",
        metrics=[perplexity],
        workers=0,
    )
    for score in run.scores:
        print(f"width {score.width:g}: {score.params:,} parameters, perplexity {score.value:.1f}")


if __name__ == "__main__":
    main()
