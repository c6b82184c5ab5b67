from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.models.transformers.monkey_patch import apply_monkey_patch
from verl.utils.import_utils import is_trl_available

import spear_training.verl_plugin  # noqa: F401  (what is tested)


def test_a_model_is_built_beside_a_trl_without_value_heads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "trl").mkdir()
    (tmp_path / "trl" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "trl"]:
        monkeypatch.delitem(sys.modules, name)
    assert is_trl_available(), "verl sees it"
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    apply_monkey_patch(Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=2)))
    assert "trl" not in sys.modules
