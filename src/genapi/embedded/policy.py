"""A causal policy small enough to serve, train and recompute exactly, in numpy alone.

One embedding, one decayed sum of per-position values, one read-out:

    v_j = tanh(W_value @ embed[token_j])
    h_t = decay * h_(t-1) + v_t
    logits_t = W_head @ h_t

Parameters are float32 under Hugging Face style names; every computation is float64. The rule of
this file: the same sequence under the same weights gives the same bits however it is computed
(token by token, from cached values, or in one go). So values are rows of one table per weights,
sums run in position order, and the read-out of a position never depends on what else is in the
batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = (
    "DECAY",
    "EMBED",
    "HEAD",
    "VALUE",
    "Floats",
    "Model",
    "Weights",
    "grad",
    "greedy",
    "init",
    "logits",
    "logprobs",
    "prepare",
    "shapes",
    "values",
)

EMBED = "model.embed_tokens.weight"
VALUE = "model.layers.0.value.weight"
HEAD = "lm_head.weight"
DECAY = 0.9

Floats: TypeAlias = NDArray[np.float64]
Weights: TypeAlias = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """Weights made ready to serve: a value per token and the read-out, in float64."""

    table: Floats
    """Value of each token, shape (vocab, width)."""
    head: Floats
    """Read-out matrix, shape (vocab, width)."""
    decay: float

    def fold(self, h: Floats | None, rows: Sequence[Floats]) -> Floats:
        """Hidden state after `rows` more positions; `h` is None at the start."""
        state = np.zeros(self.table.shape[1]) if h is None else h.copy()
        for row in rows:
            state *= self.decay
            state += row
        return state

    def readout(self, h: Floats) -> Floats:
        """Logits of hidden states of shape (..., width)."""
        scores: Floats = (h[..., None, :] * self.head).sum(axis=-1)
        return scores


def shapes(vocab: int = 64, width: int = 32) -> dict[str, tuple[int, ...]]:
    """Parameter names and shapes, in the order in which they are sent and shown."""
    return {EMBED: (vocab, width), VALUE: (width, width), HEAD: (vocab, width)}


def init(seed: int, *, vocab: int = 64, width: int = 32) -> dict[str, NDArray[np.float32]]:
    """Fresh parameters.

    At temperature 1 the policy is close to uniform. Each token's read-out is turned a little
    against its own value, so that greedy decoding wanders over the vocabulary instead of repeating
    one token.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    embed = rng.standard_normal((vocab, width))
    value = rng.standard_normal((width, width)) / np.sqrt(width)
    head = 0.3 * rng.standard_normal((vocab, width)) / np.sqrt(width)
    head -= 0.2 * np.tanh(embed @ value.T) / np.sqrt(width)
    return {
        EMBED: embed.astype(np.float32),
        VALUE: value.astype(np.float32),
        HEAD: head.astype(np.float32),
    }


def prepare(weights: Weights, *, decay: float = DECAY) -> Model:
    """Compute the value table and the read-out of `weights`."""
    embed, value = weights[EMBED].astype(np.float64), weights[VALUE].astype(np.float64)
    return Model(np.tanh(embed @ value.T), weights[HEAD].astype(np.float64), decay)


def values(weights: Weights, tokens: Sequence[int]) -> Floats:
    """Per-position values of a sequence, shape (len(tokens), width)."""
    table: Floats = prepare(weights).table[np.asarray(tokens, dtype=np.intp)]
    return table


def logits(weights: Weights, tokens: Sequence[int], *, decay: float = DECAY) -> Floats:
    """Logits after each position of a sequence, shape (len(tokens), vocab)."""
    model = prepare(weights, decay=decay)
    hidden = _hidden(model.table[np.asarray(tokens, dtype=np.intp)], decay)
    return model.readout(hidden)


def logprobs(weights: Weights, tokens: ArrayLike, *, decay: float = DECAY) -> Floats:
    """Log-probability of each token given those before it; the first is NaN.

    Batches have shape (..., length).
    """
    ids = np.asarray(tokens, dtype=np.intp)
    model = prepare(weights, decay=decay)
    scores = _log_softmax(_hidden(model.table[ids], decay) @ model.head.T)
    out = np.full(ids.shape, np.nan)
    out[..., 1:] = np.take_along_axis(scores[..., :-1, :], ids[..., 1:, None], axis=-1)[..., 0]
    return out


def greedy(weights: Weights, prompt: Sequence[int], n: int, *, decay: float = DECAY) -> list[int]:
    """The `n` most likely tokens after `prompt`, one after the other; ties go to the lowest id."""
    model = prepare(weights, decay=decay)
    h = model.fold(None, [model.table[token] for token in prompt])
    out: list[int] = []
    for _ in range(n):
        token = int(model.readout(h).argmax())
        out.append(token)
        h = model.fold(h, [model.table[token]])
    return out


def grad(
    weights: Weights,
    tokens: ArrayLike,
    *,
    prompt_len: int,
    coeff_per_token: ArrayLike,
    decay: float = DECAY,
) -> dict[str, Floats]:
    """Gradient of `sum_t coeff_t * log pi(token_t | tokens before it)` over the output tokens.

    Args:
        weights: Parameters at which the gradient is taken.
        tokens: Ids of shape (length,) or (batch, length), prompt and output.
        prompt_len: How many ids at the front are given, at least 1.
        coeff_per_token: Weight of each output token, broadcast to (batch, length - prompt_len).
        decay: Of the hidden state, per position.
    """
    ids = np.atleast_2d(np.asarray(tokens, dtype=np.intp))
    embed, value = weights[EMBED].astype(np.float64), weights[VALUE].astype(np.float64)
    model = prepare(weights, decay=decay)
    # the last token is only predicted: its own value reaches no score
    context, target = ids[:, :-1], ids[:, prompt_len:]
    rows = model.table[context]
    hidden = _hidden(rows, decay)
    read = hidden[:, prompt_len - 1 :]
    coeff = np.broadcast_to(np.asarray(coeff_per_token, dtype=np.float64), target.shape)[..., None]
    error = -coeff * np.exp(_log_softmax(read @ model.head.T))
    np.put_along_axis(
        error,
        target[..., None],
        np.take_along_axis(error, target[..., None], axis=-1) + coeff,
        axis=-1,
    )
    flow = np.zeros_like(hidden)
    flow[:, prompt_len - 1 :] = error @ model.head
    for t in range(flow.shape[1] - 2, -1, -1):
        flow[:, t] += decay * flow[:, t + 1]
    inner = (flow * (1.0 - rows**2)).reshape(-1, embed.shape[1])
    d_embed = np.zeros_like(embed)
    np.add.at(d_embed, context.reshape(-1), inner @ value)
    return {
        EMBED: d_embed,
        VALUE: inner.T @ embed[context.reshape(-1)],
        HEAD: error.reshape(-1, model.head.shape[0]).T @ read.reshape(-1, embed.shape[1]),
    }


def _hidden(rows: Floats, decay: float) -> Floats:
    """Hidden states of all positions, summed in position order; rows are (..., length, width)."""
    out = rows.copy()
    for t in range(1, out.shape[-2]):
        out[..., t, :] = out[..., t - 1, :] * decay + rows[..., t, :]
    return out


def _log_softmax(scores: Floats) -> Floats:
    shifted = scores - scores.max(axis=-1, keepdims=True)
    out: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return out
