"""Writes tiny Llama models with random weights; run by an engine environment's Python.

    python models.py ROOT          ->  ROOT/seed0, ROOT/seed1

The rule of this file: the same seed gives the same bytes. The models share architecture, tensor
names and tokenizer, so that the weights of one can be put into a server of the other. Sizes are
what engines ask for: vLLM's attention on a CPU has no head of 16, and two key/value heads allow
two tensor-parallel ranks. Weights are wide, so that greedy output wanders.
"""

from __future__ import annotations

import json
import pathlib
import sys

import numpy as np
from safetensors.numpy import save_file

# Present in the engines' environments only.
from tokenizers import (  # type: ignore[import-not-found]
    Tokenizer,
    decoders,
    pre_tokenizers,
    trainers,
)
from tokenizers import models as algorithms

__all__ = ("main",)

SEEDS = (0, 1)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 2048
HIDDEN = 64
INTERMEDIATE = 128
LAYERS = 2
HEADS = 4
KEY_VALUE_HEADS = 2
HEAD_SIZE = 32
CONTEXT = 8192
SPREAD = 0.3
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main(root: pathlib.Path) -> None:
    """Write one model per seed."""
    tokenizer = train_tokenizer()
    for seed in SEEDS:
        folder = root / f"seed{seed}"
        folder.mkdir(parents=True)
        tokenizer.save(str(folder / "tokenizer.json"))
        for name, content in CONFIGS.items():
            (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
        save_file(draw_weights(seed), str(folder / "model.safetensors"), metadata={"format": "pt"})


def train_tokenizer() -> Tokenizer:
    """Byte-level BPE over invented words, enough of them to fill the vocabulary."""
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    words = [first + second for first in syllables for second in syllables[::2]]
    tokenizer = Tokenizer(algorithms.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([" ".join(words)] * 2, trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise SystemExit(f"the tokenizer has {tokenizer.get_vocab_size()} ids, not {VOCABULARY}")
    return tokenizer


def draw_weights(seed: int) -> dict[str, np.ndarray]:
    """All tensors of one model, by checkpoint name."""
    random = np.random.Generator(np.random.PCG64(seed))

    def draw(*shape: int) -> np.ndarray:
        return (SPREAD * random.standard_normal(shape)).astype(np.float32)

    weights = {"model.embed_tokens.weight": draw(VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        inside = {
            "input_layernorm": np.ones(HIDDEN, np.float32),
            "self_attn.q_proj": draw(HEADS * HEAD_SIZE, HIDDEN),
            "self_attn.k_proj": draw(KEY_VALUE_HEADS * HEAD_SIZE, HIDDEN),
            "self_attn.v_proj": draw(KEY_VALUE_HEADS * HEAD_SIZE, HIDDEN),
            "self_attn.o_proj": draw(HIDDEN, HEADS * HEAD_SIZE),
            "post_attention_layernorm": np.ones(HIDDEN, np.float32),
            "mlp.gate_proj": draw(INTERMEDIATE, HIDDEN),
            "mlp.up_proj": draw(INTERMEDIATE, HIDDEN),
            "mlp.down_proj": draw(HIDDEN, INTERMEDIATE),
        }
        weights |= {f"model.layers.{layer}.{name}.weight": w for name, w in inside.items()}
    weights["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    weights["lm_head.weight"] = draw(VOCABULARY, HIDDEN)
    return weights


SPECIAL_IDS = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
CONFIGS: dict[str, dict[str, object]] = {
    "config.json": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
        **SPECIAL_IDS,
    },
    "generation_config.json": {**SPECIAL_IDS},
    "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    },
}


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
