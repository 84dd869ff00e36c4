"""The published schema of preflight reports."""

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.goldens import check_golden
from tests.predict.preflight.examples import ALL, FITTING
from xlashard.analysis.explain import model as program_model
from xlashard.predict.preflight.report import preflight_model, pricing, step_model
from xlashard.predict.preflight.report.preflight_report import PreflightReport, make_schema
from xlashard.support.documents import attribute_texts

PUBLISHED = Path(__file__).with_name("preflight.schema.json")

# Documented by the report class that derives from it, or no part of a report.
HOLDERS = (preflight_model.PreflightFields, step_model.FoldedSpan, step_model.FoldedTimeline)


def test_published_schema_is_up_to_date(update_goldens: bool) -> None:
    text = json.dumps(make_schema(), indent=2, ensure_ascii=False) + "\n"
    by = "make goldens ARGS=tests/predict/preflight/report"
    check_golden(PUBLISHED, text, update=update_goldens, by=by)


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("name", ALL)
def test_reports_match_the_schema(name: str, validator: jsonschema.Draft202012Validator) -> None:
    validator.validate(ALL[name].to_dict())


@pytest.mark.parametrize(
    "change",
    [
        {"format": 5},
        {"outcome": "maybe"},
        {"mesh": [{"name": "x"}]},
        {"compile_seconds": "long"},
        {"throughput": {}},
        {"versions": None},
    ],
)
def test_schema_rejects_invalid_documents(
    change: dict[str, Any], validator: jsonschema.Draft202012Validator
) -> None:
    assert not validator.is_valid({**FITTING.to_dict(), **change})


def test_every_field_of_every_dataclass_is_described() -> None:
    kinds = [
        kind
        for module in (preflight_model, pricing, step_model, program_model)
        for kind in vars(module).values()
        if isinstance(kind, type) and is_dataclass(kind) and kind not in HOLDERS
    ]
    assert len(kinds) > 15
    for kind in (PreflightReport, *kinds):
        assert list(attribute_texts(kind)) == [f.name for f in fields(kind)], kind
