import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_agents.engines.base import ByteTokenizer, ChatByteTokenizer, Served
from spear_agents.engines.replies import read_reply
from spear_agents.play.trajectory import TokenKind, TrajectoryWriter
from spear_agents.viewer.episodes import open_decoder, split_text
from spear_agents.viewer.runs import Run
from spear_envs.core.errors import SpearError
from tests.agents.test_trajectory import make_trajectory

tokenizers = pytest.importorskip("tokenizers", reason="the extra 'train' is not installed")
SAMPLE = ["The wägen went – 漢字 and 😀 over the hill; the hill was high."] * 3


def make_byte_level() -> Any:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(SAMPLE, trainer)
    return tokenizer


BYTE_LEVEL = make_byte_level()


@given(st.text(max_size=30) | st.sampled_from(["😀😀", "漢字 ok", " a  b\n"]))
def test_pieces_are_the_text_and_count_every_token(text: str) -> None:
    ids = BYTE_LEVEL.encode(text).ids
    pieces = split_text(BYTE_LEVEL, ids)
    assert "".join(piece for piece, _ in pieces) == text
    assert sum(count for _, count in pieces) == len(ids)


@given(st.lists(st.integers(0, 255), max_size=20))
def test_bytes_that_are_no_text_still_count(ids: list[int]) -> None:
    assert sum(count for _, count in split_text(ByteTokenizer(), ids)) == len(ids)


def test_what_is_no_tokenizer_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(SpearError, match=r"does not contain tokenizer\.json"):
        open_decoder({"model": str(tmp_path)}, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SpearError, match="is not a tokenizer"):
        open_decoder({"model": str(tmp_path)}, tmp_path)
    with pytest.raises(SpearError, match="--tokenizer"):
        open_decoder({}, tmp_path)


def test_tokens_come_with_their_log_probabilities_where_the_tokenizer_fits(tmp_path: Path) -> None:
    ids = tuple(BYTE_LEVEL.encode("over 😀").ids)
    turn = replace(
        make_trajectory().turns[0],
        response_ids=ids,
        response="over 😀",
        log_probs=(*[-0.5] * (len(ids) - 1), float("nan")),
        prompt_ids=tuple(BYTE_LEVEL.encode("the hill").ids),
    )
    with TrajectoryWriter(tmp_path / "episodes.jsonl") as writer:
        writer.write(make_trajectory(turns=(turn,)))
        writer.write(make_trajectory(turns=(replace(turn, response="another text"),)))
    BYTE_LEVEL.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "settings.json").write_text(json.dumps({"model": "gone"}))
    run = Run(tmp_path, tmp_path)
    shown = run.read_episode(0)["turns"][0]
    assert shown["prompt"] == "the hill"
    assert "".join(text for text, _ in shown["tokens"]) == "over 😀"
    assert shown["tokens"][0][1] == pytest.approx(-0.5) and shown["tokens"][-1][1] is None
    other = run.read_episode(1)
    assert other["turns"][0]["tokens"] is None and "does not give the recorded texts" in other["notes"][0]


def test_a_server_s_own_tokens_are_coloured_and_its_messages_are_told_apart(tmp_path: Path) -> None:
    chat = ChatByteTokenizer()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where?"}]
    prompt = chat.apply_chat_template(messages, add_generation_prompt=True)
    ids = tuple(BYTE_LEVEL.encode("over the hill").ids)
    turn = replace(
        make_trajectory().turns[0],
        prompt_ids=tuple(chat.encode(prompt)),
        response_ids=tuple(chat.encode_plain("over the hill")),
        response="over the hill",
        served=Served(model="m", token_ids=ids, log_probs=(-0.25,) * len(ids)),
    )
    with TrajectoryWriter(tmp_path / "episodes.jsonl") as writer:
        writer.write(make_trajectory(turns=(turn,), tokens=TokenKind.BYTES))
        writer.write(make_trajectory(turns=(replace(turn, served=Served(model="m")),), tokens=TokenKind.BYTES))
    BYTE_LEVEL.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "settings.json").write_text(json.dumps({"model": "name-at-the-server"}))
    shown = Run(tmp_path, tmp_path).read_episode(0)["turns"][0]
    assert shown["prompt"] == "[system]\nBe brief.\n[user]\nWhere?\n[assistant]"
    assert "".join(text for text, _ in shown["tokens"]) == "over the hill"
    without = Run(tmp_path).read_episode(0)
    assert without["turns"][0]["prompt"] and without["turns"][0]["tokens"] is None
    assert without["notes"][0].startswith("No token colours: name-at-the-server does not contain tokenizer.json")
    assert Run(tmp_path).read_episode(1)["notes"] == [], "no tokens were sent, so none are missed"


def test_blanks_between_words_are_kept_by_tokenizers_that_drop_a_leading_one() -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(SAMPLE, trainer)
    ids = tokenizer.encode("over the hill").ids
    assert "".join(piece for piece, _ in split_text(tokenizer, ids)) == tokenizer.decode(ids) == "over the hill"


def test_a_moved_model_is_found_beside_the_run(tmp_path: Path) -> None:
    (tmp_path / "runs" / "model").mkdir(parents=True)
    BYTE_LEVEL.save(str(tmp_path / "runs" / "model" / "tokenizer.json"))
    decoder = open_decoder({"model": "runs/model"}, tmp_path / "runs" / "eval" / "deep")
    assert decoder.decode(BYTE_LEVEL.encode("hill").ids) == "hill"


def test_a_tokenizer_that_panics_is_a_note(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({" ": 0, "a": 1}, unk_token="a"))
    words.decoder = tokenizers.decoders.Strip(" ", 1, 1)
    words.save(str(tmp_path / "tokenizer.json"))
    turn = replace(make_trajectory().turns[0], response_ids=(0,), log_probs=(-0.1,))
    with TrajectoryWriter(tmp_path / "episodes.jsonl") as writer:
        writer.write(make_trajectory(turns=(turn,)))
    assert "does not give the recorded texts" in Run(tmp_path, tmp_path).read_episode(0)["notes"][0]


def test_tokens_of_a_reasoning_model_are_coloured(tmp_path: Path) -> None:
    """A server gives its thoughts apart, which are put in front with tags of ours; the ids have its own."""
    BYTE_LEVEL.save(str(tmp_path / "tokenizer.json"))
    ids = BYTE_LEVEL.encode("<think>\nhm\n</think>\n\n<action>up</action>").ids
    choice = {
        "finish_reason": "stop",
        "token_ids": ids,
        "logprobs": {"content": [{"logprob": -0.1}] * len(ids)},
        "message": {"reasoning_content": "\nhm\n", "content": "\n\n<action>up</action>"},
    }
    reply = read_reply(json.dumps({"choices": [choice]}).encode())
    turn = replace(make_trajectory().turns[0], response=reply.text, served=reply.served)
    with TrajectoryWriter(tmp_path / "episodes.jsonl") as writer:
        writer.write(make_trajectory(turns=(turn,), tokens=TokenKind.BYTES))
    assert Run(tmp_path, tmp_path).read_episode(0)["turns"][0]["tokens"] is not None
