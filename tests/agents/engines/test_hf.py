import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from spear_agents.engines.base import Finish, Generation, Request, Sampling  # noqa: E402
from spear_agents.engines.hf import HFModel, load_tokenizer  # noqa: E402
from spear_envs.core.errors import SpearError  # noqa: E402


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> HFModel:
    return HFModel(tiny_model)


def make_requests(
    model: HFModel, count: int, *, lengths: tuple[int, ...] = (9,), seed: int = 0, **sampling: float
) -> list[Request]:
    dice = random.Random(seed)
    size = model.model.config.vocab_size
    options = {"max_tokens": 12} | sampling
    return [
        Request(
            tuple(dice.randrange(3, size) for _ in range(lengths[i % len(lengths)])),
            Sampling(seed=1000 * seed + i, **options),  # type: ignore[arg-type]
            f"r{i:03d}",
        )
        for i in range(count)
    ]


def plain_log_probs(model: HFModel, request: Request, answer: Generation, width: int) -> list[float]:
    """Right padding and no cache, as a trainer computes them."""
    ids = [*request.prompt_ids, *answer.token_ids]
    padded = torch.tensor([ids + [0] * (width - len(ids))])
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids))])
    with torch.no_grad():
        logits = model.model(input_ids=padded, attention_mask=mask, use_cache=False).logits[0]
    first = len(request.prompt_ids)
    logp = torch.log_softmax(logits / (request.sampling.temperature or 1.0), -1)
    return [float(logp[first - 1 + i, token]) for i, token in enumerate(answer.token_ids)]


@pytest.mark.parametrize("lengths", [(9,), (3, 9, 17)])
@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_log_probs_equal_a_plain_right_padded_pass(
    model: HFModel, lengths: tuple[int, ...], temperature: float
) -> None:
    requests = make_requests(model, 24, lengths=lengths, temperature=temperature)
    requests = [
        replace(request, sampling=replace(request.sampling, max_tokens=1 + place % 12))
        for place, request in enumerate(requests)
    ]
    answers = model.generate_batch(requests)
    for request, answer in zip(requests, answers, strict=True):
        assert len(answer.token_ids) <= request.sampling.max_tokens
        assert answer.log_probs == pytest.approx(plain_log_probs(model, request, answer, 40), abs=1e-5)
        assert answer.log_probs == pytest.approx(
            model.log_probs(request.prompt_ids, answer.token_ids, temperature), abs=1e-5
        )


def test_an_answer_does_not_depend_on_its_batch(model: HFModel) -> None:
    requests = make_requests(model, 16, lengths=(9, 5))
    # The same prompts again with other seeds: shared prompts are computed once.
    requests += [
        Request(r.prompt_ids, Sampling(max_tokens=7, seed=5000 + i), f"twin{i}") for i, r in enumerate(requests[:10])
    ]
    together = model.generate_batch(requests)
    alone = [model.generate_batch([request])[0] for request in requests]
    mixed = list(range(len(requests)))
    random.Random(1).shuffle(mixed)
    shuffled = dict(zip(mixed, model.generate_batch([requests[i] for i in mixed]), strict=True))
    for i, (a, b) in enumerate(zip(together, alone, strict=True)):
        assert a.token_ids == b.token_ids == shuffled[i].token_ids
        assert a.finish == b.finish
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-5)
    assert len({answer.token_ids for answer in together[-10:]}) > 1


def test_answers_end_at_stop_tokens_and_limits(model: HFModel) -> None:
    (end,) = model.stop_token_ids
    requests = make_requests(model, 64)
    answers = model.generate_batch(requests)
    assert {answer.finish for answer in answers} == {Finish.STOP, Finish.LENGTH}
    for answer in answers:
        assert len(answer.token_ids) == len(answer.log_probs)
        assert end not in answer.token_ids[:-1]
        assert (answer.token_ids[-1] == end) == (answer.finish is Finish.STOP)
        assert answer.finish is Finish.STOP or len(answer.token_ids) == 12
    extra = answers[0].token_ids[0]
    stopping = [replace(r, sampling=replace(r.sampling, stop_token_ids=(extra,))) for r in requests]
    again = model.generate_batch(stopping)
    for before, after in zip(answers, again, strict=True):
        if extra in before.token_ids:
            assert after.token_ids == before.token_ids[: before.token_ids.index(extra) + 1]
            assert after.finish is Finish.STOP
        else:
            assert (after.token_ids, after.finish) == (before.token_ids, before.finish)
            assert after.log_probs == pytest.approx(before.log_probs, abs=1e-5)


