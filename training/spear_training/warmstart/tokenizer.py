"""A word-level tokenizer for a tiny model: one token for each match of a prompt template's pattern."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spear_envs.core.errors import SpearError
from spear_envs.core.prompts import PromptTemplate

PAD, BOS, EOS, UNK = SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Chat template that joins the contents; a response ends with the end token, which the model learns."""


def make_tokenizer(template: PromptTemplate, texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer whose words are the pieces of ``texts``, split by ``template.token_pattern``.

    Text between two matches (blanks, say) is a word too, so that decoding is exact if all pieces are known; an unknown
    piece becomes ``<unk>``. Ids do not depend on the order of ``texts``. Raises SpearError if the template is not for
    tiny models.
    """
    if template.token_pattern is None:
        raise SpearError(
            f"the prompt template {template.name!r} lacks a token_pattern, so it is not for tiny models: "
            "take another one, such as 'compact'"
        )
    cut = pre_tokenizers.Split(Regex(template.token_pattern), behavior="isolated")
    words = {piece for text in set(texts) for piece, _ in cut.pre_tokenize_str(text)}
    vocabulary = {word: i for i, word in enumerate([*SPECIALS, *sorted(words - set(SPECIALS))])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    backend.pre_tokenizer = cut
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
