"""A game's texts, as TextWorld's grammar for PDDL games derives them, without parsing and copying at every step.

TextWorld parses symbols and conjunctive queries anew whenever it derives a text, and copies the whole context for
each symbol. Here its own parser is run once for each grammar, and what it gives is turned into small objects; contexts
are two dictionaries. The derivation follows TextWorld's step by step (the order of facts, of types and of rules), so
that the texts are the same.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Any

from .upstream import GameError, textworld

Fact = tuple[str, tuple[str, ...]]
"""A predicate and the names of its arguments."""

Key = tuple[str, tuple[str, ...]]
"""A predicate and the types of its arguments."""

Placeholder = tuple[str, str]
"""Name and type of a variable in a rule."""

Value = tuple[str, str]
"""Name and type of what a placeholder stands for."""

Subtypes = Callable[[tuple[str, ...]], "list[tuple[str, ...]]"]
"""The types that arguments may have where a rule names these, in TextWorld's order."""

_TASK = re.compile(r'"Your task is to: ([A-Za-z0-9 .,]*)"')
_TASK_STANDS_FOR = '"Your task is to: TASK"'


@dataclass(frozen=True)
class Query:
    """A conjunction of predicates, each with its placeholders."""

    predicates: tuple[tuple[str, tuple[Placeholder, ...]], ...]


@dataclass(frozen=True)
class Literal:
    """Text."""

    text: str


@dataclass(frozen=True)
class Rule:
    """What `#name#` becomes: the first of the rules with that name whose condition holds."""

    name: str


@dataclass(frozen=True)
class Expression:
    """A Python expression over the entities that the context names."""

    code: CodeType


@dataclass(frozen=True)
class Each:
    """A symbol for each way to fulfil a query; as a list, separated by commas and "and"."""

    symbol: Rule | Expression
    query: Query | None
    as_list: bool


Symbol = Literal | Rule | Expression | Each


@dataclass
class Context:
    """What the symbols of a text are about.

    entities: by the names that expressions use.
    mapping: what placeholders stand for.
    """

    entities: dict[str, Any] = field(default_factory=dict)
    mapping: dict[Placeholder, Value] = field(default_factory=dict)


class Facts:
    """What is true, with the types of the arguments, ordered as TextWorld orders it.

    Args:
        types: of all things, by name.
        subtypes: what arguments may be.
        changing: predicates that actions change; copies share the facts of the others.
    """

    def __init__(self, types: Mapping[str, str], subtypes: Subtypes, changing: frozenset[str]) -> None:
        self.changing = changing
        self._types = types
        self._subtypes = subtypes
        self._sets: dict[Key, set[tuple[str, ...]]] = {}

    def add(self, fact: Fact) -> None:
        """Make a fact true."""
        self._sets.setdefault(self._key(fact), set()).add(fact[1])

    def discard(self, fact: Fact) -> None:
        """Make a fact false."""
        known = self._sets.get(self._key(fact))
        if known is not None:
            known.discard(fact[1])

    def copy(self) -> Facts:
        """Facts that change independently."""
        new = Facts(self._types, self._subtypes, self.changing)
        new._sets = {key: set(known) if key[0] in self.changing else known for key, known in self._sets.items()}
        return new

    def __iter__(self) -> Iterator[Fact]:
        for (predicate, _), known in self._sets.items():
            for arguments in known:
                yield predicate, arguments

    def of(self, *predicates: str) -> Iterator[Fact]:
        """The facts of some predicates."""
        for (predicate, _), known in self._sets.items():
            if predicate in predicates:
                for arguments in known:
                    yield predicate, arguments

    def _key(self, fact: Fact) -> Key:
        predicate, arguments = fact
        return predicate, tuple([self._types[argument] for argument in arguments])

    def solutions(self, query: Query, mapping: Mapping[Placeholder, Value]) -> Iterator[dict[Placeholder, Value]]:
        """All ways to fulfil a query, each as the whole mapping; different placeholders stand for different things."""
        found = dict(mapping)
        seen = set(found)
        new: list[list[Placeholder]] = []
        for _, placeholders in query.predicates:
            new.append([])
            for placeholder in placeholders:
                if placeholder not in seen:
                    new[-1].append(placeholder)
                    seen.add(placeholder)
        yield from self._solve(query, found, set(found.values()), new, 0)

    def _solve(
        self,
        query: Query,
        mapping: dict[Placeholder, Value],
        used: set[Value],
        new: list[list[Placeholder]],
        depth: int,
    ) -> Iterator[dict[Placeholder, Value]]:
        if depth == len(query.predicates):
            yield dict(mapping)
            return
        predicate, placeholders = query.predicates[depth]
        for types in self._subtypes(tuple([type_ for _, type_ in placeholders])):
            for arguments in sorted(self._sets.get((predicate, types), ())):
                for placeholder, value in zip(placeholders, zip(arguments, types, strict=True), strict=True):
                    known = mapping.get(placeholder)
                    if known is None:
                        if value in used:
                            break
                        mapping[placeholder] = value
                        used.add(value)
                    elif known != value:
                        break
                else:
                    yield from self._solve(query, mapping, used, new, depth + 1)
                for placeholder in new[depth]:
                    dropped = mapping.pop(placeholder, None)
                    if dropped is not None:
                        used.discard(dropped)


