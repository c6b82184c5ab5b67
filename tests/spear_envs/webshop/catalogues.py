"""Small catalogues in the form of the official files."""

import json
import lzma
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from spear_envs.webshop.catalogue import Catalogue, make_catalogue
from spear_envs.webshop.products import CatalogueFiles
from spear_envs.webshop.reward import find_tagger


def make_record(asin: str, **fields: Any) -> dict[str, Any]:
    """A record of ``items_shuffle.json``."""
    record = {
        "asin": asin,
        "name": f"Soft Thing {asin}",
        "full_description": "A thing.",
        "small_description": ["soft", "durable"],
        "pricing": "$19.99",
        "customization_options": "",
        "category": "garden",
        "query": "things",
        "product_category": "Home › Things",
    }
    return {**record, **fields}


def make_options(**groups: Iterable[str]) -> dict[str, Any]:
    """``customization_options`` of a record."""
    return {name: [{"value": value, "image": None} for value in values] for name, values in groups.items()}


def make_entry(*wanted: str, instruction: str = "Find me a thing") -> dict[str, Any]:
    """An entry of ``items_ins_v2.json``, with an instruction."""
    return {"attributes": list(wanted), "instruction": instruction, "instruction_attributes": list(wanted)}


def load(
    records: Iterable[Any],
    entries: Mapping[str, Any] | None = None,
    human: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Catalogue:
    """The catalogue of such records, in memory."""
    values = {"name": "test", "tagger": find_tagger("rule"), "price_seed": 42, **settings}
    return make_catalogue(records, entries or {}, human, **values)


def write(
    folder: Path, records: Any, entries: Any = None, human: Any = None, *, packed: bool = False
) -> CatalogueFiles:
    """Write such records as files."""
    folder.mkdir(parents=True, exist_ok=True)
    suffix = ".json.xz" if packed else ".json"
    paths = {}
    for name, content in (("items_shuffle", records), ("items_ins_v2", entries or {}), ("items_human_ins", human)):
        if content is None:
            continue
        text = content if isinstance(content, str) else json.dumps(content)
        paths[name] = folder / f"{name}{suffix}"
        data = text.encode("utf-8", "surrogatepass")
        paths[name].write_bytes(lzma.compress(data) if packed else data)
    return CatalogueFiles(paths["items_shuffle"], paths["items_ins_v2"], paths.get("items_human_ins"))


texts = st.text(max_size=20)
prices = st.one_of(
    st.just(""),
    st.floats(0, 2_000).map(lambda x: f"${x:.2f}"),
    st.tuples(st.floats(0, 500), st.floats(0, 500)).map(lambda x: f"${x[0]:.2f} - ${x[1]:.2f}"),
)
options = st.dictionaries(
    st.sampled_from(["Color", "Size", "style", "SIZE"]),
    st.none() | st.lists(st.sampled_from(["red", "Red", "a/b", "x-large", "é", ""]), max_size=4),
    max_size=3,
).map(lambda groups: {name: v if v is None else [{"value": x} for x in v] for name, v in groups.items()})


@st.composite
def catalogues(draw: st.DrawFn) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """Records, entries and human instructions of a few products, ASINs that occur twice among them."""
    asins = draw(
        st.lists(st.sampled_from([f"B{i:03d}" for i in range(12)] + ["nan", "B" * 11]), min_size=1, max_size=15)
    )
    records = [
        make_record(
            asin,
            name=draw(texts),
            full_description=draw(st.none() | texts),
            small_description=draw(st.lists(texts, max_size=3) | texts),
            pricing=draw(prices),
            customization_options=draw(st.just("") | options),
        )
        for asin in asins
    ]
    wanted = st.lists(st.sampled_from(["soft", "durable", "easy clean"]), max_size=3)
    entries = {
        asin: draw(st.just({"attributes": []}) | st.builds(lambda w, t: make_entry(*w, instruction=t), wanted, texts))
        for asin in sorted(set(asins))
        if draw(st.booleans())
    }
    row = st.fixed_dictionaries(
        {"instruction": texts, "instruction_attributes": wanted, "instruction_options": st.lists(texts, max_size=2)}
    )
    human = {asin: draw(st.lists(row, max_size=3)) for asin in ("B000", "B001", "B999") if draw(st.booleans())}
    return records, entries, human
