"""A tiny policy that says one of a few things, calls of tools among them, for trainings that others' trainers run."""

from collections.abc import Iterable, Sequence
from typing import Any

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def make_policy(
    template: str, prompts: Sequence[str], responses: Sequence[Sequence[str]], *, texts: Iterable[str] = ()
) -> tuple[Any, Any]:
    """A Qwen3 of 32 dimensions and its tokenizer, which says each of the responses about as often as the others.

    Args:
        template: the chat template.
        prompts: what it answers; also by their last 200 characters, so that long and short prompts are alike to it.
        responses: the pieces of each, which become tokens of their own.
        texts: further texts that the tokenizer learns from.
    """
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    raw.train_from_iterator([*prompts, *texts], trainer)
    pieces = dict.fromkeys(piece for response in responses for piece in response)
    raw.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left"
    )
    tokenizer.chat_template = template
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), tie_word_embeddings=True, **sizes, **heads, **ends))

    pairs = [
        (tokenizer(prompt[-length:])["input_ids"], tokenizer("".join(response) + "<|im_end|>")["input_ids"])
        for prompt in prompts
        for length in (200, 10_000)
        for response in responses
    ]
    longest = max(len(prompt) + len(response) for prompt, response in pairs)
    ids = torch.full((len(pairs), longest), tokenizer.pad_token_id)
    labels = torch.full_like(ids, -100)
    for row, (prompt, response) in enumerate(pairs):
        ids[row, longest - len(prompt) - len(response) :] = torch.tensor(prompt + response)
        labels[row, longest - len(response) :] = torch.tensor(response)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        model(input_ids=ids, attention_mask=(ids != tokenizer.pad_token_id).long(), labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, tokenizer