class Grammar:
    """The rules of a game's texts, and the templates of its actions.

    Args:
        rules: by name, (condition or None, symbols) in their order.
        actions: by lower-cased name, the template of its command and of what it answers.
    """

    def __init__(
        self,
        rules: Mapping[str, list[tuple[Query | None, list[Symbol]]]],
        actions: Mapping[str, tuple[list[Symbol], list[Symbol]]],
    ) -> None:
        self.rules = rules
        self.actions = actions

    def with_task(self, task: str) -> Grammar:
        """The same grammar with the sentence of another task."""
        rules = dict(self.rules)
        rules["task"] = [(None, [Literal(f"Your task is to: {task}")])]
        return Grammar(rules, self.actions)

    def derive(self, start: Iterable[Symbol], facts: Facts, entities: Mapping[str, Any], context: Context) -> str:
        """A text: `start` with everything replaced by what it stands for.

        Raises GameError where a rule is missing, and what expressions raise.
        """
        text: list[str] = []
        stack: list[tuple[Symbol, Context]] = [(symbol, context) for symbol in reversed(list(start))]
        while stack:
            symbol, here = stack.pop()
            if isinstance(symbol, Literal):
                text.append(symbol.text)
            elif isinstance(symbol, Expression):
                text.append(str(eval(symbol.code, {"__builtins__": {}}, here.entities)))
            elif isinstance(symbol, Rule):
                stack += [(part, here) for part in reversed(self._chosen(symbol.name, facts, here))]
            else:
                parts: list[tuple[Symbol, Context]] = [
                    (symbol.symbol, one) for one in _contexts(symbol.query, facts, entities, here)
                ]
                stack += reversed(_listed(parts, here) if symbol.as_list else parts)
        return "".join(text)

    def _chosen(self, name: str, facts: Facts, context: Context) -> list[Symbol]:
        for condition, symbols in self.rules.get(name, ()):
            if condition is None or next(facts.solutions(condition, context.mapping), None) is not None:
                return symbols
        raise GameError(f"its grammar has no rule #{name}# that applies")


def predicates_of(symbols: Iterable[Symbol]) -> set[str] | None:
    """The predicates that a text depends on; None where it depends on rules, which may name any."""
    found: set[str] = set()
    for symbol in symbols:
        if isinstance(symbol, Rule) or (isinstance(symbol, Each) and isinstance(symbol.symbol, Rule)):
            return None
        if isinstance(symbol, Each) and symbol.query is not None:
            found.update(predicate for predicate, _ in symbol.query.predicates)
    return found


