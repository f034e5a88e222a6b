"""Finding and loading a data directory; a process loads each once.

A directory holds
- the products: WebShop's `items_shuffle*.json`, or its search documents, `documents*.jsonl` or `products*.jsonl`, one
  {"id", "contents", "product"} a line;
- attributes and instructions: `items_ins_v2*.json`;
- for human goals, unless the products have "instructions" themselves: `items_human_ins.json`.

Each may be compressed (`.xz`, `.gz`). Of several product files the smallest is taken; the path of a product file in the
place of the directory takes that one. Of several files of instructions it is the one with the same number in its name
("_1000"), or without any.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from .catalogue import Catalogue, Product, RecordError, parse_product
from .own_catalogue import own_products
from .reading import DataError, read_json, read_records

OWN = "own"
"""In the place of a data directory: the small catalogue of our own making, which needs no files."""
DATA_VARIABLE = "WEBSHOP_DATA"

logger = logging.getLogger(__name__)

_PACKED = r"(?:\.(?:xz|gz))?"
_PRODUCTS = re.compile(r"(?:items_shuffle.*\.json|(?:documents|products).*\.jsonl)" + _PACKED)
_INSTRUCTIONS = re.compile(r"items_ins_v2.*\.json" + _PACKED)
_HUMAN = re.compile(r"items_human_ins.*\.json" + _PACKED)
_HOW_TO_GET = (
    "WebShop's publishers have the data: `setup.sh -d small` of https://github.com/princeton-nlp/WebShop downloads"
    " items_shuffle_1000.json and items_ins_v2_1000.json. To start without any data take data='own', a small catalogue"
    " that comes with this package"
)


@dataclass(frozen=True)
class DataFiles:
    """The files of a data directory; `human` is None where there is none."""

    products: Path
    instructions: Path
    human: Path | None


def find_files(data: str | os.PathLike[str]) -> DataFiles:
    """The files of a directory, or those that go with a product file.

    Raises FileNotFoundError where the path does not exist, DataError where a file is missing in it.
    """
    path = Path(data)
    if not path.exists():
        raise FileNotFoundError(f"data directory {path} does not exist. {_HOW_TO_GET}")
    folder = path if path.is_dir() else path.parent
    products = _matching(folder, _PRODUCTS) if path.is_dir() else [path]
    if path.is_file() and not _PRODUCTS.fullmatch(path.name):
        raise DataError(f"{path} must be a directory, or a file items_shuffle*.json, documents*.jsonl, products*.jsonl")
    if not products:
        raise DataError(
            f"{folder} has no products: no items_shuffle*.json, documents*.jsonl or products*.jsonl (each may end in"
            f" .xz or .gz). {_HOW_TO_GET}"
        )
    chosen = min(products, key=lambda file: (file.stat().st_size, file.name))
    instructions = _matching(folder, _INSTRUCTIONS)
    fitting = [file for file in instructions if _number(file) == _number(chosen)] or [
        file for file in instructions if not _number(file)
    ]
    if not fitting and len(instructions) == 1:
        fitting = instructions
    if not fitting:
        found = ", ".join(file.name for file in instructions) or "none"
        raise DataError(
            f"{folder} has no items_ins_v2*.json that goes with {chosen.name} (found: {found}). {_HOW_TO_GET}"
        )
    human = _matching(folder, _HUMAN)
    return DataFiles(chosen, fitting[0], human[0] if human else None)


def load_catalogue(data: str | None = None) -> Catalogue:
    """The catalogue of a data directory; the same object every time, for as long as the process runs.

    data: a directory or product file as in the module's docstring, or "own"; None for what the environment variable
        WEBSHOP_DATA says.

    Products that cannot be used are left out with a warning, and are listed in `Catalogue.skipped`.

    Raises ValueError where neither says where the data is, FileNotFoundError, and DataError for files that are missing
    or damaged.
    """
    data = data_source(data)
    if data == OWN:
        return _own()
    return _loaded(find_files(data))


def data_source(data: str | os.PathLike[str] | None) -> str:
    """`data`, or what WEBSHOP_DATA says. Raises ValueError where neither says anything, TypeError where it is no
    path."""
    if data is not None and not isinstance(data, str | os.PathLike):
        raise TypeError(f"data must be the path of a data directory or {OWN!r}; got {data!r}")
    source = os.environ.get(DATA_VARIABLE, "") if data is None else os.fspath(data)
    source = os.path.expandvars(os.path.expanduser(source))
    if not source:
        raise ValueError(
            f"data must name a directory with WebShop's data, as an argument or in {DATA_VARIABLE}. {_HOW_TO_GET}"
        )
    return source


@lru_cache(maxsize=1)
def _own() -> Catalogue:
    return Catalogue(own_products(), "the catalogue of our own")


@lru_cache(maxsize=4)
def _loaded(files: DataFiles) -> Catalogue:
    instructions = _by_code(files.instructions)
    human = _by_code(files.human) if files.human else {}
    is_documents = ".jsonl" in files.products.suffixes
    products: dict[str, Product] = {}
    skipped: list[str] = []
    for place, record in read_records(files.products):
        try:
            if is_documents:
                if not isinstance(record, dict) or "product" not in record:
                    raise RecordError("a line must be an object with the key 'product'")
                record = record["product"]
            product = parse_product(record, instructions, human, attributes_given=is_documents)
            if product.asin in products:
                raise RecordError(f"asin {product.asin} stands in the file before")
        except RecordError as error:
            skipped.append(f"{place}: {error}")
            continue
        products[product.asin] = product
    if not products:
        reasons = f" (the first: {skipped[0]})" if skipped else ""
        raise DataError(f"{files.products} has no product that can be used{reasons}. Get the file again.")
    if skipped:
        logger.warning("%s: %d products left out, the first: %s", files.products, len(skipped), skipped[0])
    left = {
        "synthetic": sum(
            isinstance(about, dict) and "instruction" in about for about in _others(instructions, products)
        ),
        "human": sum(len(entries) for entries in _others(human, products) if isinstance(entries, list)),
    }
    return Catalogue(list(products.values()), str(files.products), skipped, left)


def _others(by_code: dict[str, Any], products: dict[str, Product]) -> list[Any]:
    """What stands under the codes of no product; it may be anything."""
    return [value for code, value in by_code.items() if code not in products]


def _by_code(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise DataError(f"{path} must hold an object by product code; it holds a {type(value).__name__}")
    return value


def _matching(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    return sorted(file for file in folder.iterdir() if pattern.fullmatch(file.name))


def _number(file: Path) -> str:
    """The number of products that a file's name ends in, "" where there is none."""
    found = re.search(r"_(\d+)\.", file.name)
    return found.group(1) if found else ""
