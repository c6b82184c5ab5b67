import pytest

from spear_agents.comparison.statistics import Part, summarise
from spear_agents.comparison.tables import Cell, choose_samples, format_latex, make_cells
from spear_agents.play.trajectory import Trajectory
from tests.agents.test_statistics import episode


def summarise_all(*trajectories: Trajectory) -> tuple[Part, dict[str, Part]]:
    return summarise(trajectories)


def shown(env_id: str, *trajectories: Trajectory, **keywords: object) -> dict[str, str]:
    return {cell.heading: cell.text for cell in make_cells(env_id, keywords, *summarise_all(*trajectories))}


def test_households_have_the_six_kinds_of_the_paper_and_all() -> None:
    found = shown("spear/ALFWorld-v0", episode("a", True, "pick2"), episode("b", False, "pick"))
    dash = "–"
    assert found == {
        "Pick": "0.0",
        "Look": dash,
        "Clean": dash,
        "Heat": dash,
        "Cool": dash,
        "Pick2": "100.0",
        "All": "50.0",
    }
    assert list(found) == ["Pick", "Look", "Clean", "Heat", "Cool", "Pick2", "All"]


def test_the_shop_has_score_and_success() -> None:
    found = shown("spear/WebShop-v0", episode("a", False, score=0.5), episode("b", True))
    assert found == {"Score": "75.0", "SR": "50.0"}


def test_mathematics_have_mean_and_pass_at_the_number_of_samples() -> None:
    every = [episode("a", i < 10, seed=i) for i in range(30)] + [episode("b", False, seed=i) for i in range(30)]
    found = shown("spear/CodeInterpreter-v0", *every, dataset="aime-2024")
    assert found == {"aime-2024 mean@30": "16.7", "pass@30": "50.0"}
    assert choose_samples("spear/CodeInterpreter-v0", {"dataset": "aime-2025"}) == 30
    assert choose_samples("spear/CodeInterpreter-v0", {}) == 1
    assert choose_samples("other/CodeInterpreter-v0", {"dataset": "aime-2025"}) == 1


def test_questions_are_averaged_over_benchmarks_not_over_questions() -> None:
    every = [episode(f"n{i}", True, "nq") for i in range(9)] + [episode("b", False, "bamboogle")]
    found = shown("spear/SearchR1-v0", *every)
    assert list(found.items()) == [("NQ", "100.0"), ("Bamboogle", "0.0"), ("Avg.", "50.0")]
    assert list(shown("spear/SearchR1-v0", episode("x", True, "2hop"))) == ["2hop", "Avg."]


def test_levels_have_one_column_and_unknown_environments_their_subtasks() -> None:
    assert shown("module:spear/Sokoban-v1", episode("a", True, "len1-3")) == {"Sokoban": "100.0"}
    assert shown("mine/Other-v0", episode("a", True, "x")) == {"x": "100.0", "All": "100.0"}


def test_nothing_but_faults_gives_dashes() -> None:
    from spear_agents.play.trajectory import StopReason

    broken = episode("a", False, "pick", stop=StopReason.FAULT, fault="down")
    for name in ("ALFWorld", "WebShop", "CodeInterpreter", "SearchR1", "Sokoban"):
        cells = make_cells(f"spear/{name}-v0", {}, *summarise_all(broken))
        assert {cell.text for cell in cells} == {"–"}
        assert "nan" not in format_latex("x", cells)


def test_a_row_goes_into_a_table_of_booktabs() -> None:
    parts = summarise_all(*(episode(str(i), i % 2 == 0) for i in range(100)))
    cells = make_cells("spear/WebShop-v0", {}, *parts)
    assert format_latex("R&D_50%", [*cells, Cell("a_b", None)]) == (
        "% Method & Score & SR & a\\_b\nR\\&D\\_50\\% & 50.0 & 50.0 & -- \\\\"
    )
    assert r"50.0{\tiny$\pm$9.6}" in format_latex("x", cells, intervals=True)


@pytest.mark.parametrize("name", ["a\nb", "\\input{x}", "~^{}#$"])
def test_a_name_cannot_become_a_command(name: str) -> None:
    row = format_latex(name, []).split("\n", 1)[1]
    assert "\n" not in row and "\\input" not in row
