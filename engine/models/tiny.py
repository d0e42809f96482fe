"""A tiny random Llama with a tokenizer of its own: a model for tests and `weft bench` that needs no download."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SPECIAL_TOKENS = {"pad_token": "<|endoftext|>", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
_FOLDER = Path(__file__).parent


def make_tokenizer(chat_template: str, more_tokens: Sequence[str] = ()) -> Any:
    """A byte-pair tokenizer of 1,000 tokens, trained on a page of English, code and JSON."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        show_progress=False,
        special_tokens=[*_SPECIAL_TOKENS.values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    # Prose, code and JSON, so that the byte-pair merges fit the prompts of agents.
    bpe.train_from_iterator([(_FOLDER / "tiny_corpus.txt").read_text(encoding="utf-8")], trainer)
    bpe.add_tokens(list(more_tokens))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, **_SPECIAL_TOKENS, model_max_length=4096, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def make_tiny_llama(folder: Path, seed: int = 0) -> Path:
    """Write a random Llama of 0.8 million parameters (float32, 3.4 MB) to `folder`, and return `folder`.

    The same seed gives the same bytes. The model's output is nonsense, but its weights are spread so widely that every
    token depends on the whole context. So a wrong KV block changes the output. `<|im_end|>` appears only by chance.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    # ChatML, with tools, tool calls and results in the format of Qwen2.5 and of vLLM's "hermes" parser.
    tokenizer = make_tokenizer((_FOLDER / "tiny_chat_template.jinja").read_text(encoding="utf-8"))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
