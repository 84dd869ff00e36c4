"""Tables of rules that programs of 2022 read and wrote, over the tables of today's JAX.

A rule that is read, or written, has the arguments of then; JAX's own tables have others today.
"""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from xlashard._jax.legacy_api import ad, batching, core, mlir
from xlashard._jax.lowering import lowering_entries
from xlashard.legacy.modules.interpreters import refuse_lowering, register_translation

type Rule = Any
"""Function, or `FunctionTranslation`."""


class RuleTable(MutableMapping[Any, Rule]):
    """Table of rules by primitive.

    Args:
        tables: Today's tables; the first that has a primitive is in force.
        convert: Returns the rule of then, from a primitive and its rule of today.
        register: Registers a rule of then for a primitive.
    """

    def __init__(
        self,
        tables: Sequence[MutableMapping[Any, Any]],
        convert: Callable[[Any, Any], Rule],
        register: Callable[[Any, Rule], None],
    ) -> None:
        self._tables = tables
        self._convert = convert
        self._register = register

    def __getitem__(self, primitive: Any) -> Rule:
        return self._convert(primitive, self._find_table(primitive)[primitive])

    def __setitem__(self, primitive: Any, rule: Rule) -> None:
        self._register(primitive, rule)

    def __delitem__(self, primitive: Any) -> None:
        self._find_table(primitive)
        for table in self._tables:
            table.pop(primitive, None)

    def __iter__(self) -> Iterator[Any]:
        return iter({primitive: None for table in self._tables for primitive in table})

    def __len__(self) -> int:
        return len(list(iter(self)))

    def _find_table(self, primitive: Any) -> MutableMapping[Any, Any]:
        for table in self._tables:
            if primitive in table:
                return table
        raise KeyError(primitive)  # no-catalogue: Python's own message for a missing key


# Batching.


def _tabulate_batchers(leading: Callable[[Any], tuple[Any, ...]]) -> RuleTable:
    """Return a table of batching rules.

    Args:
        leading: Returns the arguments of a rule above values and dimensions, from what JAX passes
            about the axis.
    """

    def convert(primitive: Any, rule: Any) -> Rule:
        is_written = isinstance(rule, partial) and rule.func is call_written
        return rule.args[1] if is_written else partial(_call_batcher, rule)

    def call_written(
        primitive: Any, rule: Rule, axis: Any, values: Any, dims: Any, **params: Any
    ) -> Any:
        if all(dim is None for dim in dims):
            # No rule of then was called for these.
            out = primitive.bind(*values, **params)
            return (out, [None] * len(out)) if primitive.multiple_results else (out, None)
        return rule(*leading(axis), values, dims, **params)

    def register(primitive: Any, rule: Rule) -> None:
        rules[primitive] = partial(call_written, primitive, rule)

    rules = batching.fancy_primitive_batchers
    return RuleTable([rules], convert, register)


def _call_batcher(rule: Rule, *arguments: Any, **params: Any) -> Any:
    """Call a rule of today with the arguments of then."""
    *leading, values, dims = arguments
    sizes = [np.shape(x)[dim] for x, dim in zip(values, dims, strict=True) if dim is not None]
    # The type of the trace, which the last of them is, has no meaning today.
    *spmd_name, size, name = leading[:-1] or (*sizes[:1], core.no_axis_name)
    axis = batching.AxisData(name, size, spmd_name[0] if spmd_name else None, None)
    return rule(axis, values, dims, **params)


primitive_batchers = _tabulate_batchers(lambda axis: ())
axis_primitive_batchers = _tabulate_batchers(lambda axis: (axis.size, axis.name, None))
spmd_axis_primitive_batchers = _tabulate_batchers(
    lambda axis: (axis.spmd_name, axis.size, axis.name, None)
)


# Derivatives.


def _convert_transpose(primitive: Any, rule: Any) -> Rule:
    return rule if primitive in ad.primitive_transposes else partial(_call_transpose, rule)


def _call_transpose(rule: Rule, cotangents: Any, *primals: Any, **params: Any) -> list[Any]:
    """Call a rule that accumulates cotangents, and return these."""
    arguments = [ad.ValAccum(x.aval) if isinstance(x, ad.UndefinedPrimal) else x for x in primals]
    rule(cotangents, *arguments, **params)
    return [x.freeze() if isinstance(x, ad.ValAccum) else None for x in arguments]


def _write_transpose(primitive: Any, rule: Rule) -> None:
    # JAX reads the other table first.
    ad.fancy_transposes.pop(primitive, None)
    ad.primitive_transposes[primitive] = rule


def _write_jvp(primitive: Any, rule: Rule) -> None:
    # Reverse mode reads the other table first.
    ad.primitive_linearizations.pop(primitive, None)
    ad.primitive_jvps[primitive] = rule


primitive_transposes = RuleTable(
    [ad.primitive_transposes, ad.fancy_transposes], _convert_transpose, _write_transpose
)
primitive_jvps = RuleTable([ad.primitive_jvps], lambda primitive, rule: rule, _write_jvp)


# Lowering.


lowerings = RuleTable(
    [lowering_entries()], lambda primitive, entry: entry.rule, mlir.register_lowering
)


class _TranslationsByPlatform(dict[str, RuleTable]):
    """Tables of translations, by platform."""

    def __missing__(self, platform: str) -> RuleTable:
        self[platform] = table = _tabulate_translations(platform)
        return table


def _tabulate_translations(platform: str | None) -> RuleTable:
    # What JAX has instead emits MLIR: such a rule can be found, and not be called.
    register = partial(register_translation, platform=platform)
    return RuleTable([lowering_entries()], lambda primitive, entry: refuse_lowering, register)


translations = _tabulate_translations(None)
backend_specific_translations = _TranslationsByPlatform()