def test_answers_end_at_stop_strings_and_keep_them(model: HFModel, tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    requests = make_requests(model, 48, lengths=(9, 5))
    before = model.generate_batch(requests)
    strings = ("go", "</action>")
    # Every other request, so that rows with and without stop strings share a batch.
    stopping = [
        replace(r, sampling=replace(r.sampling, stop_strings=strings)) if i % 2 else r for i, r in enumerate(requests)
    ]
    ended = 0
    for i, (plain, answer) in enumerate(zip(before, model.generate_batch(stopping), strict=True)):
        texts = [tokenizer.decode(list(plain.token_ids[:n])) for n in range(len(plain.token_ids) + 1)]
        length = next((n for n, text in enumerate(texts) if any(string in text for string in strings)), None)
        if i % 2 and length is not None:
            ended += 1
            assert answer.token_ids == plain.token_ids[:length]
            assert answer.finish is Finish.STRING
        else:
            assert (answer.token_ids, answer.finish) == (plain.token_ids, plain.finish)
    assert 3 < ended < 24


def test_requests_without_a_seed_draw_from_the_engine_s_own_stream(tiny_model: Path) -> None:
    request = Request((3, 4, 5), Sampling(max_tokens=12), "x")
    first, second = HFModel(tiny_model, seed=1), HFModel(tiny_model, seed=1)
    drawn = first.generate_batch([request] * 6)
    assert len({answer.token_ids for answer in drawn}) > 1
    state = torch.random.get_rng_state()
    assert second.generate_batch([request] * 6) == drawn
    assert torch.equal(torch.random.get_rng_state(), state)
    assert HFModel(tiny_model, seed=2).generate_batch([request] * 6) != drawn


def test_weights_are_loaded_and_others_refused(tiny_model: Path, model: HFModel) -> None:
    other = HFModel(tiny_model)
    state = {name: tensor + 0.1 for name, tensor in other.model.state_dict().items()}
    del state["lm_head.weight"]  # tied to the embedding
    other.load_state(state.items())
    request = make_requests(model, 1)
    assert other.generate_batch(request) != model.generate_batch(request)
    other.load_state(model.model.state_dict())
    assert other.generate_batch(request) == model.generate_batch(request)
    with pytest.raises(SpearError, match="other weights"):
        other.load_state({"nothing": torch.zeros(1)})


def test_what_it_cannot_do_is_said(model: HFModel, tmp_path: Path) -> None:
    for read, file in ((HFModel, "config"), (load_tokenizer, "tokenizer_config")):
        with pytest.raises(SpearError, match=rf"does not contain {file}\.json"):
            read(tmp_path)
        with pytest.raises(SpearError, match="absent does not exist"):
            read(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SpearError, match="holds no weights in safetensors"):
        HFModel(tmp_path)
    picture = np.zeros((4, 4, 3), np.uint8)
    with pytest.raises(SpearError, match="modality"):
        model.generate_batch([Request((3,), Sampling(), "x", (picture,))])
    with pytest.raises(SpearError, match="empty"):
        model.generate_batch([Request((), Sampling(), "x")])
    with pytest.raises(SpearError, match=r"token 99999 is outside the vocabulary of .*: its tokenizer is another"):
        model.generate_batch([Request((3, 99_999), Sampling(), "x")])
    with pytest.raises(SpearError, match="exceed"):
        model.generate_batch([Request((3,) * (model.context_length - 50), Sampling(max_tokens=100), "x")])
    assert model.generate_batch([]) == []


def test_bfloat16_draws_in_full_precision_and_stays_near(tiny_model: Path, model: HFModel) -> None:
    half = HFModel(tiny_model, dtype="bfloat16")
    assert {weight.dtype for weight in half.model.parameters()} == {torch.bfloat16}
    requests = make_requests(half, 24, lengths=(3, 9, 17))
    answers = half.generate_batch(requests)
    assert answers == half.generate_batch(requests)
    apart = []
    for request, answer in zip(requests, answers, strict=True):
        exact = model.log_probs(request.prompt_ids, answer.token_ids)
        apart += [abs(a - b) for a, b in zip(answer.log_probs, exact, strict=True)]
        # Log-probabilities that had gone through bfloat16 would have 8 bits.
        assert any(float(torch.tensor(p).bfloat16()) != p for p in answer.log_probs)
    assert 0 < np.mean(apart) < 0.02 and max(apart) < 0.3
    exact_state = model.model.state_dict()
    half.load_state({name: 2 * tensor for name, tensor in exact_state.items()})
    assert torch.equal(half.model.state_dict()["lm_head.weight"], (2 * exact_state["lm_head.weight"]).bfloat16())


def test_weights_are_computed_with_in_their_own_type(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "half"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert [HFModel(path).model.dtype for path in (tiny_model, folder)] == [torch.float32, torch.bfloat16]
