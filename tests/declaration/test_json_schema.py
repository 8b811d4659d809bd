"""The editors' schema: made from the loader's layout, in the tree as made, and in agreement with the loader."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from dsv4_matrix.declaration import layout
from dsv4_matrix.declaration.grammar import Record
from dsv4_matrix.declaration.json_schema import SCHEMA_FILE, schema_text

RECORDS = {name: value for name, value in vars(layout).items() if isinstance(value, Record) and name != "FILE"}


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def _plain(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


def test_file_is_as_made() -> None:
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text(), (
        "the layout changed; run: python -m dsv4_matrix.declaration.json_schema"
    )


def test_own_matrix_refers_to_it_and_validates(
    validator: jsonschema.Draft202012Validator, request: pytest.FixtureRequest
) -> None:
    path = request.config.rootpath / "matrix.yaml"
    text = path.read_text(encoding="utf-8")
    reference = text.splitlines()[0].removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / reference).samefile(SCHEMA_FILE)
    assert [error.json_path for error in validator.iter_errors(_plain(text))] == []


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_every_key_is_in_the_schema_and_no_other(name: str, validator: jsonschema.Draft202012Validator) -> None:
    record = RECORDS[name]
    made = validator.schema["$defs"][record.title.split()[-1]]
    assert set(made["properties"]) == set(record.keys)
    assert set(made["required"]) == {key for key, value in record.keys.items() if value.required}
    assert made["additionalProperties"] is False


def test_every_field_of_a_variant_can_be_declared() -> None:
    from dataclasses import fields

    from dsv4_matrix.declaration import Variant

    assert {field.name for field in fields(Variant)} - {"place"} == set(layout.VARIANT.keys)


SHAPE_MISTAKES = [
    ("name: decode,", "name: decode, prefix_len: [1],"),
    ("name: decode,", "name: decode, heads: 48,"),
    ("name: decode,", "name: decode, large_pool: 1,"),
    ("name: decode,", "name: Decode,"),
    ("prefix_lens: [0]", "prefix_lens: [true]"),
    ("prefix_lens: [0]", "prefix_lens: 0"),
    ("state: deferred", "state: skipped"),
    ("    reason: Ratio 4 is not wired up yet.\n", ""),
    ("{state: covered, profiles: [chains]}", "{state: covered}"),
    ("{state: covered, profiles: [chains]}", "{state: covered, profiles: [chains], reason: Because it is so.}"),
    ("site: own-step, raises: ValueError, match: invalid", "site: nowhere, raises: ValueError, match: invalid"),
    ("  r0/verify-cg:", "  verify-cg:"),
    ("ratios: [0, 4]", "ratios: [0, 4, 0]"),
]


@pytest.mark.parametrize(("old", "new"), SHAPE_MISTAKES)
def test_mistakes_of_shape_are_seen_by_the_editor_too(
    old: str, new: str, edited: Callable[..., bytes], validator: jsonschema.Draft202012Validator
) -> None:
    assert list(validator.iter_errors(_plain(edited().decode()))) == []
    assert list(validator.iter_errors(_plain(edited((old, new)).decode()))) != []
