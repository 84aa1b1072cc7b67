"""What a model should say, by transformers; run by an engine environment's Python.

One JSON object per line. In: `model` (a folder), `prompt` (ids), and `count`, `tokens` or
neither. With neither out come the `logprobs` of the prompt's ids, the first of which has none. With
`count` out comes the greedy continuation: `token_ids`, their `logprobs`, and `margins`, by how much
each token's logit beats the second best. With `tokens` out comes what would greedily stand in the
place of each of them, given all before it: `best` and `margins`. The rule of this file: no cache
and no batch, every token from a full forward pass.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import torch
import transformers

__all__ = ("main",)


def main() -> None:
    """Answer lines of standard input until it ends."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        question = json.loads(line)
        if "tokens" in question:
            answer = replay(**question)
        else:
            answer = greedy(**question) if "count" in question else score(**question)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


@functools.cache
def load(model: str) -> Any:
    """The model in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.inference_mode()
def greedy(model: str, prompt: list[int], count: int) -> dict[str, Any]:
    """The greedy continuation."""
    ids, logprobs, margins = list(prompt), [], []
    for _ in range(count):
        logits = load(model)(torch.tensor([ids]), use_cache=False).logits[0, -1]
        best = logits.topk(2)
        ids.append(int(best.indices[0]))
        logprobs.append(float(logits.log_softmax(-1)[ids[-1]]))
        margins.append(float(best.values[0] - best.values[1]))
    return {"token_ids": ids[len(prompt) :], "logprobs": logprobs, "margins": margins}


@torch.inference_mode()
def replay(model: str, prompt: list[int], tokens: list[int]) -> dict[str, Any]:
    """What would stand in the place of each token."""
    logits = load(model)(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
    best = logits[len(prompt) - 1 : -1].topk(2)
    margins = best.values[:, 0] - best.values[:, 1]
    return {"best": best.indices[:, 0].tolist(), "margins": margins.tolist()}


@torch.inference_mode()
def score(model: str, prompt: list[int]) -> dict[str, Any]:
    """The log-probability of each id given those before it."""
    logits = load(model)(torch.tensor([prompt]), use_cache=False).logits[0]
    rows = logits[:-1].log_softmax(-1)
    scores = rows.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    return {"logprobs": [None, *scores.tolist()]}


if __name__ == "__main__":
    main()