def _contexts(query: Query | None, facts: Facts, entities: Mapping[str, Any], context: Context) -> list[Context]:
    if query is None:
        return [context]
    found = []
    for solution in facts.solutions(query, context.mapping):
        named = {name: entities[value[0]] for (name, _), value in solution.items()}
        found.append(Context({**context.entities, **named}, {**context.mapping, **solution}))
    return found


def _listed(parts: list[tuple[Symbol, Context]], context: Context) -> list[tuple[Symbol, Context]]:
    """Parts with what separates them in a list."""
    if not parts:
        return [(Rule("list_empty"), context)]
    listed = [parts[0]]
    for i, part in enumerate(parts[1:], start=2):
        listed += [(Rule("list_last_separator" if i == len(parts) else "list_separator"), context), part]
    return listed


# From TextWorld's parsers


def parse_grammar(text: str) -> Grammar:
    """The grammar of a game (`grammar` in its file).

    Games of ALFWorld differ in the sentence of the task only, so that they are parsed once.

    Raises GameError where TextWorld cannot parse it or an expression is more than attributes put together.
    """
    found = _TASK.search(text)
    if found is None or len(_TASK.findall(text)) > 1:
        return _parsed(text)
    return _parsed(_TASK.sub(_TASK_STANDS_FOR, text)).with_task(found.group(1))


@lru_cache(maxsize=16)
def _parsed(text: str) -> Grammar:
    logic = textworld("envs.pddl.logic")
    try:
        parsed = logic.GameLogic(domain="", grammar=text)
        rules = {
            name: [(_query(rule.condition), [_symbol(symbol) for symbol in rule.rhs]) for rule in rules]
            for name, rules in parsed.grammar._rules.items()
        }
        actions = {
            name: (_symbols(action.template), _symbols(action.feedback_rule)) for name, action in parsed.actions.items()
        }
    except GameError:
        raise
    except Exception as error:
        raise GameError(f"its grammar cannot be parsed ({type(error).__name__}: {error})") from error
    return Grammar(rules, actions)


def _symbols(text: str) -> list[Symbol]:
    parse = textworld("envs.pddl.textgen")._parse_and_convert
    return [_symbol(symbol) for symbol in parse(text, rule_name="symbols")]


@lru_cache(maxsize=256)
def _query(text: str | None) -> Query | None:
    if not text:
        return None
    rule = textworld("logic").Rule.parse_conjunctive_query(text)
    return Query(tuple((pred.name, tuple((p.name, p.type) for p in pred.parameters)) for pred in rule.preconditions))


def _symbol(symbol: Any) -> Symbol:
    textgen = textworld("envs.pddl.textgen")
    if isinstance(symbol, textgen.TerminalSymbol):
        return Literal(str(symbol))
    if isinstance(symbol, textgen.NonterminalSymbol):
        return Rule(str(symbol))
    if isinstance(symbol, textgen.EvalSymbol):
        return Expression(_checked(symbol.expression))
    if isinstance(symbol, textgen.ListSymbol):
        inner = _symbol(symbol.symbol)
        assert isinstance(inner, Each)
        return Each(inner.symbol, inner.query, as_list=True)
    if isinstance(symbol, textgen.ConditionalSymbol):
        expression = _symbol(symbol.expression)
        assert isinstance(expression, Rule | Expression)
        return Each(expression, _query(symbol.given), as_list=False)
    raise GameError(f"its grammar has an unknown symbol {symbol!r}")


_ALLOWED = (ast.Expression, ast.Attribute, ast.Name, ast.Load, ast.Constant, ast.BinOp, ast.Add, ast.BoolOp, ast.Or)


def _checked(expression: str) -> CodeType:
    """A compiled expression. Game files come from others, and TextWorld evaluates what they say: nothing but attributes
    that are put together is let through."""
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError as error:
        raise GameError(f"its grammar has a malformed expression {expression!r}") from error
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED) or (isinstance(node, ast.Attribute) and node.attr.startswith("_")):
            raise GameError(f"its grammar has an expression that is not allowed: {expression!r}")
    return compile(tree, "<grammar>", "eval")
