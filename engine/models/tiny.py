"""A tiny random Llama with a tokenizer of its own: a model for tests and `weft bench` that needs no download."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Prose, code and JSON, so that the byte-pair merges fit the prompts of agents.
_CORPUS = """
The lighthouse keeper counted the ships that passed in the night, and wrote each of them down in a long
book with a blue cover. When the fog came in from the west, he rang the bell every two minutes and
listened for an answer. Most nights there was none. In the morning the fishing boats returned, heavy with
herring and mackerel, and the gulls followed them through the harbour as far as the market, where people
were already waiting.

A train left the station at half past seven and travelled north along the river. Passengers read
newspapers, drank coffee from paper cups, or looked out of the window at fields, bridges and small towns.
Somebody asked the conductor whether the connection to the mountains would wait, and she answered that it
always waited, because the driver was her brother. How many stations are there between the river and the
mountains? There are twelve.

Question: what is the weather like in Paris, London, Berlin and Tokyo? Thought: I should look for the
current weather of every city before I give the final answer. Action: search for the temperature and the
wind. The observation was that it is raining in London, that the sun is shining in Paris, and that snow
is expected in Berlin tomorrow. Please explain your reasoning step by step, call a function when you need
more information, and summarise the result in one short sentence. You are a helpful assistant. The user
wants to know the population, the distance in kilometres, the price in dollars and the year in which the
company was founded.

Scientists measured how quickly plants grow under red and green light. After several weeks the difference
was obvious: leaves under red light were larger, while the others had hardly changed at all. They
repeated the whole experiment with different seeds, different water and different soil, and published
their numbers, the methods and a description of every mistake. Nobody could say why one particular plant
had flowered in the middle of winter.

def schedule(requests: list[Request], budget: int) -> list[Request]:
    \"\"\"Return the requests that run in this step.\"\"\"
    running = []
    for request in sorted(requests, key=lambda request: request.priority):
        if request.tokens <= budget:
            budget -= request.tokens
            running.append(request)
    return running

{"name": "get_weather", "description": "Current weather of a city", "parameters": {"type": "object",
"properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
"required": ["city"]}}
{"name": "multiply", "arguments": {"first": 1234, "second": 5678}} {"result": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]}
"""

_SPECIAL_TOKENS = {"pad_token": "<|endoftext|>", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}

# ChatML, with tools, tool calls and results in the format of Qwen2.5 and of vLLM's "hermes" parser.
_CHAT_TEMPLATE = """\
{%- set has_system = messages and messages[0].role == "system" %}
{%- if has_system or tools %}
{{- "<|im_start|>system\\n" + (messages[0].content if has_system else "You are a helpful assistant.") }}
{%- if tools %}
{{- "\\n\\n# Tools\\n<tools>" }}
{%- for tool in tools %}{{ "\\n" + tool | tojson }}{% endfor %}
{{- "\\n</tools>\\nCall one as <tool_call>{\\"name\\": name, \\"arguments\\": object}</tool_call>." }}
{%- endif %}
{{- "<|im_end|>\\n" }}
{%- endif %}
{%- for message in (messages[1:] if has_system else messages) %}
{%- if message.role == "tool" %}
{{- "<|im_start|>user\\n<tool_response>\\n" + message.content + "\\n</tool_response><|im_end|>\\n" }}
{%- else %}
{{- "<|im_start|>" + message.role + "\\n" + (message.content or "") }}
{%- for call in message.tool_calls or [] %}
{%- set arguments = call.function.arguments %}
{{- "\\n<tool_call>\\n{\\"name\\": \\"" + call.function.name + "\\", \\"arguments\\": " }}
{{- (arguments if arguments is string else arguments | tojson) + "}\\n</tool_call>" }}
{%- endfor %}
{{- "<|im_end|>\\n" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""


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
    bpe.train_from_iterator([_CORPUS], trainer)
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

    tokenizer = make_tokenizer(_CHAT_TEMPLATE)
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
