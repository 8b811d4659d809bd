"""The JSON Schema that editors complete and check matrix.yaml by, made from the layout that the loader reads by.

``python -m dsv4_matrix.declaration.json_schema`` rewrites ``matrix.schema.json`` beside this module.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dsv4_matrix.declaration.layout import FILE

SCHEMA_FILE = Path(__file__).with_name("matrix.schema.json")


def schema() -> dict[str, Any]:
    """Draft 2020-12. Narrower mistakes, such as impossible lengths, are the loader's alone."""
    defs: dict[str, Any] = {}
    root = FILE.json_schema(defs)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "matrix.yaml of dsv4-matrix",
        **root,
        "$defs": dict(sorted(defs.items())),
    }


def schema_text() -> str:
    """``schema`` as the file holds it."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
