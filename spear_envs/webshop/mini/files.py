"""Generated catalogues as files with the official names and formats, for stores of any size."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from spear_envs.webshop.mini.generate import PRODUCTS, SEED, stream_records


def write_files(folder: Path, products: int = PRODUCTS, seed: int = SEED, *, long_tail: bool = False) -> None:
    """Write ``items_shuffle.json``, ``items_ins_v2.json`` and ``items_human_ins.json``, product by product.

    A million products with ``long_tail`` take about two minutes, 1.3 GB on disk and little memory.

    Args:
        folder: created if missing; files with these names are overwritten.
        products, seed, long_tail: see :func:`~spear_envs.webshop.mini.generate.stream_records`.

    Raises:
        SpearError: see :func:`~spear_envs.webshop.mini.generate.stream_records`.
    """
    records = stream_records(products, seed, long_tail=long_tail)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        _Members(folder / "items_shuffle.json", "[]") as items,
        _Members(folder / "items_ins_v2.json", "{}") as attributes,
        _Members(folder / "items_human_ins.json", "{}") as human,
    ):
        for record in records:
            asin = record.item["asin"]
            items.add(record.item)
            if record.attributes is not None:
                attributes.add(record.attributes, asin)
            if record.human:
                human.add(record.human, asin)


class _Members:
    """A JSON array or object that is written member by member."""

    def __init__(self, path: Path, brackets: str) -> None:
        self._path = path
        self._brackets = brackets
        self._before = "\n"

    def __enter__(self) -> _Members:
        self._file = self._path.open("w", encoding="utf-8")
        self._file.write(self._brackets[0])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                self._file.write(f"\n{self._brackets[1]}\n")

    def add(self, value: Any, name: str | None = None) -> None:
        key = "" if name is None else f"{json.dumps(name)}: "
        self._file.write(f"{self._before}{key}{json.dumps(value, ensure_ascii=False)}")
        self._before = ",\n"
