import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from spear_agents.engines.tensors import draw_tokens, filter_probs, invert_mass, uniform_at  # noqa: E402


def test_uniforms_are_even_and_uncorrelated_over_seeds_and_positions() -> None:
    numbers = np.stack([uniform_at(np.arange(2000, dtype=np.uint64), position) for position in range(20)])
    assert numbers.min() >= 0 and numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.005
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(numbers[:, :-1].ravel(), numbers[:, 1:].ravel())[0, 1]) < 0.02
    assert np.histogram(numbers, bins=10, range=(0, 1))[0] == pytest.approx(4000, rel=0.08)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5), st.integers(0, 5000))
def test_a_stream_does_not_know_its_batch(seeds: list[int], position: int) -> None:
    together = uniform_at(np.array(seeds, dtype=np.uint64), position)
    alone = [uniform_at(np.array([seed], dtype=np.uint64), position)[0] for seed in seeds]
    assert together.tolist() == alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [3, 256, 257, 5000])
def test_mass_is_inverted_as_by_one_running_sum(size: int, dtype: torch.dtype) -> None:
    dice = np.random.default_rng(size)
    weights = dice.random((200, size)) ** 30
    weights[dice.random((200, size)) < 0.5] = 0
    weights[:, dice.integers(size, size=20)] += 0.1
    probs = torch.from_numpy(weights).to(dtype)
    uniform = dice.random(200)
    uniform[:2] = 0, 1 - 2.0**-52
    mass = np.cumsum(probs.double().numpy(), -1)
    wanted = [np.searchsorted(row, u * row[-1], side="right") for row, u in zip(mass, uniform, strict=True)]
    found = invert_mass(probs, torch.from_numpy(uniform))
    assert (probs.gather(-1, found[:, None]) > 0).all()
    assert (found.numpy() == wanted).mean() > 0.99, "but for places on the edge between two ids"
    assert found.tolist() == invert_mass(probs * 4, torch.from_numpy(uniform)).tolist()


def naive_filter(probs: list[float], top_k: int, top_p: float) -> list[float]:
    """The definition, token by token."""
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    if top_k:
        order = order[:top_k]
    total, mass, kept = sum(probs[i] for i in order), 0.0, []
    for i in order:
        if top_p < 1 and mass >= top_p * total:
            break
        kept.append(i)
        mass += probs[i]
    return [p if i in kept else 0.0 for i, p in enumerate(probs)]


@given(
    st.lists(st.integers(0, 8), min_size=2, max_size=9).filter(any),
    st.integers(0, 10),
    st.floats(0.05, 1.0),
)
@example([2, 4, 4, 4, 6], 0, 0.5)
def test_top_k_and_top_p_equal_their_definition(weights: list[int], top_k: int, top_p: float) -> None:
    probs = torch.tensor([weights], dtype=torch.float64)
    probs = probs / probs.sum()
    found = filter_probs(probs, torch.tensor([top_k]), torch.tensor([top_p], dtype=torch.float64))[0]
    wanted = naive_filter(probs[0].tolist(), top_k, top_p)
    mass = np.cumsum(sorted(probs[0].tolist(), reverse=True)[: top_k or None])
    if np.abs(mass - top_p * mass[-1]).min() < 1e-9:  # on the edge rounding decides
        return
    assert found.tolist() == pytest.approx(wanted)


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(40_000, -1)
    heat = torch.full((40_000,), 0.7, dtype=torch.float64)
    uniform = torch.from_numpy(uniform_at(np.arange(40_000, dtype=np.uint64), 0))
    tokens, log_probs = draw_tokens(logits, uniform, heat)
    wanted = torch.softmax(logits[0].double() / 0.7, -1)
    assert (torch.bincount(tokens, minlength=4) / 40_000).tolist() == pytest.approx(wanted.tolist(), abs=0.01)
    assert torch.allclose(log_probs, wanted.log()[tokens])


def test_temperature_zero_is_greedy_and_reports_temperature_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0]])
    tokens, log_probs = draw_tokens(
        logits, torch.tensor([0.999], dtype=torch.float64), torch.tensor([0.0], dtype=torch.float64)
    )
    assert tokens.tolist() == [1]
    assert log_probs.tolist() == pytest.approx(torch.log_softmax(logits.double(), -1)[0, 1:2].tolist())


@given(st.floats(0, 1 - 2**-52))
def test_impossible_tokens_are_never_drawn(uniform: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]])
    tokens, _ = draw_tokens(
        logits, torch.tensor([uniform], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
    )
    assert tokens.item() in (1, 3)


def test_filters_do_not_change_the_reported_log_probs() -> None:
    logits = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    uniform = torch.rand(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    heat = torch.ones(50, dtype=torch.float64)
    tokens, log_probs = draw_tokens(logits, uniform, heat, torch.full((50,), 2), torch.full((50,), 0.9))
    assert torch.allclose(log_probs, torch.log_softmax(logits.double(), -1).gather(1, tokens[:, None])[:, 0])
    assert (logits.argsort(descending=True)[:, :2] == tokens[:, None]).any(1).all()
